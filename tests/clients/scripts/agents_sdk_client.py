import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import KEY, MODEL, QUESTION, V1, ran, report
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=300)


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city now."""
    return f"Sunny in {city}."


async def main() -> None:
    for model in (OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)):
        kind = type(model).__name__
        short = ModelSettings(max_tokens=100, temperature=0)
        plain = Agent(name="A", instructions="Be brief.", model=model, model_settings=short)
        ran(f"{kind} text", (await Runner.run(plain, "Say hello.")).final_output)
        forced = ModelSettings(max_tokens=100, temperature=0, tool_choice="required")
        tooled = Agent(
            name="B", model=model, model_settings=forced, tools=[get_weather], tool_use_behavior="stop_on_first_tool"
        )
        result = await Runner.run(tooled, QUESTION, max_turns=3)
        ran(f"{kind} tools", any("Sunny" in str(item.raw_item) for item in result.new_items))
        typed = Agent(name="C", model=model, model_settings=short, output_type=Person)
        ran(f"{kind} output_type", isinstance((await Runner.run(typed, "Ann is 33.")).final_output, Person))
        both = Agent(name="D", model=model, model_settings=short, output_type=Person, tools=[get_weather])
        found = (await Runner.run(both, "Ann is 33. Who is it?", max_turns=6)).final_output
        ran(f"{kind} output_type beside tools", isinstance(found, Person))
        streamed = Runner.run_streamed(plain, "Say hello.")
        ran(f"{kind} stream", [event.type async for event in streamed.stream_events()])


asyncio.run(main())
report("openai-agents")
