import asyncio

from common import KEY, MODEL, QUESTION, URL, V1, ran, report
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


settings = {"max_tokens": 120, "temperature": 0.0, "timeout": 300}
chat = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=V1, api_key=KEY))
responses = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=V1, api_key=KEY))
claude = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
WHO = "Ann is 33 years old. Who is it?"


def get_weather(city: str) -> str:
    """The weather in a city now."""
    return f"Sunny in {city}."


for model in (chat, responses, claude):
    kind = type(model).__name__
    ran(f"{kind} text", Agent(model, model_settings=settings).run_sync("Say hello.").output)
    found = Agent(model, output_type=ToolOutput(Person), model_settings=settings).run_sync(WHO).output
    ran(f"{kind} tool output", isinstance(found, Person))
for model in (chat, responses):
    kind = type(model).__name__
    found = Agent(model, output_type=NativeOutput(Person), model_settings=settings).run_sync(WHO).output
    ran(f"{kind} native output", isinstance(found, Person))
    both = Agent(model, output_type=NativeOutput(Person), tools=[get_weather], model_settings=settings)
    ran(f"{kind} native output beside tools", isinstance(both.run_sync(WHO).output, Person))
agent = Agent(chat, tools=[get_weather], model_settings=settings)
ran("tools", agent.run_sync(QUESTION).output)
ran("prompted output", isinstance(
    Agent(chat, output_type=PromptedOutput(Person), model_settings=settings, retries=3).run_sync(WHO).output, Person
))  # fmt: skip


async def streamed() -> str:
    async with Agent(chat, model_settings=settings).run_stream("Say hello.") as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


ran("stream", asyncio.run(streamed()))
report("pydantic-ai-slim")
