"""The clients that the plain suite has, with the default model: an agent's first try works."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.serve.server import KEY, Server

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
CITY["additionalProperties"] = False
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY}}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


class Answer(BaseModel):
    good: bool


@pytest.fixture
def ai(chat_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=chat_server.url + "/v1", api_key=KEY, max_retries=0, timeout=120)


def test_openai_tools_and_parsing(ai: openai.OpenAI, chat_server: Server) -> None:
    common = {"model": chat_server.model, "messages": ASK, "max_tokens": 80, "temperature": 0}
    called = ai.chat.completions.create(**common, tools=[WEATHER], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"]
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees."}
    turns = [*ASK, called.choices[0].message, result]
    again = ai.chat.completions.create(**{**common, "messages": turns}, tools=[WEATHER])
    assert again.choices[0].finish_reason in ("stop", "length", "tool_calls")
    parsed = ai.chat.completions.parse(**common, response_format=Answer).choices[0].message
    assert isinstance(parsed.parsed, Answer)
    both = ai.chat.completions.create(
        **{**common, "messages": [*ASK, parsed, *ASK]},
        tools=[WEATHER],
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": Answer.model_json_schema()}},
    )
    assert both.choices[0].finish_reason in ("stop", "tool_calls", "length")
    assert called._request_id and called.system_fingerprint


def test_openai_responses(ai: openai.OpenAI, chat_server: Server) -> None:
    common = {"model": chat_server.model, "input": "Is 7 prime?", "max_output_tokens": 60}
    parsed = ai.responses.parse(**common, text_format=Answer, store=True, truncation="auto", include=[])
    assert isinstance(parsed.output_parsed, Answer)
    history = [{"role": "user", "content": "Is 7 prime?"}, *parsed.output, {"role": "user", "content": "Sure?"}]
    assert ai.responses.create(**{**common, "input": history}).output


def test_anthropic_prefill_and_tools(chat_server: Server) -> None:
    claude = anthropic.Anthropic(base_url=chat_server.url, api_key=KEY, max_retries=0, timeout=120)
    common = {"model": chat_server.model, "max_tokens": 40}
    begun = [*ASK, {"role": "assistant", "content": "The weather in Paris is"}]
    more = claude.messages.create(**common, messages=begun)
    assert more.content[0].text and more._request_id
    tool = {"name": "get_weather", "description": "The weather.", "input_schema": CITY}
    called = claude.messages.create(**common, messages=ASK, tools=[tool], tool_choice={"type": "any"})
    block = called.content[0]
    assert block.type == "tool_use" and block.name == "get_weather"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny."}
    turns = [*ASK, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**common, messages=turns, tools=[tool]).stop_reason


def test_a_joke_does_not_loop(ai: openai.OpenAI, chat_server: Server) -> None:
    """Without a temperature the model samples as its makers advise, with a light penalty on repetition."""
    ask = [{"role": "user", "content": "Tell me a joke"}]
    answer = ai.chat.completions.create(model=chat_server.model, messages=ask, max_tokens=200, seed=1)
    words = answer.choices[0].message.content.split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    assert len(set(triples)) > 0.7 * len(triples), answer.choices[0].message.content
