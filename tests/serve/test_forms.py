"""Answers with a form: schemas, patterns, grammars, tools. What ends by itself is always of that form."""

from __future__ import annotations

import json
import re
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from tests import tiny
from tests.serve.conftest import TEMPLATE
from tests.serve.server import KEY, PATIENT, Server, events
from tests.serve.test_clients import GREEDY
from tests.text.test_history import TEMPLATES
from tests.text.test_parse import FORMS, written
from twostroke.engine.answer import StreamEvent
from twostroke.serve.api.chat import ChatRequest
from twostroke.serve.segments import CONTENT, REASONING, SegmentReader
from twostroke.serve.structured import AnswerFormat, FormContext
from twostroke.text.stream import StreamDecoder
from twostroke.text.tokenizer import from_folder

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 300, "seed": 3}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Finds a person.", "parameters": SCHEMA}}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and len(value["name"]) <= 6 and 0 <= value["age"] <= 99


def check_choice(choice: dict) -> None:
    assert choice["finish_reason"] == "stop", choice
    assert is_person(choice["message"]["content"])


def test_json_schema(client: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    response = client.post("/v1/chat/completions", json={**CHAT, "n": 4, "response_format": form})
    for choice in response.json()["choices"]:
        check_choice(choice)


def test_json_object_regex_and_grammar(client: httpx.Client) -> None:
    def ask(**form: object) -> str:
        response = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 400, "seed": 1, **form})
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] in ("stop", "length")
        return choice["text"] if choice["finish_reason"] == "stop" else ""

    text = ask(response_format={"type": "json_object"})
    assert not text or isinstance(json.loads(text), dict)
    assert re.fullmatch(r"[a-c]{3}-[0-9]+", ask(regex=r"[a-c]{3}-[0-9]{1,5}"))
    assert ask(grammar='root ::= "yes" | "no"') in ("yes", "no")


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"regex": "("}, "regex"),
        ({"grammar": "root ::= nothing"}, "grammar"),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "grammar"),
        ({"response_format": BAD_SCHEMA}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
def test_forms_that_cannot_be(client: httpx.Client, form: dict, param: str) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, **form})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_a_regex_that_explodes_harms_nobody(client: httpx.Client, server: Server) -> None:
    """It is refused, or answered within the caps; streams go on meanwhile."""
    response = client.post("/v1/completions", json={"prompt": "x", "regex": "(a{1,300}){1,300}" * 20, "max_tokens": 5})
    assert response.status_code in (200, 400), response.text
    assert server.health()["status"] == "ok"


def test_a_required_call(tooled: Server) -> None:
    ai = openai.OpenAI(base_url=tooled.url + "/v1", api_key=KEY, max_retries=0)
    settings = {**CHAT, "model": tooled.model, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    whole = ai.chat.completions.create(**settings).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls
    assert call.function.name == "look_up" and is_person(call.function.arguments)

    name, arguments, reason = "", "", None
    for chunk in ai.chat.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for piece in choice.delta.tool_calls or []:
                assert piece.index == 0
                name += piece.function.name or ""
                arguments += piece.function.arguments
    assert (name, arguments, reason) == ("look_up", call.function.arguments, "tool_calls")

    history = [*CHAT["messages"], whole.message, {"role": "tool", "tool_call_id": call.id, "content": "found"}]
    again = ai.chat.completions.create(**{**settings, "messages": history, "tool_choice": "none", "max_tokens": 5})
    assert again.choices[0].finish_reason in ("stop", "length") and not again.choices[0].message.tool_calls


def test_a_named_call_in_other_apis(tooled: Server) -> None:
    ai = openai.OpenAI(base_url=tooled.url + "/v1", api_key=KEY, max_retries=0)
    flat = {"type": "function", "name": "look_up", "parameters": SCHEMA}
    settings = {"model": tooled.model, "input": "Who?", "tools": [flat], "max_output_tokens": 300}
    choice = {"type": "function", "name": "look_up"}
    whole = ai.responses.create(**settings, tool_choice=choice, temperature=0)
    (item,) = whole.output
    assert item.type == "function_call" and is_person(item.arguments)
    streamed = list(ai.responses.create(**settings, tool_choice=choice, temperature=0, stream=True))
    assert streamed[-1].response.output[0].arguments == item.arguments
    deltas = [event.delta for event in streamed if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == item.arguments

    claude = anthropic.Anthropic(base_url=tooled.url, api_key=KEY, max_retries=0)
    tool = {"name": "look_up", "input_schema": SCHEMA}
    body = {"model": tooled.model, "max_tokens": 300, "messages": CHAT["messages"], "tools": [tool], **GREEDY}
    answer = claude.messages.create(**body, tool_choice={"type": "tool", "name": "look_up"})
    assert answer.stop_reason == "tool_use"
    (block,) = answer.content
    assert block.type == "tool_use" and set(block.input) == {"name", "age"}
    with claude.messages.stream(**body, tool_choice={"type": "any", "disable_parallel_tool_use": True}) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use" and set(final.content[0].input) == {"name", "age"}
    history = [
        *CHAT["messages"],
        {"role": "assistant", "content": [block.model_dump(include={"type", "id", "name", "input"})]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "found"}]},
    ]
    assert claude.messages.create(**{**body, "messages": history, "max_tokens": 5}).usage.output_tokens <= 5


