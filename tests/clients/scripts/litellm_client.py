import litellm
from common import KEY, MODEL, QUESTION, URL, V1, WEATHER, ran, report
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


base = {"api_base": V1, "api_key": KEY, "max_tokens": 60, "temperature": 0, "timeout": 300, "num_retries": 0}
hello = [{"role": "user", "content": "Say hello."}]
ask = [{"role": "user", "content": QUESTION}]
name = f"openai/{MODEL}"
whole = litellm.completion(model=name, messages=hello, **base).choices[0].message.content
ran("completion", whole)
chunks = litellm.completion(model=name, messages=hello, stream=True, **base)
ran("stream", "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole)
required = litellm.completion(model=name, messages=ask, tools=[WEATHER], tool_choice="required", **base)
message = required.choices[0].message
ran("tools, required", message.tool_calls[0].function.name == "get_weather")
result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "get_weather", "content": "Sunny."}
ran("tool result", litellm.completion(model=name, messages=[*ask, message, result], tools=[WEATHER], **base).choices)
form = litellm.completion(model=name, messages=hello, response_format=Person, **base).choices[0].message.content
ran("response_format", Person.model_validate_json(form))
ran("metadata and user", litellm.completion(model=name, messages=hello, user="u", metadata={"a": "b"}, **base).choices)
ran("hosted_vllm", litellm.completion(model=f"hosted_vllm/{MODEL}", messages=hello, top_k=-1, **base).choices)
ran("text completion", litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="Once", **base).choices)
claude = litellm.completion(model=f"anthropic/{MODEL}", messages=hello, **{**base, "api_base": URL})
ran("anthropic", claude.choices[0].message.content)
ran("responses", litellm.responses(model=name, input="Say hello.", api_base=V1, api_key=KEY, max_output_tokens=20))
report("litellm")
