"""Fields have one of three fates. The table in docs/clients.md is made from the classes that check requests."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.serve.server import KEY, Server, events
from twostroke.serve import fates, field_table
from twostroke.text.chat import ChatTemplate
from twostroke.text.conversation import render_conversation

DOCS = Path(__file__).parents[2] / "docs" / "clients.md"
HELLO = [{"role": "user", "content": "hi"}]
CHAT = {"messages": HELLO, "max_tokens": 3, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
CLOSED = {**SCHEMA, "additionalProperties": False}
ANYTHING: list[object] = [None, "x", 3, True, ["x"], {"a": {"b": [1]}}]


def ask(client: httpx.Client, path: str = "/v1/chat/completions", **body: object) -> httpx.Response:
    response = client.post(path, json={**(CHAT if "chat" in path else {}), **body})
    assert response.status_code == 200, response.text
    return response


def ignored(response: httpx.Response) -> set[str]:
    return {name for name in response.headers.get("x-twostroke-ignored", "").split(", ") if name}


def test_the_documentation_is_the_table() -> None:
    assert field_table.markdown() in DOCS.read_text(), "python -m twostroke.serve.field_table prints the table"


def test_every_fate_has_words_and_no_words_are_left_over() -> None:
    rows = field_table.rows()
    for fate, known in (("hint", fates.HINTS), ("refused", fates.REFUSED)):
        used = {name.rpartition(".")[2] for kind, name, _, _ in rows if kind == fate}
        assert used == set(known), used ^ set(known)
    assert all(words for fate, _, _, words in rows if fate != "honoured")


@pytest.mark.parametrize(
    "name",
    ["metadata", "store", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
     "verbosity", "context_management", "usage", "provider", "session_id", "chat_id", "keep_alive", "cache_prompt",
     "num_ctx", "prediction", "cache_control"],
)  # fmt: skip
def test_a_hint_is_accepted_with_any_value_and_listed(client: httpx.Client, name: str) -> None:
    plain = ask(client).json()["choices"]
    for value in ANYTHING:
        response = ask(client, **{name: value})
        assert response.json()["choices"] == plain
        assert ignored(response) == (set() if value is None else {name})


EVERYWHERE = (
    "metadata", "store", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "verbosity", "include_obfuscation", "eager_input_streaming", "cache_control", "context_management", "truncation",
    "include", "usage", "provider", "session_id", "chat_id", "keep_alive", "cache_prompt", "num_ctx",
)  # fmt: skip
BODIES: dict[str, dict] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 2, "temperature": 0, "reasoning": None},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2, "temperature": 0},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2, "temperature": 0},
}


@pytest.mark.parametrize("path", BODIES)
def test_common_hints_on_every_route(client: httpx.Client, server: Server, path: str) -> None:
    body = {**BODIES[path], "model": server.model}
    plain = written(ask(client, path, **body))
    for value in ANYTHING[1:]:
        response = ask(client, path, **body, **dict.fromkeys(EVERYWHERE, value))
        assert written(response) == plain and ignored(response) == set(EVERYWHERE)


def written(response: httpx.Response) -> object:
    """The answer itself, in each API's place."""
    document = response.json()
    found = document.get("choices") or document.get("content")
    return found or document["output"][0]["content"]


def test_the_fields_of_the_official_libraries_are_known() -> None:
    """Each has a fate, so that none is refused as unknown."""
    from anthropic.types.message_create_params import MessageCreateParamsBase
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
    from openai.types.completion_create_params import CompletionCreateParamsBase as Completion
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    theirs = {"chat": Chat, "completions": Completion, "responses": ResponseCreateParamsBase,
              "messages": MessageCreateParamsBase}  # fmt: skip
    for route, params in theirs.items():
        known = {name for name, _ in field_table.fields(field_table.ROUTES[route])}
        assert not set(params.__annotations__) - known, route


