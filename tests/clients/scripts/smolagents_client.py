from common import KEY, MODEL, QUESTION, V1, ran, report
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """The weather in a city now.

    Args:
        city: The city.
    """
    return f"Sunny in {city}."


model = OpenAIServerModel(model_id=MODEL, api_base=V1, api_key=KEY, max_tokens=120, temperature=0)
ran("generate", model.generate([{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]).content)
agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=2, verbosity_level=0)
ran("ToolCallingAgent", agent.run(QUESTION) is not None)
calls = [call.name for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or ()]
ran("its calls", "get_weather" in calls or "final_answer" in calls)
ran("CodeAgent", CodeAgent(tools=[], model=model, max_steps=1, verbosity_level=0).run("What is 2 + 3?") is not None)
report("smolagents")
