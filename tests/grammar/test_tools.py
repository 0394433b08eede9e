"""Forced calls are calls: with any weights, in every format, and with a real model."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tests import tiny
from tests.grammar.walks import start, walk
from twostroke import LLM, InputError, SamplingParams
from twostroke.grammar.compile import GrammarCompiler
from twostroke.grammar.masks import GrammarState
from twostroke.grammar.schema import close_objects
from twostroke.grammar.tools import MAX_CALLS, tool_grammar
from twostroke.sampling import Grammar
from twostroke.text import formats
from twostroke.text.formats import HERMES, LLAMA, MISTRAL, tool_format
from twostroke.text.parse import Call, StreamParser
from twostroke.text.tokenizer import from_folder
from twostroke.text.tools import marker_ids, read_choice, read_tools

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/digit"}},
    "required": ["root"],
    "additionalProperties": False,
}
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "tree", "parameters": TREE}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
RAW_NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "tree"}}


@pytest.fixture(scope="module")
def llm(llama_folder):
    return LLM(llama_folder, dtype="float32", max_requests=16)


def calls_in(text, form, tools=TOOLS):
    """The calls in a text that must be nothing but valid calls."""
    parser = StreamParser(form, {tool.name: tool.parameters for tool in tools})
    whole: dict[int, list[str]] = {}
    for delta in parser.push(text) + parser.finish():
        assert isinstance(delta, Call), delta
        name, arguments = whole.setdefault(delta.number, [delta.name or "", ""])
        whole[delta.number] = [name, arguments + delta.arguments]
    schemas = {tool.name: dict(tool.parameters) for tool in tools}
    for name, arguments in whole.values():
        jsonschema.validate(json.loads(arguments), schemas[name])
    return [(name, json.loads(arguments)) for name, arguments in whole.values()]


OTHERS = [formats.DEEPSEEK, formats.DEEPSEEK_V31, formats.KIMI, formats.MISTRAL_ARGS, formats.QWEN_XML, formats.GLM,
          formats.DSML, formats.HARMONY]  # fmt: skip


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.family)
def test_random_walks_call_in_every_form(compiler, tokenizer, form):
    places = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 0,
              "maximum": 9}, "at": {"type": ["boolean", "null"]}}, "required": ["unit", "days"]}  # fmt: skip
    tools = read_tools([{"type": "function", "function": {"name": "places", "parameters": places}}, RAW_NOW])
    grammar = tool_grammar(tools, read_choice("required", tools), form, tokenizer)
    names = set()
    for seed in range(6):
        tokens = walk(compiler, grammar, seed, 300, hurry=0.5)
        if tokens is not None:
            found = calls_in(tokenizer.decode(tokens, skip_special=False, at_start=False), form, tools)
            names |= {name for name, _ in found}
            assert 1 <= len(found) <= (1 if form.channels else MAX_CALLS)
    assert names <= {"places", "now"} and names


@pytest.mark.parametrize("form", [formats.QWEN_XML, formats.DSML], ids=lambda form: form.family)
def test_strings_between_tags_are_any_text(compiler, tokenizer, form):
    texts = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": texts}}])
    grammar = tool_grammar(tools, read_choice("required", tools), form, tokenizer, parallel=False)
    for city in ("a < b </p>", "\n", 'say "hi" {"'):
        opening = ' string="true">' if form.tags.values[0][0] else ""
        body = form.tags.argument.format(key="city", open=opening, value=city)
        text = form.begin + form.lead.format(name="f") + body + form.tail + form.end
        if form.section[0]:
            text = f"{form.section[0]}\n{text}\n{form.section[1]}"
        state = start(compiler, grammar)
        for token in tokenizer.encode(text, add_special=False):
            assert state.next_tokens()[0][token], text
            state.advance(token)
        assert state.next_tokens()[1] and calls_in(text, form, tools) == [("f", {"city": city})]
    bad = read_tools([{"type": "function", "function": {"name": "f", "parameters": {"anyOf": [texts]}}}])
    with pytest.raises(InputError, match=r"tools\[0\].function.parameters: anyOf"):
        tool_grammar(bad, read_choice("required", bad), form)


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL], ids=lambda form: form.family)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_random_weights_can_only_call(llm, form, choice):
    chosen = read_choice(choice, TOOLS)
    grammar = tool_grammar(TOOLS, chosen, form, llm.tokenizer)
    params = [SamplingParams(grammar=grammar, max_tokens=300, seed=seed) for seed in range(8)]
    ended = 0
    for output in llm.generate(["Once"] * 8, params):
        assert output.finish_reason in ("stop", "length"), output.samples[0].error
        if output.finish_reason == "stop":
            ended += 1
            calls = calls_in(output.text, form)
            assert 1 <= len(calls) <= (1 if form.bare or chosen.mode == "named" else MAX_CALLS)
            assert chosen.mode == "required" or {name for name, _ in calls} == {"tree"}
    assert ended


def test_one_call_if_not_parallel(llm):
    grammar = tool_grammar(TOOLS, read_choice("required", TOOLS), MISTRAL, llm.tokenizer, parallel=False)
    for seed in range(6):
        (output,) = llm.generate("Once", SamplingParams(grammar=grammar, max_tokens=300, seed=seed))
        assert output.finish_reason == "length" or len(calls_in(output.text, MISTRAL)) == 1


def test_marks_that_are_special_tokens(tmp_path):
    tiny.save_tokenizer(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    number = 1  # stands for <|im_start|> in the tiny vocabulary
    data["added_tokens"][number]["content"] = "[TOOL_CALLS]"
    words = data["model"]["vocab"]
    words["[TOOL_CALLS]"] = words.pop("<|im_start|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = from_folder(tmp_path)
    assert marker_ids(tokenizer, MISTRAL) == {number} and marker_ids(tokenizer, None) == set()
    compiler = GrammarCompiler(tokenizer, tiny.VOCAB)
    grammar = tool_grammar(TOOLS, read_choice("required", TOOLS), MISTRAL, tokenizer)
    compiler.prepare(grammar)
    assert set(start(compiler, grammar).next_tokens()[0].nonzero()[0]) == {number}
    state = start(compiler, grammar)
    state.advance(number)
    text = tokenizer.decode([number, *tokenizer.encode(' [{"name": "now", "arguments": {}}]')], skip_special=False)
    assert calls_in(text, MISTRAL) == [("now", {})]
    compiler.checker.close()


def test_what_cannot_be_forced_is_refused_by_field(llm):
    bad = read_tools([{"type": "function", "function": {"name": "f", "parameters": {"x-guidance": {}}}}])
    with pytest.raises(InputError, match=r"tools\[0\].function.parameters"):
        tool_grammar(bad, read_choice("required", bad), HERMES)
    big = {"properties": {f"p{i}": {"description": "x" * 100} for i in range(400)}}
    many = read_tools([{"type": "function", "function": {"name": f"f{i}", "parameters": big}} for i in range(8)])
    with pytest.raises(InputError, match=r"^tools: their schemas"):
        tool_grammar(many, read_choice("required", many), HERMES)
    with pytest.raises(ValueError, match="auto"):
        tool_grammar(TOOLS, read_choice("auto", TOOLS), HERMES)


def test_many_tools_compile_in_time(llm):
    tools = read_tools(
        [{"type": "function", "function": {"name": f"tool_{i}", "parameters": WEATHER}} for i in range(128)]
    )
    grammar = tool_grammar(tools, read_choice("required", tools), HERMES, llm.tokenizer)
    compiler = llm.engine.intake.grammars
    compiler.prepare(grammar)
    tokens = walk(compiler, grammar, 1, 400, hurry=0.9)
    assert tokens is None or calls_in(llm.tokenizer.decode(tokens), HERMES, tools)


# ---- a real model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen():
    from twostroke.weights.catalog import fetch

    return LLM(fetch("qwen2.5-coder-0.5b"), max_model_len=1024, max_requests=4)


RAW = [{
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather of a city.", "parameters": WEATHER},
}]  # fmt: skip
QUESTION = [{"role": "user", "content": "What is the weather in Paris in degrees Celsius? Use the tool."}]


@pytest.mark.slow
def test_qwen_calls_when_forced_and_in_its_own_words(qwen):
    form, tools = tool_format(qwen.tokenizer.chat.source), read_tools(RAW)
    assert form is HERMES
    grammar = tool_grammar(tools, read_choice("required", tools), form, qwen.tokenizer)
    output = qwen.chat(QUESTION, SamplingParams(grammar=grammar, temperature=0, max_tokens=200), tools=RAW)
    assert output.finish_reason == "stop"
    ((name, arguments),) = calls_in(output.text, form, tools)
    assert name == "get_weather" and "paris" in arguments["city"].lower()
    assert output.token_ids[0] == qwen.tokenizer.token_id("<tool_call>")  # the mark it was trained with


@pytest.mark.slow
def test_qwen_calls_when_it_wants_to(qwen):
    form, tools = tool_format(qwen.tokenizer.chat.source), read_tools(RAW)
    output = qwen.chat(QUESTION, SamplingParams(temperature=0, max_tokens=200), tools=RAW)
    ((name, arguments),) = calls_in(output.text, form, tools)  # written without the marks, by a model of this size
    assert name == "get_weather" and "paris" in arguments["city"].lower()
    greeting = [{"role": "user", "content": "Say hello."}]
    output = qwen.chat(greeting, SamplingParams(temperature=0, max_tokens=40), tools=RAW)
    parser = StreamParser(form, {tool.name for tool in tools})
    assert not any(isinstance(delta, Call) for delta in parser.push(output.text) + parser.finish())


@pytest.mark.slow
def test_qwen_fills_a_schema(qwen):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "population": {"type": "integer", "minimum": 0},
            "landmarks": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 3},
        },
        "required": ["name", "population", "landmarks"],
        "additionalProperties": False,
    }
    grammar = Grammar("json_schema", schema)
    messages = [{"role": "user", "content": "Describe Paris as JSON with name, population and landmarks."}]
    for temperature in (0.0, 1.0):
        output = qwen.chat(messages, SamplingParams(grammar=grammar, temperature=temperature, max_tokens=300, seed=7))
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
    assert output.finish_reason == "stop"


def test_forced_bytes_leave_the_state_as_it_is(compiler, tokenizer):
    """Also where the forced text reaches a token that is no text, such as the mark after a call."""
    mark = tokenizer.token_id("<|im_start|>")
    state = GrammarState(compiler.compile(Grammar("ebnf", f'start: "ab" <[{mark}]>')))
    for token in (*tokenizer.encode("ab", add_special=False), mark):
        assert b"\xff" not in state.forced_bytes()
        allowed, may_end = state.next_tokens()
        assert allowed[token] and not may_end
        state.advance(token)
    assert state.forced_bytes() == b"" and state.next_tokens()[1]


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL], ids=lambda form: form.family)
def test_calls_or_a_form(compiler, tokenizer, form):
    """With a form of any kind the answer is calls or that form."""
    auto = read_choice("auto", TOOLS)
    forms = {
        Grammar("json_schema", WEATHER): lambda text: jsonschema.validate(json.loads(text), WEATHER),
        Grammar("regex", "[0-9]{2}"): int,
        Grammar("ebnf", 'root ::= call\ncall ::= "yes" | "no"'): {"yes": 1, "no": 1}.__getitem__,
    }
    for own, check in forms.items():
        grammar = tool_grammar(TOOLS, auto, form, None, True, own)
        kinds = set()
        for seed in range(8):
            tokens = walk(compiler, grammar, seed, 400)
            if tokens is None:
                continue
            text = tokenizer.decode(tokens, skip_special=False, at_start=False)
            try:
                kinds.add("calls" if calls_in(text, form) else "none")
            except AssertionError:
                check(text)
                kinds.add("form")
        assert kinds <= {"calls", "form"} and kinds
    with pytest.raises(ValueError, match="leave out"):
        tool_grammar(TOOLS, read_choice("required", TOOLS), form, None, True, Grammar("regex", "a"))


def test_closed_objects():
    open_one = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    closed = close_objects(open_one)
    assert closed["additionalProperties"] is False is closed["properties"]["a"]["additionalProperties"]
    for kept in (
        {"type": "object"}, {"properties": {"a": {}}, "additionalProperties": True}, {"type": "array", "items": {}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "properties": {"c": {}}},
        {"enum": [{"properties": {"a": 1}}]},
    ):  # fmt: skip
        assert close_objects(kept) == kept
