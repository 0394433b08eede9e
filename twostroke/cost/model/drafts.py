"""What speculative decoding changes in the time of a token.

A step verifies k drafted tokens of each stream: 1 + k rows, and one read of the stream's context. If a drafted token is
right with probability p, the step writes 1 + p + p² + … + p^k tokens on average. So

    TPOT(k) = (step of 1 + k rows + k steps of the draft model) / expected tokens

and the engine takes the k with the shortest TPOT. Prompt lookup has no draft model, but drafts only where it has found
a match: `covered` is the share of such steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from twostroke.cost.model.roofline import Roofline

MOST = 16  # drafted tokens of one stream and step


@dataclass(frozen=True, slots=True)
class Drafts:
    """How good drafts are, and what makes them."""

    right: float  # probability that a drafted token is right, given that those before it were
    covered: float = 1.0  # share of a stream's steps that have a draft
    most: int = MOST  # longest draft
    streams: int | None = None  # with more streams nothing is drafted; None: no limit
    draft: Roofline | None = None  # of a draft model; None: drafts cost nothing


class Best(NamedTuple):
    length: int  # drafted tokens of each stream
    tokens: float  # that a step writes for each stream, on average
    tpot: float


def expected_tokens(right: float, length: int) -> float:
    """Tokens that a step with a draft of this length writes for its stream."""
    return float(length + 1) if right >= 1 else (1 - right ** (length + 1)) / (1 - right)


def verify_seconds(line: Roofline, streams: int, context: int, length: int) -> float:
    """A step in which each stream verifies a draft of this length."""
    rows = streams * (1 + length)
    return (
        line.rates.step_seconds
        + streams * line.rates.request_seconds
        + line.linear(rows, rows)
        + streams * line.attended((context,)) / line.rates.kv_bandwidth
    )


def best_length(line: Roofline, drafts: Drafts, streams: int, context: int) -> Best:
    """The length with the shortest time per token; 0 where drafts do not pay."""
    best = Best(0, 1.0, line.decode_seconds(streams, context))
    if drafts.streams is not None and streams > drafts.streams:
        return best
    alone = best.tpot
    helper = drafts.draft.decode_seconds(streams, context) if drafts.draft is not None else 0.0
    for length in range(1, drafts.most + 1):
        drafted = verify_seconds(line, streams, context, length) + length * helper
        # With some streams drafting, the time lies between that of a step without drafts and that of one with all.
        mean = drafts.covered * drafted + (1 - drafts.covered) * alone
        tokens = 1 + drafts.covered * (expected_tokens(drafts.right, length) - 1)
        if mean / tokens < best.tpot:
            best = Best(length, tokens, mean / tokens)
    return best