def test_switches_of_reasoning_have_every_name_on_every_route(client: httpx.Client, server: Server) -> None:
    """The model's template has no switch, and a plain text has no template: all of them are hints."""
    given = {"reasoning_effort": "low", "enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}}
    for path, body in BODIES.items():
        listed = ignored(ask(client, path, **body, **given, **({"model": server.model} if "messages" in path else {})))
        assert {name.partition(".")[0] for name in listed} == set(given), path


def test_what_libraries_add_to_messages_on_every_route(client: httpx.Client, server: Server) -> None:
    added = dict.fromkeys(("id", "parsed", "provider_specific_fields", "reasoning", "reasoning_details",
                           "redacted_thinking", "thinking_blocks", "cache_control"), "x")  # fmt: skip
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "well"}]
    turns = [*HELLO, {"role": "assistant", "content": thought, **added}, *HELLO]
    plain = [*HELLO, {"role": "assistant", "content": thought[1:]}, *HELLO]
    for path, kind in (("/v1/chat/completions", "messages"), ("/v1/messages", "messages")):
        body = {**BODIES[path], "model": server.model}
        answer, other = (ask(client, path, **{**body, kind: some}) for some in (turns, plain))
        assert {f"messages.{name}" for name in added} <= ignored(answer)
        assert written(answer) == written(other), "the thought is not given to the model"
    items = [*HELLO, {"role": "assistant", "content": "well", **added, "name": "x"}, *HELLO]
    listed = ignored(ask(client, "/v1/responses", **{**BODIES["/v1/responses"], "input": items}))
    assert listed == {f"input.{name}" for name in (*added, "name")}


def test_empty_objects_mean_null(client: httpx.Client, server: Server) -> None:
    ask(client, response_format={}, tool_choice="", thinking={}, stream_options={}, chat_template_kwargs={})
    ask(client, "/v1/completions", prompt="hi", max_tokens=1, response_format={}, suffix="", stop=[], logit_bias={})
    more = {"text": {"format": {}}, "reasoning": {}, "tool_choice": {}, "prompt": {}, "instructions": "", "tools": []}
    ask(client, "/v1/responses", input="hi", max_output_tokens=1, **more)
    more = {"thinking": {}, "output_config": {"format": {}}, "tool_choice": {}, "system": "", "stop_sequences": []}
    ask(client, "/v1/messages", model=server.model, messages=HELLO, max_tokens=1, **more)


