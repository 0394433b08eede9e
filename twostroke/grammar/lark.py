"""A `Grammar` in the one notation that the grammar library reads: Lark, with our options. Torch-free."""

from __future__ import annotations

from twostroke.errors import InputError
from twostroke.grammar.schema import inline_schema, read_schema
from twostroke.sampling import Grammar

# Without "no_forcing" the library calls the tokenizer, in Python, for every text that has no alternative.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'


def to_lark(grammar: Grammar) -> str:
    """The grammar's source in Lark. The library may still refuse it when it is compiled."""
    if grammar.kind == "json_object":
        return "start: " + inline_schema({"type": "object"}) + OPTIONS
    if grammar.kind == "json_schema":
        return "start: " + inline_schema(read_schema(grammar.source)) + OPTIONS
    if grammar.kind == "regex":
        return _regex(grammar.source) + OPTIONS
    return _ebnf(grammar.source) + OPTIONS


def _regex(source: str) -> str:
    """Classes such as \\d and \\w mean what they mean in JavaScript: ASCII."""
    from llguidance import regex_to_lark

    return "start: /" + regex_to_lark(source, "dw") + "/"


def _ebnf(source: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(source)
    except Exception as error:  # the converter raises many kinds, KeyError and RecursionError too
        raise InputError(f"grammar.source: cannot be read as EBNF: {error}.") from None
