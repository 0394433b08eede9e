"""Why a prompt was not in the prefix cache: where it first differs from the most similar prompt of the same API key.

The server keeps a bounded record of recent prompts by key. A key's prompts are compared with its own only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from twostroke.ops.interface import BLOCK
from twostroke.text.tokenizer import Tokenizer

MAX_KEYS = 256
MAX_PROMPTS = 64  # of one key
MAX_TOKENS = 1 << 20  # of all keys together
CONTEXT = 8  # tokens that are shown before and after a difference


class Nearest(NamedTuple):
    tokens: np.ndarray  # of the earlier prompt
    common: int  # number of tokens at the start that are equal


class RecentPrompts:
    """Recent prompts with their answers, by the salt of their key."""

    def __init__(self) -> None:
        self._by_salt: OrderedDict[bytes, deque[np.ndarray]] = OrderedDict()
        self._tokens = 0

    def add(self, salt: bytes, tokens: Sequence[int]) -> None:
        known = self._by_salt.setdefault(salt, deque())
        self._by_salt.move_to_end(salt)
        known.append(np.asarray(tokens, dtype=np.int32))
        self._tokens += len(tokens)
        if len(known) > MAX_PROMPTS:
            self._tokens -= len(known.popleft())
        while self._tokens > MAX_TOKENS or len(self._by_salt) > MAX_KEYS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        salt, known = next(iter(self._by_salt.items()))
        self._tokens -= len(known.popleft())
        if not known:
            del self._by_salt[salt]

    def nearest(self, salt: bytes, tokens: Sequence[int]) -> Nearest | None:
        """The earlier prompt with the longest common prefix; of several, the latest."""
        ours = np.asarray(tokens, dtype=np.int32)
        best: Nearest | None = None
        for theirs in self._by_salt.get(salt, ()):
            length = min(len(ours), len(theirs))
            different = np.flatnonzero(ours[:length] != theirs[:length])
            common = int(different[0]) if len(different) else length
            if best is None or common >= best.common:
                best = Nearest(theirs, common)
        return best


def explanation(tokenizer: Tokenizer, tokens: Sequence[int], cached: int, near: Nearest | None) -> dict[str, Any]:
    """The answer to `prefix_cache: {"explain": true}`."""

    def text(part: Sequence[int]) -> str:
        return tokenizer.decode(list(part), skip_special=False, at_start=False)

    nearest, why = None, "No earlier prompt of this key is on record."
    if near is not None:
        common = near.common
        nearest = {
            "first_difference": common,
            "text_before": text(tokens[max(0, common - CONTEXT) : common]),
            "text_here": text(tokens[common : common + CONTEXT]),
            "text_there": text(near.tokens[common : common + CONTEXT].tolist()),
        }
        why = sentence(len(tokens), cached, common)
    return {"prompt_tokens": len(tokens), "cached_tokens": cached, "nearest": nearest, "explanation": why}


def sentence(length: int, cached: int, common: int) -> str:
    usable = min(common, length - 1) // BLOCK * BLOCK
    if cached >= usable:
        end = "the whole prompt was seen before" if common >= length else f"token {common} differs"
        return f"{cached} of {length} tokens were reused: {end}, and reuse is in whole blocks of {BLOCK} tokens."
    return (
        f"{cached} of {length} tokens were reused although {common} are the same: the blocks in between were evicted, "
        "not yet computed, or left out on purpose (logprobs of the prompt need all of it)."
    )
