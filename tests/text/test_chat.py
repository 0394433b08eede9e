"""Chat templates: the same prompts as transformers, messages checked by name."""

# ruff: noqa: E501  (templates read better in one line)

from __future__ import annotations

import threading
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from twostroke.errors import InputError, ModelError
from twostroke.text import chat
from twostroke.text.chat import MAX_SOURCE

ChatTemplate = partial(chat.ChatTemplate, process=chat.renderer())  # one child process for all of them

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <there> & 'you'"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!", "reasoning_content": "hm"},
    {"role": "user", "content": "  Weather?  "},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "sky", "arguments": {"at": "köln", "n": 2}}}]},
    {"role": "tool", "content": "42", "tool_call_id": "1", "name": "sky"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "sky", "description": "é", "parameters": {"type": "object"}}}]

# Small templates in the manners of the wild ones: whitespace control, namespaces, macros, filters, loop variables.
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "tools": "{%- if tools %}\n  {{- 'T:' }}\n  {%- for tool in tools %}\n    {{- '\\n' ~ (tool | tojson) }}\n  {%- endfor %}"
    "{%- endif %}\n{%- for m in messages %}\n  {%- if m.tool_calls %}{% for c in m.tool_calls %}{% set c = c.function %}"
    "{{ c.name }}({{ c.arguments | tojson(indent=2) }}){% endfor %}\n  {%- else %}{{ m.content | trim }}|{% endif %}\n{%- endfor %}",
    "namespace": "{%- set ns = namespace(last=-1, names=[]) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% set ns.names = ns.names + [m.content] %}{% endif %}{% endfor %}"
    "{{ ns.last }} {{ ns.names | join(', ') }} {{ ns.names | length }}",
    "macros": "{% macro turn(role, text='none') -%}[{{ role|upper }}] {{ text }}{%- endmacro %}"
    "{% for m in messages[::-1] %}{{ turn(m.role, text=m.content) }}{{ '' if loop.last else '\n' }}{% endfor %}",
    "strings": "{% for m in messages if m.content is string and m.role not in ['system'] %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}/{{ m.content.startswith('<') }}/{{ m.content | replace('e', '3') }}\n{% endfor %}",
    "loops": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ loop.index }}{{ loop.previtem.role }}{{ loop.cycle('a', 'b') }}{% if loop.changed(m.role) %}!{% endif %}{% endfor %}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}"
    "{{ messages | map(attribute='role') | unique | sort | join('+') }}{{ (messages | first).role }}{{ (messages | last).name }}"
    "{{ {'b': 1, 'a': [2, none, true]} | dictsort }}{{ {'x': 'é'} | tojson }}{{ 3.14159 | round(2) }}{{ ['a'] | tojson }}"
    "{{ '%s-%d' | format('x', 3) }}{{ '{}:{name}'.format(1, name='n') }}{{ [3, 1, 2] | sort(reverse=true) }}{{ [1, 2] | sum }}"
    "{{ undefined_thing | default('d') }}{{ 'a b' | title }}{{ messages | rejectattr('role', 'in', ['user', 'tool']) | list | length }}",
    "operators": "{{ 'ab' * 3 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 8 }}{{ [1] + [2] }}{{ 'x' ~ 1 ~ none }}{{ 1 < 2 <= 2 }}"
    "{{ 'a' in 'abc' }}{{ 'role' in messages[0] }}{{ messages[0].get('x', 'y') }}{{ (1, 2) }}{{ -3 | abs }}{{ '%05.1f' % 2.25 }}",
    "recursion": "{% for item in [[1, [2, [3]]]] recursive %}{% if item is iterable %}<{{ loop(item) }}>{% else %}{{ item }}{% endif %}{% endfor %}",
    "blocks": "{% set x %}a{{ messages | length }}{% endset %}{{ x }}{% filter upper %}shout{% endfilter %}"
    "{% generation %}{{ x }}{% endgeneration %}{% with y = 2 %}{{ y }}{% endwith %}",
    "special": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ nothing }}",
    "thinking": "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ messages[-1].content }}",
}  # fmt: skip


def _transformers(source: str, **variables: Any) -> str:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    rendered: str = _compile_jinja_template(source).render(**variables)
    return rendered


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("prompt", [True, False])
def test_same_prompt_as_transformers(name: str, prompt: bool) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(TEMPLATES[name], names)
    more = {"enable_thinking": False} if name == "thinking" else {}
    theirs = _transformers(TEMPLATES[name], messages=TALK, tools=TOOLS, add_generation_prompt=prompt, **names, **more)
    assert ours.render(TALK, tools=TOOLS, add_generation_prompt=prompt, **more) == theirs
    assert ours.render(TALK, tools=TOOLS, add_generation_prompt=prompt, **more) == theirs  # and again


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "one\ntwo"


