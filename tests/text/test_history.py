# ruff: noqa: E501 -- templates are long lines
"""Answers that come back: what the parser read from a model's text is written by the template as that text."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.text.test_parse import joined
from twostroke import InputError
from twostroke.text.chat import ChatTemplate
from twostroke.text.conversation import render_conversation
from twostroke.text.formats import has_reasoning, tool_format
from twostroke.text.parse import Call, Content, Reasoning, StreamParser

# Short templates with the token forms, the branches and the traps of the families' own.
LOOP = "{% for m in messages %}{% if m.role == 'tool' %}<result>{{ m.content }}</result>"
DEEPSEEK = (
    LOOP + "{% elif m.role == 'assistant' and m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}{{ '' if loop.first else '\n' }}{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + "
    "c.function.name + '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>"
    "{% else %}<｜{{ m.role }}｜>{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
)
DEEPSEEK_V31 = (
    LOOP
    + "{% elif m.tool_calls %}{{ m.content }}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>'"
    "+ c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>"
    "{% else %}<｜{{ m.role }}｜></think>{{ m.content }}{% endif %}{% endfor %}"
)
KIMI = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% elif m.tool_calls %}{{ m.content }}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id"
    " }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
QWEN_XML = (
    "{{ tools | tojson }}"
    + LOOP
    + "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ "
    "c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v if v is string else v | "
    "tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}{% endif %}{% endfor %}"
)
GLM = (
    "{{ tools | tojson }}"
    + LOOP
    + "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name"
    " }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v |"
    " tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}"
)
DSML = (
    "{% set d = '｜DSML｜' %}{{ tools | tojson }}"
    + LOOP
    + "{% else %}{{ m.content }}{% if m.tool_calls %}\n\n<{{ d }}tool_calls>"
    '\n{% for c in m.tool_calls %}<{{ d }}invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() '
    "%}<{{ d }}parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">{{ v if v is string else v | "
    "tojson }}</{{ d }}parameter>\n{% endfor %}</{{ d }}invoke>\n{% endfor %}</{{ d }}tool_calls>{% endif %}{% endif %}"
    "{% endfor %}"
)
MISTRAL = (
    "{{ tools | tojson }}"
    + LOOP
    + "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('nine letters') }}{% endif %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson"
    " }}{% endfor %}{% endif %}{% endfor %}"
)
HARMONY = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}{% if m.content and m.thinking %}{{ "
    "raise_exception('both') }}{% endif %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking or m.content }}<|end|>"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ "
    "m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ "
    "m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)
TEMPLATES = {
    "deepseek": DEEPSEEK, "deepseek-v3.1": DEEPSEEK_V31, "kimi": KIMI, "qwen-xml": QWEN_XML, "glm": GLM, "dsml": DSML,
    "mistral-args": MISTRAL, "harmony": HARMONY,
}  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Rain.", "parameters": PARAMETERS}}]
ARGUMENTS = {"city": "Köln <b>", "days": 3}


@cache
def template(family):
    return ChatTemplate(TEMPLATES[family])


def call(number, arguments=ARGUMENTS):
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_AbCdEf00{number}", "type": "function", "function": {"name": "get_weather", "arguments": text}}


def answer(text, family):
    """The message that a client gets for this text."""
    parser = StreamParser(tool_format(TEMPLATES[family]), {"get_weather": PARAMETERS}, reasoning=True)
    deltas = joined(parser.push(text) + parser.finish())
    message = {"role": "assistant", "content": "".join(d.text for d in deltas if isinstance(d, Content)) or None}
    calls = [d for d in deltas if isinstance(d, Call)]
    message["tool_calls"] = [call(d.number + 1, json.loads(d.arguments)) for d in calls]
    if thought := "".join(d.text for d in deltas if isinstance(d, Reasoning)):
        message["reasoning_content"] = thought
    return message


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_come_back_as_they_were_written(family):
    assert tool_format(TEMPLATES[family]).family == family
    said = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call(1), call(2)]},
    ]
    results = [{"role": "tool", "tool_call_id": call(n)["id"], "content": f"no {n}"} for n in (1, 2)]
    prompt = render_conversation(template(family), [*said, *results], tools=TOOLS)
    assert "Rain." in prompt  # the model is told of its tools, also by a template that does not name them
    assert prompt.index("no 1") < prompt.index("no 2")
    read = answer(prompt[prompt.index("Rain?") + 5 :], family)
    assert [json.loads(one["function"]["arguments"]) for one in read["tool_calls"]] == [ARGUMENTS, ARGUMENTS]
    again = [said[0], {**read, "content": None, "reasoning_content": None}, *results]
    again[1] = {name: value for name, value in again[1].items() if value is not None}
    if family != "harmony":  # its calls are one message each; the second reading has both
        assert render_conversation(template(family), again, tools=TOOLS) == prompt


def test_text_before_calls_stays():
    calls = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "I look.", "tool_calls": [call(1)]}]
    for family in TEMPLATES:
        prompt = render_conversation(template(family), calls, tools=TOOLS)
        assert prompt.index("I look.") < prompt.rindex("Köln")


def test_reasoning_comes_back_to_harmony():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>"
        'assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>'
    )
    message = answer(text, "harmony")
    assert message["reasoning_content"] == "Hm." and message["content"] == "I look."
    prompt = render_conversation(template("harmony"), [{"role": "user", "content": "Rain?"}, message], tools=TOOLS)
    assert "analysis<|message|>Hm.\n\nI look.<|end|>" in prompt and '{"city": "Bern"}<|call|>' in prompt


def test_ids_of_kimi_have_the_name_and_count_on():
    turns = [{"role": "assistant", "content": None, "tool_calls": [call(n)]} for n in (1, 2)]
    results = [{"role": "tool", "tool_call_id": call(n)["id"], "content": "x"} for n in (1, 2)]
    messages = [{"role": "user", "content": "?"}, turns[0], results[0], turns[1], results[1]]
    prompt = render_conversation(template("kimi"), messages, tools=TOOLS)
    assert "begin|>functions.get_weather:1<|" in prompt and "## Return of functions.get_weather:1\n" in prompt


def test_reasoning_of_deepseek_and_its_arguments_as_json():
    assert has_reasoning(DEEPSEEK) and not has_reasoning(HARMONY)
    as_json = tool_format(DEEPSEEK.replace("c.function.arguments +", "c.function.arguments | tojson +"))
    assert as_json.family == "deepseek" and not as_json.text_arguments and tool_format(DEEPSEEK).text_arguments
    with pytest.raises(InputError, match="role"):
        render_conversation(template("deepseek"), [{"role": "function", "content": "x"}])
