"""What happened to each request, and a summary of many.

TTFT includes queueing, TPOT is per request, ITL per gap. Percentiles over requests (TTFT, TPOT, E2E) and over tokens
(ITL) are never mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np

from twostroke.cost.units import seconds as in_words

QUANTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class Served:
    """What happened to one arrival. Times in seconds, on the trace's clock."""

    arrival: float
    prompt: int
    cached: int = 0
    scheduled: float = 0.0
    first: float = inf
    end: float = inf
    output: int = 0
    preemptions: int = 0
    recomputed: int = 0
    refused: bool = False  # longer than max_model_len, or not answered
    gaps: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32))

    @property
    def answered(self) -> bool:
        return not self.refused and self.output > 0

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float | None:
        return (self.end - self.first) / (self.output - 1) if self.output > 1 else None


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one quantity."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Spread:
        if len(values) == 0:
            return cls(*[float("nan")] * 5)
        array = np.asarray(values, dtype=np.float64)
        return cls(float(array.mean()), *(float(value) for value in np.percentile(array, QUANTILES)))


@dataclass(frozen=True, slots=True)
class Summary:
    requests: int
    refused: int
    seconds: float  # from the first arrival to the last token
    ttft: Spread
    tpot: Spread
    itl: Spread
    stall: Spread  # over requests: the longest gap of each
    e2e: Spread
    queue_share: float  # of all requests' time together
    prefill_share: float
    decode_share: float
    output_rate: float  # tokens/s written
    prompt_rate: float  # prompt tokens/s, cached ones included
    request_rate: float
    hit_rate: float  # share of prompt tokens found in the prefix cache
    preemptions: int
    recomputed: int

    def document(self) -> dict[str, Any]:
        return asdict(self)


def summarize(served: Sequence[Served]) -> Summary:
    done = [one for one in served if one.answered]
    ends = [one.end for one in done]
    seconds = max(ends) - min(one.arrival for one in done) if done else 0.0
    queue = sum(one.scheduled - one.arrival for one in done)
    prefill = sum(one.first - one.scheduled for one in done)
    decode = sum(one.end - one.first for one in done)
    whole = max(queue + prefill + decode, 1e-12)
    prompts = sum(one.prompt for one in done)
    span = max(seconds, 1e-12)
    return Summary(
        requests=len(done),
        refused=len(served) - len(done),
        seconds=seconds,
        ttft=Spread.of([one.ttft for one in done]),
        tpot=Spread.of([one.tpot for one in done if one.tpot is not None]),
        itl=Spread.of(np.concatenate([one.gaps for one in done]) if done else []),
        stall=Spread.of([float(one.gaps.max()) for one in done if len(one.gaps)]),
        e2e=Spread.of([one.end - one.arrival for one in done]),
        queue_share=queue / whole,
        prefill_share=prefill / whole,
        decode_share=decode / whole,
        output_rate=sum(one.output for one in done) / span,
        prompt_rate=prompts / span,
        request_rate=len(done) / span,
        hit_rate=sum(one.cached for one in done) / max(1, prompts),
        preemptions=sum(one.preemptions for one in done),
        recomputed=sum(one.recomputed for one in done),
    )


class Targets(NamedTuple):
    """Seconds that a request should not exceed."""

    ttft: float = inf
    tpot: float = inf

    def __str__(self) -> str:
        limits = zip(("TTFT", "TPOT"), self, strict=True)
        return " and ".join(f"{name} ≤ {in_words(most)}" for name, most in limits if most < inf)

    @property
    def given(self) -> bool:
        return self != (inf, inf)

    def met_by(self, one: Served) -> bool:
        """A refused request meets no target."""
        return not one.refused and one.ttft <= self.ttft and (one.tpot is None or one.tpot <= self.tpot)

    def met_by_share(self, served: Sequence[Served], share: float) -> bool:
        return sum(map(self.met_by, served)) >= share * len(served)

    def goodput(self, served: Sequence[Served]) -> float:
        """Requests a second that met the targets."""
        done = [one for one in served if one.answered]
        if not done:
            return 0.0
        return sum(map(self.met_by, done)) / max(max(one.end for one in done) - min(one.arrival for one in done), 1e-12)