def test_what_was_thought_and_called_may_be_sent_back(tooled: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"name": "Al"}'}}
    history = [{"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}]
    chat = {"messages": [*CHAT["messages"], *history, {"role": "tool", "tool_call_id": "call_1", "content": "1"}]}
    with tooled.client() as client:
        assert client.post("/v1/chat/completions", json={**chat, "max_tokens": 2}).status_code == 200
        for cut in ("{", '{"name": "A', "no JSON"):  # by max_tokens, or by the model itself
            call["function"]["arguments"] = cut
            assert client.post("/v1/chat/completions", json={**chat, "max_tokens": 2}).status_code == 200
        thought = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes"}]
        turns = [*CHAT["messages"], {"role": "assistant", "content": thought}, {"role": "user", "content": "And?"}]
        body = {"model": tooled.model, "messages": turns, "max_tokens": 2}
        assert client.post("/v1/messages", json=body).status_code == 200
        items = [
            *CHAT["messages"],
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "user", "content": "And?"},
        ]
        assert client.post("/v1/responses", json={"input": items, "max_output_tokens": 2}).status_code == 200


def test_a_form_in_a_stream(client: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    response = client.post("/v1/chat/completions", json={**CHAT, "response_format": form, "stream": True})
    documents = [json.loads(line) for line in events(response.text)[:-1]]
    text = "".join(d["choices"][0]["delta"].get("content") or "" for d in documents if d["choices"])
    assert is_person(text)


def test_what_a_grammar_binds_is_all_answer(tmp_path: Path) -> None:
    """A model that may think aloud does not when its answer has a form: marks in a string of JSON are text."""
    folder = tiny.tiny_llama(tmp_path / "thinks")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE + "<think></think>"}))
    tokenizer = from_folder(folder)
    text = '{"a": "<think>no</think>"}'

    def read(**more: object) -> SegmentReader:
        request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **more})
        reader = request.answer_format(FormContext(tokenizer)).reader("<|im_start|>assistant\n<think>")
        reader.push(StreamEvent(text, (1,), "stop", 0))
        return reader

    assert read().text(CONTENT) != text and read().text(REASONING)
    assert read(response_format={"type": "json_object"}).text(CONTENT) == text
    required = ChatRequest.model_validate({**CHAT, "tools": [TOOL], "tool_choice": "required"})
    forced = required.answer_format(FormContext(tokenizer))
    assert forced.grammar is not None and not forced.reasons


def read_answer(folder: Path, answer: str, prompt: str, **more: object) -> SegmentReader:
    """The answer as the engine decodes it: special tokens are skipped, except those that the form needs. prompt: its
    end."""
    tokenizer = from_folder(folder)
    form = ChatRequest.model_validate({**CHAT, **more}).answer_format(FormContext(tokenizer))
    reader = form.reader(prompt)
    decoder = StreamDecoder(tokenizer, at_start=False, visible=form.visible)
    for number in tokenizer.encode(answer, add_special=False):
        reader.push(StreamEvent(decoder.push([number]), (number,), None, 0))
    reader.push(StreamEvent("", (), "stop", 0))
    return reader


def test_channels_become_content_reasoning_and_calls(tmp_path: Path) -> None:
    folder, prompt = tiny.tiny_harmony(tmp_path / "harmony"), "<|start|>assistant"
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
    call = 'commentary to=functions.look_up <|constrain|>json<|message|>{"name": "A", "age": 3}<|call|>'
    plain = read_answer(folder, text + "final<|message|>Yes.<|return|>", prompt)
    assert (plain.text(REASONING), plain.text(CONTENT), plain.calls) == ("Hm.", "Yes.", [])
    called = read_answer(folder, text + call, prompt, tools=[TOOL])
    assert called.text(REASONING) == "Hm." and called.text(CONTENT) == ""
    assert [(one.name, json.loads(one.text)) for one in called.calls] == [("look_up", {"name": "A", "age": 3})]
    assert called.finish_reason("stop") == "tool_calls"
    without_tools = read_answer(folder, text + call, prompt)  # there is nothing to call
    assert without_tools.text(CONTENT) == '{"name": "A", "age": 3}'
    tokenizer = from_folder(folder)
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    bound = ChatRequest.model_validate({**CHAT, "response_format": form}).answer_format(FormContext(tokenizer))
    assert bound.grammar is not None and '"final"' in bound.grammar.source
    either = ChatRequest.model_validate({**CHAT, "response_format": form, "tools": [TOOL]})
    both = either.answer_format(FormContext(tokenizer)).grammar
    assert both is not None and '"final"' in both.source and "to=functions.look_up" in both.source
    ends = {tokenizer.token_id("<|return|>"), tokenizer.token_id("<|call|>")}
    assert ends <= tokenizer.eos_ids and tokenizer.token_id("<|end|>") not in tokenizer.eos_ids