def test_missing_content_of_a_tool_call_is_empty() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert ChatTemplate("[{{ messages[0].content }}]").render([message]) == "[]"


def test_other_fields_pass_through_untouched() -> None:
    source = "{{ messages[-1].tool_call_id }}{{ messages[-1].name }}{{ messages[2].reasoning_content }}"
    assert ChatTemplate(source).render(TALK) == "1skyhm"


def test_the_clock_is_given_and_its_format_checked() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 11, 15))
    assert template.render(TALK) == "15 Nov 2026"
    for form in ("%1000000d", "x" * 1000):
        with pytest.raises(ModelError, match="strftime_now"):
            ChatTemplate(f"{{{{ strftime_now('{form}') }}}}").render(TALK)


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages: is empty"),
    ("hello", "messages: must be a list"),
    ({"role": "user", "content": "x"}, "messages: must be a list"),
    (None, "messages: must be a list"),
    (["hello"], r"messages\[0\]: must be an object"),
    ([{"content": "x"}], r"messages\[0\]\.role"),
    ([{"role": 5, "content": "x"}], r"messages\[0\]\.role"),
    ([{"role": "", "content": "x"}], r"messages\[0\]\.role"),
    ([{"role": "user"}], r"messages\[0\]\.content.*missing"),
    ([{"role": "user", "content": None}], r"messages\[0\]\.content"),
    ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"),
    ([{"role": "user", "content": [{"type": "text"}]}], "only text parts"),
    ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\]\.extra"),
    ([{"role": "user", "content": "x", 5: "y"}], r"messages\[0\]"),
    ([{"role": "user", "content": "x", "n": 2**64}], "more than 64 bits"),
    ([{"role": "user", "content": "x\ud800"}], "half a character"),
]


@pytest.mark.parametrize(("messages", "reason"), BAD_MESSAGES)
def test_bad_messages_are_refused_by_name(messages: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        ChatTemplate("{{ messages[0].content }}").render(messages)


def test_half_a_character_that_the_template_writes_is_not_lost() -> None:
    assert ChatTemplate(r"{{ '\ud800' }}").render(TALK) == "\ud800"


def test_messages_nested_without_end() -> None:
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(InputError, match="nested deeper"):
        ChatTemplate("x").render([{"role": "user", "content": "x", "extra": deep}])


def test_the_templates_own_sentence_reaches_the_caller() -> None:
    source = "{% for m in messages %}{% if m.role not in ['user'] %}{{ raise_exception('Only users may speak!') }}{% endif %}{% endfor %}"
    with pytest.raises(InputError, match="Only users may speak!"):
        ChatTemplate(source).render(TALK)


def test_arguments_come_from_a_list() -> None:
    assert ChatTemplate("{{ enable_thinking }}").render(TALK, enable_thinking=False) == "False"
    with pytest.raises(InputError, match="chat_template"):
        ChatTemplate("x").render(TALK, chat_template="{{ 1 }}")
    with pytest.raises(InputError, match="documents"):
        ChatTemplate("{{ documents }}").render(TALK, documents=[object()])
    with pytest.raises(InputError, match="enable_thinking: this model's chat template never reads it"):
        ChatTemplate("x").render(TALK, enable_thinking=False)
    for source in (
        "{{ enable_thinking }}",
        "<thinking>{{ messages[0].thinking }}",
        "{# thinking #}{% set thinking = 1 %}",
    ):
        with pytest.raises(InputError, match="thinking: this model's chat template never reads it"):
            ChatTemplate(source).render(TALK, thinking=True)
    assert ChatTemplate("{% if thinking is defined and thinking %}hm{% endif %}").render(TALK, thinking=True) == "hm"


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ x | nofilter }}", "{{ " + "(" * 5000, "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
     "{{ " + "9" * 5000 + " }}", "x" * (MAX_SOURCE + 1), "{% include '/etc/passwd' %}", "{% import 'os' as os %}",
     "{% extends 'x' %}", "{% from 'x' import y %}"],
)  # fmt: skip
def test_broken_templates_are_model_errors_at_first_use(source: str) -> None:
    template = ChatTemplate(source)
    for _ in range(2):
        with pytest.raises(ModelError, match="chat template"):
            template.render(TALK)


def test_threads_share_a_template() -> None:
    template, wrong = ChatTemplate(TEMPLATES["namespace"]), []

    def work(number: int) -> None:
        talk = [{"role": "user", "content": str(number)}] * (number + 1)
        expected = f"{number} {', '.join([str(number)] * (number + 1))} {number + 1}"
        wrong.extend(1 for _ in range(50) if template.render(talk) != expected)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