def test_hints_inside_messages_and_tools(client: httpx.Client, tooled: Server) -> None:
    """An answer is sent back as it came, with what the client's library added to it."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{", "parsed_arguments": None}}
    back = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "tool_calls": [call], "reasoning_content": "hm", "parsed": {"a": 1}, "provider_specific_fields": {}, "id": "x",
        "reasoning": "hm", "reasoning_details": [], "thinking_blocks": [],
    }  # fmt: skip
    turns = [*HELLO, back, {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "1"}]}]
    for one in (client, tooled.client()):
        listed = ignored(ask(one, messages=turns))
        assert listed == {f"messages.{name}" for name in (
            "parsed", "provider_specific_fields", "id", "reasoning", "reasoning_details", "thinking_blocks"
        )}  # fmt: skip
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    gone = {"type": "redacted_thinking", "data": "x"}
    turns = [{"role": "user", "content": [block]}, {"role": "assistant", "content": [gone, block]}, *HELLO]
    tool = {"name": "f", "input_schema": {}, "eager_input_streaming": True, "cache_control": None}
    more = {"model": tooled.model, "max_tokens": 2, "tools": [tool], "tool_choice": {"type": "none"}}
    with tooled.client() as other:
        listed = ignored(ask(other, "/v1/messages", messages=turns, **more))
    assert listed == {"messages.content.cache_control", "messages.content.data", "tools.eager_input_streaming"}


def test_null_and_empty_values_of_every_field(client: httpx.Client, server: Server) -> None:
    bodies = {"chat": CHAT, "completions": {"prompt": "hi"}, "responses": {"input": "hi", "max_output_tokens": 2}}
    needed = {"messages", "prompt", "input", "max_tokens", "max_output_tokens", "model", "temperature"}
    for route, body in bodies.items():
        names = [name for name, _ in field_table.fields(field_table.ROUTES[route]) if "." not in name]
        nulls = dict.fromkeys(set(names) - needed)
        path = "/v1/chat/completions" if route == "chat" else f"/v1/{route}"
        assert client.post(path, json={**nulls, **body}).status_code == 200
    empty = {
        "stop": "", "tools": [], "functions": [], "metadata": {}, "logit_bias": {}, "modalities": [], "user": "",
        "reasoning_effort": "", "top_k": -1, "top_logprobs": 0, "stop_token_ids": [], "chat_template_kwargs": {},
        "max_completion_tokens": 3, "stream_options": {"include_usage": True}, "regex": "", "guided_json": "",
        "function_call": None, "audio": None, "web_search_options": None, "tool_choice": "auto",
    }  # fmt: skip
    response = ask(client, **empty)
    assert ignored(response) == {"metadata", "user", "stream_options"}


@pytest.mark.parametrize("value", ["", "auto", 7, True, [], {"a": [1]}, {"include_usage": 3}])
def test_options_of_a_stream_without_one_are_a_hint(client: httpx.Client, value: object) -> None:
    """In a stream they must be right."""
    assert ignored(ask(client, stream_options=value)) == {"stream_options"}
    answer = ask(client, "/v1/responses", input="hi", max_output_tokens=1, stream_options=value)
    assert ignored(answer) == {"stream_options"}
    refused = client.post("/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": value})
    assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("stream_options")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
         "messages[0].content[0].type"),
        ("messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
         "messages[0].content[0].type"),
        ("messages", [{"role": "user", "content": [{"type": "file", "file": {}}]}], "messages[0].content[0].type"),
        ("tools", [{"type": "web_search_preview"}], "tools[0].type"),
        ("web_search_options", {"search_context_size": "low"}, "web_search_options"),
        ("audio", {"voice": "a"}, "audio"),
        ("use_beam_search", True, "use_beam_search"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(client: httpx.Client, field: str, value: object, param: str) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, field: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_field")
    assert len(error["message"]) > len(param) + 20


def test_refusals_of_the_other_apis(client: httpx.Client, server: Server) -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "", "media_type": "image/png"}}
    messages = [{"role": "user", "content": [image]}]
    more = {"model": server.model, "max_tokens": 1, "messages": messages}
    error = client.post("/v1/messages", json=more).json()["error"]
    assert "images" in error["message"] and error["param"] == "messages[0].content[0]"
    search = {"type": "web_search_20250305", "name": "web_search"}
    error = client.post("/v1/messages", json={**more, "messages": HELLO, "tools": [search]}).json()["error"]
    assert "web_search" in error["message"] and error["param"] == "tools[0].type"
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    error = client.post("/v1/responses", json={"input": items}).json()["error"]
    assert "images" in error["message"] and error["param"].startswith("input[0].content[0]")


def test_usage_in_every_chunk(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    once = {"prompt": "Once", "max_tokens": 40, "temperature": 0}  # some tokens are a part of a character: no chunk
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", once)):
        more = {"ignore_eos": True, "speculate": False, "stream": True, "stream_options": options}
        text = client.post(path, json={**body, **more}).text
        chunks = [json.loads(line) for line in events(text)[:-1]]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == body["max_tokens"] and len(set(counts)) > 2, counts
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


def test_every_answer_has_an_id_and_chats_a_fingerprint(client: httpx.Client, server: Server) -> None:
    answers = [client.get("/health/live"), client.get("/nothing"), client.get("/metrics"), ask(client)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 4
    own = client.get("/health", headers={"x-request-id": "abc-1"})
    assert own.headers["x-request-id"] == "abc-1"
    odd = client.get("/health", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] != "a b"
    prints = {ask(client).json()["system_fingerprint"] for _ in range(2)}
    assert len(prints) == 1 and prints.pop().startswith("fp_")
    body = {"model": server.model, "max_tokens": 1, "messages": HELLO}
    assert client.post("/v1/messages", json=body).headers["request-id"].startswith("req_")


def test_thinking_is_a_hint_without_a_switch(client: httpx.Client, server: Server) -> None:
    assert ignored(ask(client, reasoning_effort="low")) == {"reasoning_effort"}
    limited = {"type": "enabled", "budget_tokens": 5, "display": "omitted"}
    assert ignored(ask(client, thinking=limited)) == {"thinking", "thinking.budget_tokens", "thinking.display"}
    assert ignored(ask(client, enable_thinking=False)) == {"enable_thinking"}
    listed = ignored(ask(client, chat_template_kwargs={"enable_thinking": False}))
    assert listed == {"chat_template_kwargs.enable_thinking"}
    low = ask(client, "/v1/responses", input="hi", max_output_tokens=2, reasoning={"effort": "low", "summary": "auto"})
    assert ignored(low) == {"reasoning.effort", "reasoning.summary"}
    more = {"model": server.model, "max_tokens": 2, "messages": HELLO}
    thought = {"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}
    assert ignored(ask(client, "/v1/messages", **more, **thought)) == {"output_config.effort", "thinking"}


def test_what_a_form_says_to_the_model_is_listed(client: httpx.Client) -> None:
    form = {"name": "x", "description": "a or b", "schema": CLOSED}
    chat = ask(client, response_format={"type": "json_schema", "json_schema": form}, max_tokens=60)
    assert ignored(chat) == {"response_format.json_schema.description"}
    text = {"format": {"type": "json_schema", **form}}
    assert ignored(ask(client, "/v1/responses", input="hi", text=text, max_output_tokens=60)) == {
        "text.format.description"
    }
    text = {"format": {"type": "text", "schema": CLOSED}}
    refused = client.post("/v1/responses", json={"input": "hi", "text": text})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "text.format"
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    items = [{"role": "user", "content": "hi"}, thought, {"role": "user", "content": "well?"}]
    assert ignored(ask(client, "/v1/responses", input=items, max_output_tokens=2)) == {"input.content"}


def test_a_streamed_item_that_was_cut_says_so(client: httpx.Client) -> None:
    body = {"input": "hi", "max_output_tokens": 2, "temperature": 0, "stream": True}
    documents = [json.loads(line) for line in events(client.post("/v1/responses", json=body).text)]
    last = next(one["item"] for one in documents if one["type"] == "response.output_item.done")
    assert documents[-1]["type"] == "response.incomplete"
    assert last["status"] == documents[-1]["response"]["output"][-1]["status"] == "incomplete"


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object", "schema": CLOSED}},
        {"guided_json": CLOSED}, {"guided_json": json.dumps(CLOSED)}, {"json_schema": CLOSED},
        {"structured_outputs": {"json": CLOSED}},
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
    ],
)  # fmt: skip
def test_other_names_of_a_schema(client: httpx.Client, form: dict) -> None:
    text = ask(client, max_tokens=60, **form).json()["choices"][0]["message"]["content"]
    assert json.loads(text) in ({"a": True}, {"a": False})


@pytest.mark.parametrize(
    "form",
    [{"guided_choice": ['a "b"', "c"]}, {"guided_regex": 'a "b"|c'}, {"guided_grammar": 'root ::= "a \\"b\\"" | "c"'},
     {"structured_outputs": {"choice": ['a "b"', "c"]}}, {"structured_outputs": {"regex": 'a "b"|c'}}],
)  # fmt: skip
def test_other_names_of_a_text(client: httpx.Client, form: dict) -> None:
    assert ask(client, max_tokens=60, **form).json()["choices"][0]["message"]["content"] in ('a "b"', "c")


def test_two_names_of_one_value(client: httpx.Client) -> None:
    def text(**more: object) -> str:
        return ask(client, **{"max_tokens": 30, **more}).json()["choices"][0]["message"]["content"]

    assert text(repeat_penalty=1.9) == text(repetition_penalty=1.9) != text()
    assert ask(client, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3
    bad = client.post("/v1/chat/completions", json={**CHAT, "repeat_penalty": 1.5, "repetition_penalty": 1.4})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "repeat_penalty"


def test_special_tokens_in_the_text(client: httpx.Client) -> None:
    force = {"logit_bias": {"1": 100}, "max_tokens": 2}
    assert ask(client, **force).json()["choices"][0]["message"]["content"] == ""
    shown = ask(client, **force, skip_special_tokens=False).json()["choices"][0]["message"]["content"]
    assert shown == "<|im_start|><|im_start|>"


def test_an_answer_is_continued(client: httpx.Client, server: Server) -> None:
    whole = ask(client, max_tokens=12).json()["choices"][0]["message"]["content"]
    begun = whole[:7]
    turns = [*HELLO, {"role": "assistant", "content": begun}]
    more = ask(client, messages=turns, continue_final_message=True, max_tokens=12)
    prompt = client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    own = client.post("/tokenize", json={"prompt": begun, "add_special_tokens": False}).json()["tokens"]
    assert more.json()["usage"]["prompt_tokens"] == len(prompt) + len(own)
    claude = ask(
        client, "/v1/messages", model=server.model, messages=turns, max_tokens=12, temperature=0.0, top_k=1
    ).json()  # fmt: skip
    assert claude["content"][0]["text"] == more.json()["choices"][0]["message"]["content"]
    assert ask(client, add_generation_prompt=False).json()["usage"]["prompt_tokens"] < len(prompt)


def test_a_suffix_needs_tokens_for_it(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
    assert ask(client, "/v1/completions", prompt="a", suffix="", max_tokens=1)


def test_tools_and_a_form(tooled: Server, client: httpx.Client) -> None:
    """The grammar is calls or the form, in every API, with and without a form for tools in the template."""
    function = {"name": "look_up", "parameters": {**CLOSED, "properties": {"a": {"type": "boolean"}}}}
    for other in (tooled.client(), client):
        name = other.get("/v1/models").json()["data"][0]["id"]
        seen = set()
        for seed in range(6):
            chat = ask(
                other, tools=[{"type": "function", "function": function}], max_tokens=200, seed=seed, temperature=1.5,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": CLOSED}},
            ).json()["choices"][0]  # fmt: skip
            calls = chat["message"].get("tool_calls")
            seen.add(chat["finish_reason"])
            text = calls[0]["function"]["arguments"] if calls else chat["message"]["content"]
            assert chat["finish_reason"] == "length" or json.loads(text) in ({"a": True}, {"a": False})
        assert seen & {"stop", "tool_calls"}
        flat = {"type": "function", **function}
        form = {"format": {"type": "json_schema", "name": "x", "schema": CLOSED}}
        whole = ask(other, "/v1/responses", input="hi", tools=[flat], text=form, max_output_tokens=200).json()
        assert whole["output"][0]["type"] in ("message", "function_call")
        tool = {"name": "look_up", "input_schema": CLOSED}
        more = {"model": name, "messages": HELLO, "max_tokens": 200}
        form = {"output_config": {"format": {"type": "json_schema", "schema": CLOSED}}}
        claude = ask(other, "/v1/messages", **more, **form, tools=[tool]).json()
        assert claude["content"][0]["type"] in ("text", "tool_use")


def test_a_model_without_a_form_for_tools_calls_them(client: httpx.Client, server: Server) -> None:
    function = {"name": "look_up", "description": "Finds.", "parameters": CLOSED}
    tools = [{"type": "function", "function": function}]
    choices = ["required", {"type": "function", "function": {"name": "look_up"}}]
    for choice in choices:
        more = {"tools": tools, "tool_choice": choice, "max_tokens": 200}
        found = ask(client, **more).json()["choices"][0]
        (call,) = found["message"]["tool_calls"]  # it was not trained to end after one
        assert found["finish_reason"] == "tool_calls" and call["function"]["name"] == "look_up"
        assert json.loads(call["function"]["arguments"]) in ({"a": True}, {"a": False})
        turns = [*HELLO, found["message"], {"role": "tool", "tool_call_id": call["id"], "content": "1"}]
        ask(client, messages=turns, tools=tools)
    assert ask(client, tools=tools).json()["choices"][0]["finish_reason"] in ("length", "stop", "tool_calls")


def test_unique_items_hold_or_are_listed(client: httpx.Client) -> None:
    few = {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3}
    many = {"type": "array", "items": {"type": "integer", "maximum": 9}, "uniqueItems": True, "maxItems": 2}
    data = {"type": "string", "format": "binary", "maxLength": 3}
    for listed, hints in ((few, set()), (many, {"uniqueItems"})):
        schema = {"type": "object", "properties": {"a": listed, "b": data}, "required": ["a", "b"]}
        schema["additionalProperties"] = False
        response = ask(client, max_tokens=200, guided_json=schema, temperature=2, seed=1)
        assert ignored(response) == hints
        found = json.loads(response.json()["choices"][0]["message"]["content"])
        assert set(found) == {"a", "b"} and (hints or sorted(found["a"]) == [1, 2, 3])
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        response = ask(client, max_tokens=200, tools=[tool], tool_choice="required")
        assert ignored(response) == hints


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE


def test_tools_as_text() -> None:
    """A template without tools gets a preamble, calls and results in roles that it knows."""
    call = {"function": {"name": "f", "arguments": '{"x": 1'}}
    turns = [
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for source, opening in ((TEMPLATE, "[system]Be brief.\n\nYou can"), (NO_SYSTEM, "[user]Be brief.\n\nYou can")):
        text = render_conversation(ChatTemplate(source), turns, tools=tools)
        assert text.startswith(opening) and '{"name": "f", "parameters": {}}' in text
        assert text.count('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>') == 2
        assert text.endswith(
            "[user]<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>[assistant]"
        )
    template = ChatTemplate(TEMPLATE)
    assert template.variables == {"messages", "m", "add_generation_prompt"}
    assert render_conversation(template, [*turns[:2], {"role": "assistant", "content": "So "}],
                               continue_final_message=True).endswith("[assistant]So ")  # fmt: skip


def test_a_short_key_is_taken_with_a_warning(llama_folder: Path) -> None:
    running = Server(llama_folder, "--closed-objects", keys=("k",), admin=None).wait()
    try:
        assert any("can be guessed" in line for line in running.lines)
        with running.client(headers={"authorization": "Bearer k"}) as client:
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
            text = ask(client, max_tokens=60, response_format=form).json()["choices"][0]["message"]["content"]
            assert json.loads(text) in ({"a": True}, {"a": False})
            assert client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 401
    finally:
        assert running.stop() == 0
