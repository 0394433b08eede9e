"""The few calls into the grammar library (llguidance), with our limits. It is imported when a grammar is first used.

The library is handed token bytes and knows nothing of our tokenizer. A step is limited in fuel, not in time: whether a
grammar can go on does not depend on how busy the machine is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

NOTHING_FITS = "NoExtensionBias"  # the library's word for a state that no token continues
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")  # in our Lark, which nobody else sees


class GrammarError(Exception):
    """A grammar cannot be compiled, or cannot go on after these tokens."""


class _Words:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, words: Sequence[bytes], special: Sequence[int], ends: Sequence[int]):
        self.tokens = list(words)
        self.special_token_ids = list(special)
        self.eos_token_id = ends[0] if ends else None  # None: the library adds a token of its own

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("nothing is forced, so nothing needs tokenizing")


def make_tokenizer(words: Sequence[bytes], special: Sequence[int], ends: Sequence[int]) -> Any:
    """words: the bytes of every row of the logits, empty for rows that stand for nothing."""
    from llguidance import LLTokenizer

    eos = list(ends) or None
    return LLTokenizer(_Words(words, special, ends), n_vocab=None, eos_token=eos)  # type: ignore[arg-type]


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

    What the booleans say of end tokens means nothing; the array may be longer than the vocabulary.
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
    """What the library has to say, without its pictures of the grammar."""
    lines = str(matcher.get_error()).splitlines()
    said = [line.strip() for line in (lines[:1] + [line for line in lines[1:] if line.startswith("error:")])]
    text = _PLACE.sub("", " ".join(said)).split(" Enable '")[0].rstrip(":.")
    return text[:300] or "no token is allowed"
