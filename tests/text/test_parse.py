"""Content, reasoning and calls from streamed text, however it is split."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke import InputError
from twostroke.text import formats
from twostroke.text.formats import HERMES, LLAMA, MISTRAL, has_reasoning, tool_format
from twostroke.text.parse import Call, Content, Reasoning, StreamParser
from twostroke.text.tools import (
    MAX_TOOLS,
    Tool,
    ToolChoice,
    new_call_id,
    read_arguments,
    read_choice,
    read_tools,
    with_parsed_arguments,
)

FORMS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "none": None}
MORE = {form.family: form for form in (
    formats.DEEPSEEK, formats.DEEPSEEK_V31, formats.KIMI, formats.MISTRAL_ARGS, formats.QWEN_XML, formats.GLM,
    formats.DSML, formats.HARMONY,
)}  # fmt: skip
FORMS |= MORE
SCHEMA = {"properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "when": {"type": ["string", "null"]},
    "exact": {"type": "boolean"}, "places": {"type": "array"}, "code": {"type": "string"}, "any": {},
    "either": {"anyOf": [{"type": "number"}, {"type": "string"}]}, "unit": {"enum": ["C", "F"]},
}}  # fmt: skip
KNOWN = {"get_weather": SCHEMA, "f": SCHEMA}


def joined(deltas):
    """Neighbouring pieces of the same thing put together."""
    whole = []
    for delta in deltas:
        last = whole[-1] if whole else None
        if isinstance(delta, Call):
            if isinstance(last, Call) and last.number == delta.number:
                assert delta.name is None, "a call has one name"
                whole[-1] = Call(last.number, last.name, last.arguments + delta.arguments)
            else:
                assert delta.name, "a call begins with its name"
                whole.append(delta)
        elif type(last) is type(delta):
            whole[-1] = type(delta)(last.text + delta.text)
        else:
            whole.append(delta)
    return whole


def read(text, form, names=None, cuts=None, **options):
    parser = StreamParser(FORMS[form], names, **options)
    deltas, start = [], 0
    for end in sorted(set(cuts if cuts is not None else range(1, len(text)))):
        deltas += parser.push(text[start:end])
        start = end
    deltas += parser.push(text[start:])
    return joined(deltas + parser.finish())


# What models of these families wrote, tokens joined. Each with what it means.
RECORDED = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
     [Call(0, "get_weather", '{"city": "Paris"}')]),
    ("hermes", 'I will look it up.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
     '{"name": "g", "arguments": {"x": [1, {"y": "}"}]}}\n</tool_call>\n',
     [Content("I will look it up."), Call(0, "f", "{}"), Call(1, "g", '{"x": [1, {"y": "}"}]}')]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> done ',
     [Call(0, "f", '{"a": 1}'), Content(" done")]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n</tool_call>', [Call(0, "f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [Call(0, "f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [Call(0, "f", "{}")]),
    ("hermes", '<tool_call>{"name": "say", "arguments": {"text": "</tool_call> \\" {"}}</tool_call>',
     [Call(0, "say", '{"text": "</tool_call> \\" {"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', [Call(0, "f", '{"a": 1}')]),  # forgot to close
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_c', [Call(0, "f", '{"a": 1}')]),  # length
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, ', [Call(0, "f", '{"a": [1, ')]),  # length
    ("hermes", '<tool_call>{"name": "f", "argu', [Content('<tool_call>{"name": "f", "argu')]),  # length
    ("hermes", "Use <tool_call> tags, <tool or <b>.\n", [Content("Use <tool_call> tags, <tool or <b>.\n")]),
    ("hermes", "<tool_call>\nprint(1)\n</tool_call>", [Content("<tool_call>\nprint(1)\n</tool_call>")]),
    ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
     [Content("<tool_call>"), Call(0, "f", "{}")]),
    ("hermes", '```json\n{"name": "f", "arguments": {}}\n```',
     [Content('```json\n{"name": "f", "arguments": {}}\n```')]),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
     [Content('<tool_call>{"name": 3, "arguments": {}}</tool_call>')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
     [Content('<tool_call>{"name": "f", "arguments": [1]}</tool_call>')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>',
     [Call(0, "f", '{"a": 1'), Content("]}</tool_call>")]),
    ("llama", '{"name": "get_weather", "parameters": {"city": "Rome"}}', [Call(0, "get_weather", '{"city": "Rome"}')]),
    ("llama", '{"type": "function", "name": "f", "parameters": {"a": "1"}}', [Call(0, "f", '{"a": "1"}')]),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', [Call(0, "f", "{}")]),
    ("llama", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}',
     [Call(0, "f", "{}"), Call(1, "g", '{"a": 1}')]),
    ("llama", '{"name": "f", "parameters": {}}\n{"name": "g", "arguments": {}}',
     [Call(0, "f", "{}"), Call(1, "g", "{}")]),
    ("llama", '{"title": "A book", "pages": 3}', [Content('{"title": "A book", "pages": 3}')]),
    ("llama", '{"name": "Bob", "age": 3}', [Content('{"name": "Bob", "age": 3}')]),
    ("llama", '{"name": "Bob"}', [Content('{"name": "Bob"}')]),
    ("llama", '<|python_tag|>brave_search.call(query="x")', [Content('<|python_tag|>brave_search.call(query="x")')]),
    ("llama", 'Call {"name": "f", "parameters": {}}', [Content('Call {"name": "f", "parameters": {}}')]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "VvvODy9mT"}]', [Call(0, "f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": "]"}}]',
     [Call(0, "f", "{}"), Call(1, "g", '{"b": "]"}')]),
    ("mistral", "A list [1, 2] and [TOOL", [Content("A list [1, 2] and [TOOL")]),
    ("mistral", "[TOOL_CALLS] nothing", [Content("[TOOL_CALLS] nothing")]),
    ("none", '<tool_call>{"name": "f", "arguments": {}}</tool_call> ',
     [Content('<tool_call>{"name": "f", "arguments": {}}</tool_call> ')]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "meaning"), RECORDED)
def test_recorded_answers(form, text, meaning):
    assert read(text, form) == meaning  # a character at a time
    assert read(text, form, cuts=()) == meaning  # all at once


# The forms of DeepSeek V3, R1 and V3.1, Kimi K2, Mistral, Qwen3-Coder, GLM-4.5 and 4.7, DeepSeek V4, gpt-oss.
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'
)
XML, DONE = "<tool_call>\n<function=get_weather>\n", "</function>\n</tool_call>"
CHANNEL, MESSAGE, CLOSE = "<|channel|>", "<|message|>", "<|end|><|start|>assistant"
TAGGED = [
    ("deepseek", f"{V3}<｜tool▁calls▁end｜>", [Call(0, "get_weather", '{"city": "Paris"}')]),
    ("deepseek", f"I look.\n\n{V3}\n" + V3.removeprefix("<｜tool▁calls▁begin｜>") + "<｜tool▁calls▁end｜>",
     [Content("I look."), Call(0, "get_weather", '{"city": "Paris"}'), Call(1, "get_weather", '{"city": "Paris"}')]),
    ("deepseek", V3, [Call(0, "get_weather", '{"city": "Paris"}')]),  # cut before the end
    ("deepseek", V3[: V3.index("is")], [Call(0, "get_weather", '{"city": "Par')]),
    ("deepseek", "<｜tool▁calls▁begin｜>and what?", [Content("<｜tool▁calls▁begin｜>and what?")]),
    ("deepseek", V3.replace("get_weather", "rm"), [Content(V3.replace("get_weather", "rm"))]),
    ("deepseek-v3.1", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
     "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     [Call(0, "f", '{"a": 1}'), Call(1, "get_weather", "{}")]),
    ("kimi", '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "}"}'
     "<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_calls_section_end|>", [Call(0, "f", '{"a": "}"}'), Call(1, "get_weather", "{}")]),
    ("mistral-args", '[TOOL_CALLS]f[ARGS]{"a": [1]}[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{}',
     [Call(0, "f", '{"a": [1]}'), Call(1, "get_weather", "{}")]),
    ("qwen-xml", f"{XML}<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n{DONE}",
     [Call(0, "get_weather", '{"city": "Paris", "days": 3}')]),
    ("qwen-xml", f"{XML}<parameter=code>\n\nif a < b:\n    x = \"</p>\"\n\n</parameter>\n{DONE}",
     [Call(0, "get_weather", json.dumps({"code": '\nif a < b:\n    x = "</p>"\n'}))]),
    ("qwen-xml", f"{XML}<parameter=exact>\nTrue\n</parameter>\n<parameter=when>\nnull\n</parameter>\n<parameter=any>\n"
     f"[1]\n</parameter>\n<parameter=either>\n7\n</parameter>\n<parameter=unit>\nC\n</parameter>\n{DONE}\n",
     [Call(0, "get_weather", '{"exact": true, "when": null, "any": [1], "either": 7, "unit": "C"}')]),
    ("qwen-xml", f"{XML}<parameter=city>\n12\n</parameter>\n{DONE}\n{XML}{DONE}",
     [Call(0, "get_weather", '{"city": "12"}'), Call(1, "get_weather", "{}")]),
    ("qwen-xml", f"{XML}<parameter=city>\nPar", [Call(0, "get_weather", '{"city": "Par')]),
    ("qwen-xml", f"{XML}<parameter=days>\n3", [Call(0, "get_weather", "{")]),
    ("qwen-xml", f"{XML}<parameter=city>\nx\n</parameter>\nno tag",
     [Call(0, "get_weather", '{"city": "x"}'), Content("\nno tag")]),
    ("qwen-xml", f"{XML}<param>", [Call(0, "get_weather", "{}"), Content("\n<param>")]),
    ("qwen-xml", "<tool_call>\n<function=rm>\n</function>\n</tool_call>",
     [Content("<tool_call>\n<function=rm>\n</function>\n</tool_call>")]),
    ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>places</arg_key>\n"
     '<arg_value>["a"]</arg_value>\n</tool_call>', [Call(0, "get_weather", '{"city": "Bern", "places": ["a"]}')]),
    ("glm", "<tool_call>f<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>f</tool_call>",
     [Call(0, "f", '{"days": 2}'), Call(1, "f", "{}")]),
    ("dsml", '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city" string="true">3'
     '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     '<｜DSML｜invoke name="f">\n'
     "</｜DSML｜invoke>\n</｜DSML｜tool_calls>", [Call(0, "f", '{"city": "3", "days": 3}'), Call(1, "f", "{}")]),
    ("harmony", f"{CHANNEL}analysis{MESSAGE}Let me see: 1 < 2.{CLOSE}{CHANNEL}final{MESSAGE}Hi <b>!\n",
     [Reasoning("Let me see: 1 < 2."), Content("Hi <b>!\n")]),
    ("harmony", f"{CHANNEL}analysis{MESSAGE}Hm.{CLOSE}{CHANNEL}commentary{MESSAGE}I look. {CLOSE}{CHANNEL}commentary "
     f'to=functions.f <|constrain|>json{MESSAGE}{{"city": "Bern"}}<|call|>',
     [Reasoning("Hm."), Content("I look. "), Call(0, "f", '{"city": "Bern"}')]),
    ("harmony", f' to=functions.f{CHANNEL}commentary json{MESSAGE}{{"a": [', [Call(0, "f", '{"a": [')]),
    ("harmony", f"{CHANNEL}commentary to=functions.rm{MESSAGE}{{}}<|call|>", [Content("{}")]),
    ("harmony", f' to=functions.f{CHANNEL}commentary json{MESSAGE}{{"a": "\\"<|call|>"}}<|call|>',
     [Call(0, "f", '{"a": "\\"<|call|>"}')]),
    ("harmony", f"{CHANNEL}analysis{MESSAGE}cut <|en", [Reasoning("cut <|en")]),
    ("harmony", f"{CHANNEL}anal", []),
    ("harmony", '{"a": 1}', [Content('{"a": 1}')]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "meaning"), TAGGED)
def test_recorded_answers_of_other_forms(form, text, meaning):
    assert read(text, form, KNOWN) == meaning
    assert read(text, form, KNOWN, cuts=()) == meaning


def test_long_strings_between_tags_are_emitted_while_they_arrive():
    parser = StreamParser(formats.QWEN_XML, KNOWN)
    assert parser.push(f"{XML}<parameter=code>\nx = 1\n") == [Call(0, "get_weather", '{"code": "x = 1')]
    assert parser.push('y = "2"') == [Call(0, None, '\\ny = \\"2\\"')]
    assert parser.push("\n</parameter>\n</function>\n</tool_call>") == [Call(0, None, '"}')]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("<think>\nHm, a <b> or </thing>?\n</think>\n\nYes.", [Reasoning("Hm, a <b> or </thing>?"), Content("Yes.")]),
        ("\n<think></think>Yes.", [Content("Yes.")]),
        ("<think>never done </thi", [Reasoning("never done </thi")]),
        ("<think>cut \n", [Reasoning("cut")]),
        ("Yes. <think>late</think>", [Content("Yes. <think>late</think>")]),
        (" <thin air", [Content(" <thin air")]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', [Call(0, "f", "{}")]),
        ('<think>x</think> <tool_call>{"name": "f", "arguments": {}}', [Reasoning("x"), Call(0, "f", "{}")]),
        ("<think><tool_call>{}</think>", [Reasoning("<tool_call>{}")]),
    ],
)  # fmt: skip
def test_reasoning(text, meaning):
    assert read(text, "hermes", reasoning=True) == meaning
    assert read(text, "hermes", cuts=(), reasoning=True) == meaning


def test_reasoning_that_the_prompt_began():
    assert read("so\n</think>\n{\"name\": \"f\", \"parameters\": {}}", "none", inside=True) == [
        Reasoning("so"), Content('{"name": "f", "parameters": {}}'),
    ]  # fmt: skip


def test_calls_of_unknown_tools_are_content():
    text = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    assert read(text, "hermes", {"ls"}) == [Content(text)]
    assert read(text, "hermes", {"ls", "rm"}) == [Call(0, "rm", "{}")]


def test_a_known_tool_need_not_be_announced_at_the_start():
    text = '{"name": "ls", "arguments": {"a": 1}}'
    assert read(text, "hermes", {"ls"}) == [Call(0, "ls", '{"a": 1}')]
    for other, names in ((text, None), (text, {"rm"}), ("So: " + text, {"ls"}), ('{"name": "ls"}', {"ls"})):
        assert read(other, "hermes", names) == [Content(other)]


def test_arguments_are_emitted_while_they_arrive():
    parser = StreamParser(HERMES)
    assert parser.push('<tool_call>\n{"name": "f", "argum') == []
    assert parser.push('ents": {"a') == [Call(0, "f", '{"a')]
    assert parser.push('": "long') == [Call(0, None, '": "long')]
    assert parser.push('"}}') == [Call(0, None, '"}')]
    assert parser.push("\n</tool_call>") == parser.finish() == []


def test_content_is_emitted_at_once_and_marks_are_not():
    parser = StreamParser(HERMES)
    assert parser.push("Hello there") == [Content("Hello there")]
    assert parser.push(" <tool_ca") == []
    assert parser.push("r> ") == [Content(" <tool_car>")]
    assert parser.push("x") == [Content(" x")]


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "<", "<tool", "[", "]",
     "{", "}", '"', "\\", ":", ",", ";", " ", "\n", "a", '"name"', '"arguments"', '"parameters"', '"f"', "null", "é",
     '{"name": "f", "arguments": {"a": "}"}}', '{"name": "f", "parameters": {}}', '[{"name": "f", "arguments": {}}]',
     '{"arguments": {"x": 1}, "name": "g"}', "some text"]
    + [mark for form in MORE.values() for mark in form.marks]
    + ["<function=f>", "</function>", "<parameter=city>", "</parameter>", "<parameter=days>", "<arg_key>", "</arg_key>",
       "<arg_value>", "</arg_value>", 'name="f">', 'name="city"', ' string="true">', "</｜DSML｜parameter>", "function",
       "functions.f:0", "analysis", "final", "commentary to=functions.f ", "```json", "```", "f"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=14).map("".join), st.sampled_from(sorted(FORMS)), st.booleans(), st.data())
@settings(max_examples=500, deadline=None)
def test_deltas_do_not_depend_on_how_the_text_is_split(text, form, reasoning, data):
    whole = read(text, form, cuts=(), reasoning=reasoning)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8)) if text else ()
    assert read(text, form, cuts=cuts, reasoning=reasoning) == whole
    assert read(text, form, reasoning=reasoning) == whole
    if form != "harmony" and not reasoning and not any(isinstance(delta, Call) for delta in whole):
        assert "".join(delta.text for delta in whole) == text  # nothing is lost
    numbers = [delta.number for delta in whole if isinstance(delta, Call)]
    assert sorted(set(numbers)) == list(range(len(set(numbers))))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "get_weather"]), st.dictionaries(st.text(), VALUES, max_size=3)),
    min_size=1,
    max_size=4,
)


def written(form, calls, ascii_only):
    one = FORMS[form]
    if one.tags is not None:
        return framed(
            one,
            [(name, "".join(tagged(one.tags, key, value) for key, value in given.items())) for name, given in calls],
        )
    if one.head:
        return framed(one, [(name, json.dumps(given, ensure_ascii=ascii_only)) for name, given in calls])
    if one.channels:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
            for name, given in calls
        )
    texts = [json.dumps({"name": name, one.arguments: given}, ensure_ascii=ascii_only) for name, given in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return "; ".join(texts) if form == "llama" else "[TOOL_CALLS] [" + ", ".join(texts) + "]"


def framed(form, calls):
    bodies = [f"{form.begin}{form.lead.format(name=name)}{body}{form.tail}{form.end}" for name, body in calls]
    return form.section[0] + form.between.join(bodies) + form.section[1]


def tagged(tags, key, value):
    """As chat templates write them: strings as they are, other values as JSON."""
    text = value if isinstance(value, str) else json.dumps(value)
    return tags.argument.format(key=key, value=text, open=f' string="{"true" if isinstance(value, str) else "false"}">')


@given(st.sampled_from(sorted(set(FORMS) - {"none"})), CALLS, st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_is_called_arrives(form, calls, ascii_only, data):
    names = {"f": None, "get_weather": None}
    if FORMS[form].tags is not None:  # values between tags have the types of the tool's schema
        values = {
            "days": st.integers(),
            "code": st.text().filter(lambda text: "</" not in text),
            "exact": st.booleans(),
        }
        calls = data.draw(
            st.lists(st.tuples(st.just("f"), st.fixed_dictionaries({}, optional=values)), min_size=1, max_size=3)
        )
        names = KNOWN
    text = written(form, calls, ascii_only)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    deltas = read(text, form, names, cuts=cuts)
    assert [(delta.name, json.loads(delta.arguments)) for delta in deltas] == calls


def test_hostile_text_takes_linear_time():
    started = time.process_time()
    for text in ("<tool_call>" * 20_000, " " * 200_000, '<tool_call>{"arguments": ' + "[" * 100_000, "<" * 200_000,
                 '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 200_000, "<think> " * 20_000):  # fmt: skip
        parser = StreamParser(HERMES, reasoning=True)
        for start in range(0, len(text), 7):
            parser.push(text[start : start + 7])
        parser.finish()
    assert time.process_time() - started < 20


# ---- formats and tools -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ('{{- "\\n</tools>\\n\\nreturn a json object within <tool_call></tool_call> XML tags" }}', HERMES),
        ("{{- '<tool_call>\\n<function=' + call.name + '>' }}", formats.QWEN_XML),
        ("{{- '<tool_call>' + name + '<arg_key>' }}", formats.GLM),
        ('{{- \'Respond in the format {"name": function name, "parameters": dictionary of arguments}.\' }}', LLAMA),
        ('{{- "<|python_tag|>" + call }}', LLAMA),
        ('{{- "[TOOL_CALLS] [" }}', MISTRAL),
        ('{{- "[TOOL_CALLS]" + name + "[ARGS]" }}', formats.MISTRAL_ARGS),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        (None, None),
    ],
)
def test_the_format_is_known_from_the_template(source, form):
    assert tool_format(source) is form


def test_reasoning_is_known_from_the_template():
    assert has_reasoning("{{ content.split('</think>')[-1] }}") and not has_reasoning("x") and not has_reasoning(None)


def tool(**function):
    return {"type": "function", "function": {"name": "f", **function}}


def test_tools_are_read():
    schema = {"properties": {"a": {"type": "string"}}}
    first, second = read_tools([tool(name="get-it_2", parameters=schema, description="d", strict=True), tool()])
    assert first == Tool("get-it_2", {"type": "object", **schema})
    assert second.parameters["additionalProperties"] is False
    assert read_tools(None) == read_tools([]) == ()


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ({"a": 1}, "tools:"),
        ("x", "tools:"),
        ([3], r"tools\[0\].type"),
        ([{"type": "retrieval"}], r"tools\[0\].type"),
        ([{"type": "function"}], r"tools\[0\].function:"),
        ([tool(), tool(name="a b")], r"tools\[1\].function.name"),
        ([tool(name="a" * 65)], r"tools\[0\].function.name"),
        ([tool(name="f\n")], r"tools\[0\].function.name"),
        ([tool(), tool()], r"tools\[1\].function.name: 'f' is used twice"),
        ([tool(description=3)], r"tools\[0\].function.description"),
        ([tool(description="x" * 20_000)], r"tools\[0\].function.description"),
        ([tool(parameters=[1])], r"tools\[0\].function.parameters"),
        ([tool(parameters={"type": "string"})], r"tools\[0\].function.parameters.type"),
        ([tool(parameters={"a": object()})], r"tools\[0\].function.parameters"),
        ([tool(parameters={"description": "x" * 70_000})], r"tools\[0\].function.parameters: has"),
        ([tool(name=f"f{i}") for i in range(MAX_TOOLS + 1)], "tools: has"),
    ],
)
def test_bad_tools_are_refused_by_field(tools, field):
    with pytest.raises(InputError, match=field):
        read_tools(tools)


def test_choices():
    tools = read_tools([tool(name="f"), tool(name="g")])
    named = {"type": "function", "function": {"name": "g"}}
    assert read_choice(None, tools) == read_choice("auto", tools) == ToolChoice("auto")
    assert read_choice(None, ()) == read_choice("auto", ()) == ToolChoice("none")
    assert read_choice("required", tools).forced and read_choice(named, tools) == ToolChoice("named", "g")
    for choice in ("any", 3, {"type": "function"}, {"type": "tool", "function": {"name": "g"}}, [named]):
        with pytest.raises(InputError, match="tool_choice"):
            read_choice(choice, tools)
    with pytest.raises(InputError, match=r"tool_choice.function.name"):
        read_choice({"type": "function", "function": {"name": "h"}}, tools)
    with pytest.raises(InputError, match="no tools"):
        read_choice("required", ())


def test_earlier_calls_go_into_templates_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call, 3]}]
    parsed = with_parsed_arguments(messages)
    assert parsed[0] is messages[0] and parsed[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    call["function"]["arguments"] = '{"a": [1, "tw'
    cut = with_parsed_arguments(messages)[1]["tool_calls"][0]["function"]["arguments"]
    assert cut == {"a": [1, "tw"]}  # a call that max_tokens ended can be sent back


@pytest.mark.parametrize(
    ("text", "read"),
    [("", {}), ("{", {}), ('{"a"', {}), ('{"a": 1', {"a": 1}), ("{a: 1}", {"text": "{a: 1}"}), ("3", {"text": "3"}),
     ("[1]", {"text": "[1]"}), ("{" * 5000, {"text": "{" * 5000}), ("\ud800", {"text": "\ud800"})],
)  # fmt: skip
def test_arguments_of_any_text_are_an_object(text, read):
    assert read_arguments(text) == read


def test_call_ids():
    assert len({new_call_id() for _ in range(100)}) == 100 and all(len(new_call_id()) == 9 for _ in range(5))
