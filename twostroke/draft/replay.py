"""Prompt lookup replayed over an answer that was written without it: how often its guesses would have been right.

Only counts are kept, neither text nor tokens. They predict what the lever would do before it is pulled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from twostroke.draft.lookup import Lookup
from twostroke.draft.rates import kind_of

KINDS = 4  # of guesses: by the length of the match (rates.py)
GUESSED = 8  # tokens in one replayed step
NONE = (0,) * KINDS


class LookupCounts(NamedTuple):
    """Steps that lookup would have needed, and by kind of match: steps with guesses, guesses up to the first wrong one,
    right guesses."""

    steps: int = 0
    covered: tuple[int, ...] = NONE
    tried: tuple[int, ...] = NONE
    right: tuple[int, ...] = NONE


def replay(prompt: Sequence[int], answer: Sequence[int]) -> LookupCounts:
    """Each step guesses GUESSED tokens where there is a match, and writes the right ones and one more."""
    lookup, seen, steps = Lookup(), list(prompt), 0
    covered, tried, right = list(NONE), list(NONE), list(NONE)
    written = 1  # the first token comes with the prompt
    seen.extend(answer[:1])
    while written < len(answer):
        steps, accepted = steps + 1, 0
        match = lookup.update(seen)
        if match:
            kind = kind_of(match)
            guesses = lookup.guess(seen, min(GUESSED, len(answer) - written))
            accepted = agreeing(guesses, answer[written : written + len(guesses)])
            covered[kind] += 1
            tried[kind] += min(len(guesses), accepted + 1)
            right[kind] += accepted
        new = answer[written : written + accepted + 1]
        seen.extend(new)
        written += len(new)
    return LookupCounts(steps, tuple(covered), tuple(tried), tuple(right))


def agreeing(guesses: Sequence[int], truth: Sequence[int]) -> int:
    """How many of the first guesses are right."""
    for count, (guess, token) in enumerate(zip(guesses, truth, strict=False)):
        if guess != token:
            return count
    return min(len(guesses), len(truth))


def total(counts: Iterable[LookupCounts]) -> LookupCounts:
    steps, kinds = 0, [list(NONE) for _ in range(3)]
    for one in counts:
        steps += one.steps
        for sums, values in zip(kinds, (one.covered, one.tried, one.right), strict=True):
            sums[:] = [sum(pair) for pair in zip(sums, values, strict=True)]
    return LookupCounts(steps, *map(tuple, kinds))