@pytest.mark.parametrize("family", sorted(TEMPLATES.keys() - {"harmony"}))
def test_reasoning_and_calls_of_every_family(family: str, tmp_path: Path) -> None:
    """DeepSeek, Qwen3-Coder, GLM, Kimi, Mistral: marks are special tokens, or not; the prompt may begin the thought."""
    asked = {"name": "A", "age": 3}
    text = "Hm.</think>" + written(family, [("look_up", asked), ("look_up", asked)], False)
    template = TEMPLATES[family] + "{# </think> #}"
    for marks, prompt in ((FORMS[family].marks, "<think>\n"), ((), "")):
        folder = tiny.tiny_marked(tmp_path / str(len(marks)), marks, template)
        read = read_answer(folder, text if prompt else f"<think>{text}", prompt, tools=[TOOL])
        assert read.text(REASONING) == "Hm." and not read.text(CONTENT).strip()
        assert [(one.name, json.loads(one.text)) for one in read.calls] == [("look_up", asked)] * 2
        assert read.finish_reason("stop") == "tool_calls"


def test_how_many_calls_an_answer_has(tmp_path: Path) -> None:
    """A model without a form for tools calls one, unless the request says more; `parallel_tool_calls: false` holds
    whatever the model writes."""
    tokenizer = from_folder(tiny.tiny_llama(tmp_path / "untrained"))

    def form(**more: object) -> AnswerFormat:
        request = ChatRequest.model_validate({**CHAT, "tools": [TOOL], **more})
        return request.answer_format(FormContext(tokenizer))

    def several(**more: object) -> bool:
        grammar = form(tool_choice="required", **more).grammar
        assert grammar is not None
        return "{0,7}" in grammar.source

    assert not several() and not several(parallel_tool_calls=False) and several(parallel_tool_calls=True)
    call = '<tool_call>\n{"name": "look_up", "arguments": {"name": "A", "age": 3}}\n</tool_call>'
    for parallel, calls in ((None, 2), (True, 2), (False, 1)):
        reader = form(parallel_tool_calls=parallel).reader("")
        reader.push(StreamEvent(f"{call}\n{call}", (1,), "stop", 0))
        assert len(reader.calls) == calls and json.loads(reader.calls[0].text)["age"] == 3


@pytest.mark.slow
def test_qwen_calls_a_tool(tmp_path: Path) -> None:
    """A model that was trained for it decides by itself."""
    from twostroke.weights.catalog import fetch

    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city now.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    server = Server(fetch("qwen2.5-coder-0.5b"), threads=2).wait()
    try:
        ai = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=PATIENT)
        messages = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
        settings = {"model": server.model, "messages": messages, "tools": [weather], "temperature": 0, "max_tokens": 80}
        answer = ai.chat.completions.create(**settings, tool_choice="required").choices[0]
        assert answer.finish_reason == "tool_calls"
        assert json.loads(answer.message.tool_calls[0].function.arguments)["city"].startswith("Paris")
        own = ai.chat.completions.create(**settings).choices[0]  # auto: it may, and does
        assert own.finish_reason == "tool_calls" and own.message.tool_calls[0].function.name == "get_weather"
        assert json.loads(own.message.tool_calls[0].function.arguments)["city"].startswith("Paris")
        name, arguments = "", ""
        for chunk in ai.chat.completions.create(**settings, stream=True):
            for piece in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                name += piece.function.name or ""
                arguments += piece.function.arguments
        assert (name, arguments) == ("get_weather", own.message.tool_calls[0].function.arguments)
        greeting = [{"role": "user", "content": "Say hello."}]
        plain = ai.chat.completions.create(**{**settings, "messages": greeting}).choices[0]
        assert plain.finish_reason in ("stop", "length") and plain.message.content and not plain.message.tool_calls
    finally:
        server.stop()
