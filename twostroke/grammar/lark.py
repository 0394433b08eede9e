"""A `Grammar` in the one notation that the grammar library reads: Lark, with our options. Torch-free."""

from __future__ import annotations

from twostroke.errors import InputError
from twostroke.grammar.schema import inline_schema, read_schema
from twostroke.sampling import Grammar

# Without "no_forcing" the library calls the tokenizer, in Python, for every text that has no alternative.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'


def to_lark(grammar: Grammar) -> str:
    """The grammar's source in Lark. The library may still refuse it when it is compiled."""
    return (_ebnf(grammar.source) if grammar.kind == "ebnf" else "start: " + _expression(grammar)) + OPTIONS


def form_rule(grammar: Grammar) -> str:
    """The grammar as the rule `form` of another one. Rules of its own keep their names."""
    if grammar.kind == "ebnf":
        return "form: %lark {\n" + _ebnf(grammar.source) + "\n}"
    return "form: " + _expression(grammar)


def _expression(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return _regex(grammar.source)
    return inline_schema({"type": "object"} if grammar.kind == "json_object" else read_schema(grammar.source))


def _regex(source: str) -> str:
    """Classes such as \\d and \\w mean what they mean in JavaScript: ASCII."""
    from llguidance import regex_to_lark

    return "/" + regex_to_lark(source, "dw") + "/"


def _ebnf(source: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(source)
    except Exception as error:  # the converter raises many kinds, KeyError and RecursionError too
        raise InputError(f"grammar.source: cannot be read as EBNF: {error}.") from None
