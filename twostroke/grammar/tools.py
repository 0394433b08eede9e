"""A grammar that forces tool calls, in the format that the model was trained with, or calls or a form. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence

from twostroke.errors import InputError
from twostroke.grammar.lark import form_rule
from twostroke.grammar.schema import inline_schema, safe_schema
from twostroke.sampling import MAX_GRAMMAR, Grammar
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tools import Tool, ToolChoice, ToolFormat

MAX_CALLS = 8  # in one answer


def tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    form: ToolFormat,
    tokenizer: Tokenizer | None = None,
    parallel: bool = True,
    instead: Grammar | None = None,
) -> Grammar:
    """For tool_choice "required" (one or more calls, one if not `parallel`) and "named" (one call).

    tokenizer: with it, the format's marks are single tokens where this model has them, special tokens included.
    instead: with it, for tool_choice "auto": the answer is calls, or a text of this grammar.
    """
    if choice.forced == (instead is not None):
        raise ValueError(f"tool_choice {choice.mode!r} does not {'force' if instead is None else 'leave out'} a call")
    rules, names = [], []
    for index, tool in enumerate(tools):
        if choice.name not in (None, tool.name):
            continue
        schema = safe_schema(tool.parameters, f"tools[{index}].function.parameters")
        opening = f'{{"name": "{tool.name}", "{form.arguments}": '
        rules.append(f'call_{index}: {_text(opening)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: {inline_schema(schema)}")  # a root of its own for $ref
        names.append(f"call_{index}")
    more = MAX_CALLS - 1 if parallel and choice.mode != "named" else 0
    start = ["start: calls"] if instead is None else ["start: calls | form", form_rule(instead)]
    lines = [*start, *_frame(form, tokenizer, more), "call: " + " | ".join(names), *rules]
    source = "\n".join(lines) + "\n"
    if len(source) > MAX_GRAMMAR:
        raise InputError(f"tools: their schemas have {len(source)} characters, a forced call takes {MAX_GRAMMAR}.")
    return Grammar("ebnf", source)


def _frame(form: ToolFormat, tokenizer: Tokenizer | None, more: int) -> list[str]:
    """The rule `calls` around the rule `call`."""
    begin, end = _mark(form.begin, tokenizer), _mark(form.end, tokenizer)
    times = f"{{0,{more}}}"
    if form.listed:
        return [f'calls: {begin} " "? "[" call ' + (f'(", " call){times} ' if more else "") + '"]"']
    if form.bare:
        return ["calls: call"]  # these models call one tool at a time
    several = f' ("\\n" one){times} "\\n"?' if more else ""  # after a line break the answer may still end
    return [f"calls: one{several}", f'one: {begin} "\\n" call "\\n" {end}']


def _mark(text: str, tokenizer: Tokenizer | None) -> str:
    """A mark as a single token where the vocabulary has one, as the model was trained to write it; else as text."""
    number = tokenizer.token_id(text) if tokenizer is not None and text else None
    return _text(text) if number is None else f"<[{number}]>"


def _text(text: str) -> str:
    return json.dumps(text)
