from common import KEY, MODEL, QUESTION, URL, V1, ran, report
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city now."""
    return f"Sunny in {city}."


chat = ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY, temperature=0, max_tokens=60, max_retries=0, timeout=300)
answer = chat.invoke("Say hello.")
ran("invoke", answer.content and answer.usage_metadata["output_tokens"] > 0)
ran("stream", "".join(chunk.content for chunk in chat.stream("Say hello.")) == answer.content)
ran("batch", len(chat.batch(["Say a.", "Say b.", "Say c."])) == 3)
for method in ("json_schema", "function_calling", "json_mode"):
    asked = "Ann is 33 years old. Answer as JSON with name and age."
    found = chat.with_structured_output(Person, method=method, include_raw=True).invoke(asked)
    ran(f"with_structured_output({method})", method == "json_mode" or isinstance(found["parsed"], Person))
forced = chat.bind_tools([get_weather], tool_choice="any").invoke(QUESTION)
ran("bind_tools, any", forced.tool_calls[0]["name"] == "get_weather")
call = forced.tool_calls[0]
history = [HumanMessage(QUESTION), forced, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
ran("tool result", chat.bind_tools([get_weather]).invoke(history).content is not None)
responses = ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY, use_responses_api=True, max_tokens=40, max_retries=0)
ran("responses", responses.invoke("Say hello.").text)
ran(
    "OpenAI completions", OpenAI(model=MODEL, base_url=V1, api_key=KEY, max_tokens=8, max_retries=0).invoke("Once upon")
)
claude = ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=40, max_retries=0, timeout=300)
ran("ChatAnthropic", claude.invoke("Say hello.").content)
bound = claude.bind_tools([get_weather], tool_choice="get_weather")
ran("ChatAnthropic tools", bound.invoke(QUESTION).tool_calls[0]["name"] == "get_weather")
report("langchain-openai")
