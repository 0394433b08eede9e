from common import KEY, MODEL, QUESTION, V1, ran, report
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city now."""
    return f"Sunny in {city}."


llm = OpenAILike(
    model=MODEL, api_base=V1, api_key=KEY, is_chat_model=True, is_function_calling_model=True, temperature=0,
    max_tokens=60, max_retries=0, timeout=300, context_window=8192,
)  # fmt: skip
ran("chat", llm.chat([ChatMessage(role="user", content="Say hello.")]).message.content)
ran("stream_chat", [piece.delta for piece in llm.stream_chat([ChatMessage(role="user", content="Say hello.")])])
ran("complete", llm.complete("Say hello.").text)
tool = FunctionTool.from_defaults(fn=get_weather)
answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
calls = llm.get_tool_calls_from_response(answer)
ran("chat_with_tools, required", calls[0].tool_name == "get_weather")
program = FunctionCallingProgram.from_defaults(
    output_cls=Person, prompt_template_str="Ann is 33 years old: {what}", llm=llm, tool_required=True
)
ran("structured program", isinstance(program(what="who is it?"), Person))
ran("predict_and_call", "Sunny" in str(llm.predict_and_call([tool], user_msg=QUESTION, tool_required=True)))
report("llama-index-llms-openai-like")
