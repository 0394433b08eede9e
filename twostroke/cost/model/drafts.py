"""What speculative decoding changes in the time of a token.

A step verifies k drafted tokens of each stream: 1 + k rows, and one read of the stream's context. If a drafted token is
right with probability p, the step writes 1 + p + p² + … + p^k tokens on average. So

    TPOT(k) = (step of 1 + k rows + k steps of the draft model) / expected tokens

and the engine takes the k with the shortest TPOT. Prompt lookup has no draft model, but drafts only where it has found
a match: a source is a kind of match, with the share of steps that have one and how often its drafts are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twostroke.cost.model.roofline import Roofline
from twostroke.draft.speculate import GAIN
from twostroke.types import MOST_DRAFTED

NEAR = 128  # tokens of context: within so many the gain is taken to be the same


class DraftSource(NamedTuple):
    """One kind of drafts."""

    covered: float  # share of a stream's steps that have one
    right: float  # probability that a drafted token is right, given that those before it were


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """How good drafts are, and what makes them."""

    sources: tuple[DraftSource, ...]
    streams: int | None = None  # with more streams nothing is drafted; None: no limit
    draft: Roofline | None = None  # of a draft model; None: drafts cost nothing

    @property
    def covered(self) -> float:
        return sum(source.covered for source in self.sources)

    @property
    def right(self) -> float:
        """The probability that a drafted token is right, over all sources."""
        return sum(one.covered * one.right for one in self.sources) / max(self.covered, 1e-12)


class Best(NamedTuple):
    length: int  # drafted tokens of a stream, at most
    tokens: float  # that a step writes for each stream, on average
    tpot: float


def expected_tokens(right: float, length: int) -> float:
    """Tokens that a step with a draft of this length writes for its stream."""
    return float(length + 1) if right >= 1 else (1 - right ** (length + 1)) / (1 - right)


def right_for(accepted: float, length: int) -> float:
    """The probability with which drafts of this length bring so many tokens on average. Some drafts are right to their
    end and others wrong at once: the share of right tokens alone would promise more than they bring."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, length) - 1 < accepted else (low, middle)
    return low


def verify_seconds(line: Roofline, streams: int, context: int, length: int) -> float:
    """A step in which each stream verifies a draft of this length."""
    rows = streams * (1 + length)
    return (
        line.rates.step_seconds
        + streams * line.rates.request_seconds
        + line.linear(rows, rows)
        + streams * line.attended((context,)) / line.rates.kv_bandwidth
    )


def best_length(line: Roofline, drafts: DraftQuality, streams: int, context: int) -> Best:
    """The lengths with the shortest time per token; 0 where drafts do not pay."""
    none = Best(0, 1.0, line.decode_seconds(streams, context))
    if drafts.streams is not None and streams > drafts.streams:
        return none
    helper = drafts.draft.decode_seconds(streams, context) if drafts.draft is not None else 0.0
    times = [verify_seconds(line, streams, context, length) + length * helper for length in range(MOST_DRAFTED + 1)]
    lengths, best = [0] * len(drafts.sources), none
    for place in range(len(lengths)):  # each source in turn, with those before it at their best
        for length in range(1, MOST_DRAFTED + 1):
            tried = [*lengths[:place], length, *lengths[place + 1 :]]
            found = with_lengths(drafts.sources, tried, times)
            if found.tpot < best.tpot:
                lengths, best = tried, found
    return best if best.tpot * GAIN <= none.tpot else none


def with_lengths(sources: Sequence[DraftSource], lengths: Sequence[int], times: Sequence[float]) -> Best:
    """times: seconds of a step by the length of its drafts. Where some streams draft and others do not, the time lies
    between."""
    mean, tokens = times[0], 1.0
    for (covered, right), length in zip(sources, lengths, strict=True):
        mean += covered * (times[length] - times[0])
        tokens += covered * (expected_tokens(right, length) - 1)
    return Best(max(lengths), tokens, mean / tokens)


class DraftingRoofline(Roofline):
    """Steps without prompts take what a token takes with drafts: a simulated stream writes one token in each."""

    def __init__(self, plain: Roofline, drafts: DraftQuality):
        super().__init__(plain.model, plain.layout, plain.rates, plain.count, plain.link)
        self.plain = plain
        self.drafts = drafts
        self._ratios: dict[tuple[int, int], float] = {}

    def ratio(self, streams: int, context: float) -> float:
        """TPOT with drafts over that without."""
        key = (streams, round(context / NEAR))
        found = self._ratios.get(key)
        if found is None:
            near = max(1, NEAR * key[1])
            best = best_length(self.plain, self.drafts, streams, near)
            found = self._ratios[key] = best.tpot / self.plain.decode_seconds(streams, near)
        return found

    def step(
        self,
        chunks: Sequence[tuple[int, int]],
        contexts: Sequence[int],
        logit_rows: int,
        more_streams: int = 0,
        more_context: int = 0,
    ) -> float:
        seconds = super().step(chunks, contexts, logit_rows, more_streams, more_context)
        streams = len(contexts) + more_streams
        if chunks or not streams:
            return seconds
        return seconds * self.ratio(streams, (sum(contexts) + more_context) / streams)

    def decode_run(self, contexts: Sequence[int], steps: int) -> np.ndarray:
        middle = sum(contexts) / len(contexts) + steps / 2
        return super().decode_run(contexts, steps) * self.ratio(len(contexts), middle)
