"""The best route for one request, found among all workers at once. Torch-free.

Loads are arrays (standing.py), so the least of all is found with a few operations. What a worker has of the prompt is
first taken as the most that it may have (holdings.py): its cost is then a lower bound. Where the least value is only a
bound, the blocks of that worker are looked up, and the least is sought again; so few workers are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np

from twostroke.cluster.holdings import Holdings
from twostroke.cluster.standing import Standing, Vector
from twostroke.ops.interface import BLOCK

FEW = 16  # workers that are taken out of their bits one by one
ALL = slice(None)
At = int | slice


class Found(NamedTuple):
    cost: float
    decode: int
    prefill: int


NONE = Found(inf, -1, -1)


class Search:
    def __init__(
        self,
        standing: Standing,
        holdings: Holdings,
        tokens: int,
        names: Sequence[bytes],
        sending: Callable[[int], float],
    ):
        """tokens, names: of the prompt. sending: seconds for so many blocks."""
        self.standing = standing
        self.holdings = holdings
        self.length = tokens
        self.names = names
        self.seconds = sending
        count = standing.rows.shape[1]
        self.tokens, self.sending, self.cost = standing.scratch
        self.tokens.fill(max(1, tokens))  # that a worker has to compute
        self.sending.fill(sending(len(names)))  # seconds, for the blocks that a worker lacks
        self.unsure = 0  # bits of the workers for which the two are bounds
        for bits, most in holdings.most(names):
            at = places(bits, count)
            self.unsure |= bits
            self.tokens[at], self.sending[at] = self._with(most)
        np.multiply(standing.slope, self.tokens, out=self.cost)
        np.add(self.cost, standing.wait, out=self.cost)

    def _with(self, cached: int) -> tuple[float, float]:
        """Tokens to compute and seconds to send, for a worker that has so many blocks."""
        return float(max(1, self.length - cached * BLOCK)), self.seconds(len(self.names) - cached)

    def settle(self, worker: int) -> None:
        """Look up what it has."""
        if self.unsure >> worker & 1:
            self.unsure ^= 1 << worker
            tokens, sending = self._with(self.holdings.cached(worker, self.names))
            self.tokens[worker], self.sending[worker] = tokens, sending
            self.cost[worker] = self.standing.slope[worker] * tokens + self.standing.wait[worker]

    def least(self, value: Callable[[At], Any], but: int | None = None) -> tuple[int, float]:
        """The worker with the least value, and the value; the first one among equals."""
        values: Vector = value(ALL)
        if but is not None:
            values[but] = inf
        while True:
            worker = int(values.argmin())
            if not self.unsure >> worker & 1:
                return worker, float(values[worker])
            self.settle(worker)
            values[worker] = value(worker)

    # ---- routes ----------------------------------------------------------------------------------------------------

    def best(self, apart: bool) -> Found:
        """apart: prompts with a full block are computed by workers that do nothing else, or by others than the writer
        where there are none."""
        standing = self.standing
        helps = standing.helps_only if apart and standing.helpers_only else standing.helps
        helped = bool(self.names) and bool(standing.helpers)
        found = NONE
        if not (apart and helped):
            worker, cost = self.least(self._in_place)
            found = Found(cost, worker, worker) if cost < inf else NONE
        return self._with_helper(helps, found, apart) if helped else found

    def _in_place(self, at: At) -> Any:
        standing = self.standing
        if not standing.full:
            return self.cost[at] + standing.step[at]
        tokens = self.tokens[at]
        done = np.maximum(standing.wait[at] + standing.token[at] * tokens, standing.place[at])
        return done + standing.busy[at] * tokens + standing.step[at]

    def _with_helper(self, helps: Vector, found: Found, apart: bool) -> Found:
        """Of all workers the one that computes the prompt at the least cost is best for every writer, unless answers
        wait for places: then one whose own streams lose less may be better. Nor can it be its own writer if apart."""
        standing = self.standing
        helper, _ = self.least(lambda at: self.cost[at] + helps[at])
        found = self._better(found, helper)
        own = apart and standing.step[helper] < inf
        if own or (standing.full and standing.busy[helper] > 0):
            found = self._others(helps, found, helper)
        return found

    def _better(self, found: Found, helper: int) -> Found:
        """Its best writer, if that is a better route."""
        standing, tokens = self.standing, self.tokens[helper]
        done = float(standing.wait[helper] + standing.token[helper] * tokens)
        lost = float(standing.busy[helper] * tokens)

        def to_writer(at: At) -> Any:
            ready = self.sending[at] + done
            if standing.full:
                ready = np.maximum(ready, standing.place[at])
            return ready + standing.step[at] + lost

        writer, cost = self.least(to_writer, helper)
        other = Found(cost, writer, helper)
        return other if cost < inf and other[:2] < found[:2] else found

    def _others(self, helps: Vector, found: Found, tried: int) -> Found:
        """As long as one may be better."""
        standing = self.standing
        soonest = self.sending.min() + standing.step.min()
        free = (standing.place + standing.step).min()
        bound = np.maximum(self.cost + soonest, standing.busy * self.tokens + free) + helps
        bound[tried] = inf
        while True:
            helper = int(bound.argmin())
            if not bound[helper] < found.cost:
                return found
            bound[helper] = inf
            self.settle(helper)
            found = self._better(found, helper)


def places(bits: int, count: int) -> list[int] | np.ndarray:
    """The numbers of the bits that are set, or which of `count` are."""
    if bits.bit_count() > FEW:
        octets = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), np.uint8)
        return np.unpackbits(octets, count=count, bitorder="little").view(np.bool_)
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
