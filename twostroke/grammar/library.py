"""The calls into the grammar library (llguidance), with our limits. It is imported when a grammar is first used.

The library reads the bytes of tokens and does not see our tokenizer. A step is limited by fuel, not by time, so the
result does not depend on how busy the machine is.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from twostroke.text.tokenizer import Tokenizer

NOTHING_FITS = "NoExtensionBias"  # the library's name for a state that no token continues
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")  # in our Lark text, which callers never see


class GrammarError(Exception):
    """A grammar cannot be compiled, or cannot go on after these tokens."""


class TokenTable(NamedTuple):
    """A vocabulary as the library reads it."""

    tokens: list[bytes]  # one for each row of the logits, empty for rows without a text
    special: list[int]  # tokens that are not text: a grammar allows them only where it names them
    ends: list[int]


def token_table(tokenizer: Tokenizer, vocab: int) -> TokenTable:
    """vocab: rows of the logits, which may be more or fewer than the tokenizer's tokens."""
    tokens = [tokenizer.token_bytes(number) for number in range(vocab)]
    special, ends = (sorted(i for i in ids if i < vocab) for ids in (tokenizer.special_ids, tokenizer.eos_ids))
    return TokenTable(tokens, special, ends)


class _TokenizerWrapper:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.tokens = table.tokens
        self.special_token_ids = table.special
        self.eos_token_id = table.ends[0] if table.ends else None  # None: the library adds a token of its own

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("the library gives forced bytes; grammar/forced.py tokenizes them")


def make_tokenizer(table: TokenTable) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(_TokenizerWrapper(table), n_vocab=None, eos_token=table.ends or None)  # type: ignore[arg-type]


def compile_lark(tokenizer: Any, source: str) -> Any:
    """A matcher at the start of the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=500_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=50_000,
        max_grammar_size=200_000, verbose_errors=False,
    )  # fmt: skip
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(reason(matcher))
    return matcher


def next_tokens(matcher: Any) -> tuple[np.ndarray, bool]:
    """Which tokens may come next, as booleans by token id, and whether the text may end here.

    The booleans of end tokens mean nothing. The array may be longer than the vocabulary.
    """
    data = matcher.compute_bitmask()
    may_end = bool(matcher.is_accepting())
    allowed = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(np.bool_)
    if matcher.is_error():
        if not str(matcher.get_error()).startswith(NOTHING_FITS):
            raise GrammarError(reason(matcher))
        allowed[:] = False
    elif matcher.is_stopped():
        allowed[:] = False
    return allowed, may_end


def reason(matcher: Any) -> str:
    """The library's error message, without its drawings of the grammar."""
    lines = str(matcher.get_error()).splitlines()
    kept = [line.strip() for line in (lines[:1] + [line for line in lines[1:] if line.startswith("error:")])]
    text = _PLACE.sub("", " ".join(kept)).split(" Enable '")[0].rstrip(":.")
    return text[:300] or "no token is allowed"
