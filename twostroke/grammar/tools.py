"""A grammar that forces tool calls, in the format that the model was trained with, or calls or a form. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from twostroke.errors import InputError
from twostroke.grammar.lark import form_rule
from twostroke.grammar.schema import inline_schema, safe_schema
from twostroke.grammar.tagged import ToExpression, tagged_rules
from twostroke.grammar.unique import CHARACTERS
from twostroke.sampling import MAX_GRAMMAR, Grammar
from twostroke.text.formats import ToolFormat
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tools import Tool, ToolChoice

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
    write = writer(form, tokenizer)
    rules, names = [], []
    for index, tool in enumerate(tools):
        if choice.name not in (None, tool.name):
            continue
        schema = safe_schema(tool.parameters, f"tools[{index}].function.parameters", CHARACTERS // len(tools))
        rules += _call_rules(form, write, index, tool.name, schema)
        names.append(f"call_{index}")
    more = MAX_CALLS - 1 if parallel and choice.mode != "named" else 0
    start = ["start: calls"] if instead is None else ["start: calls | final", *_final(form, tokenizer, instead)]
    lines = [*start, *_frame(form, write, more), "call: " + " | ".join(names), *rules]
    source = "\n".join(lines) + "\n"
    if len(source) > MAX_GRAMMAR:
        raise InputError(f"tools: their schemas have {len(source)} characters, a forced call takes {MAX_GRAMMAR}.")
    return Grammar("ebnf", source)


def answer_grammar(grammar: Grammar, form: ToolFormat | None, tokenizer: Tokenizer) -> Grammar:
    """The grammar of an answer's text where the model writes more than the text: the header of its channel."""
    if form is None or not form.channels:
        return grammar
    return Grammar("ebnf", "\n".join(["start: final", *_final(form, tokenizer, grammar)]) + "\n")


def _final(form: ToolFormat, tokenizer: Tokenizer | None, grammar: Grammar) -> list[str]:
    header = writer(form, tokenizer)("<|channel|>final<|message|>") + " " if form.channels else ""
    return [f"final: {header}form", form_rule(grammar)]


def _call_rules(form: ToolFormat, write: ToExpression, index: int, name: str, schema: Any) -> list[str]:
    """The rule `call_<index>`: what stands between the marks of a call."""
    lead, tail = '"' + form.arguments + '": ', "}"
    if form.head or form.tags:
        lead, tail = form.lead.format(name=name), form.tail
    elif form.channels:
        lead, tail = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""
    else:
        lead = f'{{"name": "{name}", {lead}'
    call = f"call_{index}: {write(lead)} arguments_{index} {write(tail)}"
    if form.tags is not None:
        return [call, *tagged_rules(form.tags, write, index, schema)]
    return [call, f"arguments_{index}: {inline_schema(schema)}"]  # a root of its own for $ref


def _frame(form: ToolFormat, write: ToExpression, more: int) -> list[str]:
    """The rule `calls` around the rule `call`."""
    begin, end = write(form.begin), write(form.end)
    times = f"{{0,{more}}}"
    several = f" ({write(form.between)} one){times}" if more else ""
    if form.listed:
        return [f'calls: {begin} " "? "[" call ' + (f'(", " call){times} ' if more else "") + '"]"']
    if form.bare or form.channels:
        return ["calls: call"]  # these models call one tool at a time
    if form.section[0]:
        before, after = (write(mark) for mark in form.section)
        around = write("\n" if form.tags else "")
        return [f"calls: {before} {around} one{several} {around} {after}", f"one: {begin} call {end}"]
    if form.head or form.tags:
        return [f"calls: one{several}", f"one: {begin} call {end}"]
    if more:
        several += ' "\\n"?'  # after a line break the answer may still end
    return [f"calls: one{several}", f'one: {begin} "\\n" call "\\n" {end}']


def writer(form: ToolFormat, tokenizer: Tokenizer | None) -> ToExpression:
    """From a text to an expression. Marks in it are single tokens where the vocabulary has them, as the model was
    trained to write them; else text."""
    found = {mark: tokenizer.token_id(mark) for mark in form.marks} if tokenizer is not None else {}
    tokens = {mark: number for mark, number in found.items() if number is not None}
    pattern = "|".join(re.escape(mark) for mark in sorted(tokens, key=len, reverse=True))

    def write(text: str) -> str:
        parts = re.split(f"({pattern})", text) if pattern else [text]
        written = [f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts if part]
        return " ".join(written) or '""'

    return write
