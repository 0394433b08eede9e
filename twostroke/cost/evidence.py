"""What a recording shows: lengths, shares of phases, TTFT against prompt length, gaps against batch, MFU and MBU."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from twostroke.cost.deploy import Outcome
from twostroke.cost.fleet import Served
from twostroke.cost.roofline import Roofline
from twostroke.cost.summary import Spread

STALL = 4.0  # times the median gap that a gap must have to count as a stall


@dataclass(frozen=True, slots=True)
class Ideal:
    """What the same machine would take with one request at a time and nothing read twice: the floor."""

    start: list[float]  # TTFT of each request, alone
    writing: list[float]  # decode of each request, alone


@dataclass(frozen=True, slots=True)
class Evidence:
    prompt: Spread
    output: Spread
    queue_share: float  # of all time
    prefill_share: float
    decode_share: float
    queue_of_ttft: float
    prefill_per_1k: float  # seconds that 1,000 more prompt tokens add to the prefill phase
    ttft_over_ideal: float  # mean TTFT over that of the same requests alone
    decode_over_ideal: float
    stall_share: float  # of the time between tokens, spent beyond the median gap in gaps over STALL times as long
    tpot_per_stream: float  # seconds that one more stream beside it adds to TPOT
    tpot_per_1k: float  # seconds that 1,000 more tokens of context add to TPOT
    batch: float  # streams that ran at once, on average
    prefill_mfu: float  # of what the machine reaches in matrix products
    decode_mbu: float  # of the bandwidth it reaches
    kv_peak: float | None  # share of blocks held; None where nobody looked
    hit_rate: float
    shareable: float  # share of prompt tokens whose text an earlier prompt had too, wherever it stood
    preemptions: int
    recomputed: int

    def document(self) -> dict[str, Any]:
        return asdict(self)


def ideal_times(served: Sequence[Served], fresh: Sequence[int], roofline: Roofline, step_tokens: int) -> Ideal:
    """`fresh`: prompt tokens of each request that no earlier one had."""
    start = [
        roofline.prefill_seconds(one.prompt, min(one.prompt - 1, one.prompt - new), step_tokens)
        for one, new in zip(served, fresh, strict=True)
    ]
    writing = []
    for one in served:
        steps = max(0, one.output - 1)
        # The step in the middle of the answer times their number: the cost grows linearly along it.
        writing.append(steps * roofline.decode_seconds(1, one.prompt + 1 + steps // 2))
    return Ideal(start, writing)


def gather(outcome: Outcome, ideal: Ideal, shareable: float, kv_known: bool = True) -> Evidence:
    served = [one for one in outcome.served if not one.refused and one.output]
    summary, roofline = outcome.summary, outcome.deployment.roofline(outcome.settings)
    ttft = np.array([one.ttft for one in served])
    queue = sum(one.scheduled - one.arrival for one in served)
    decode = sum(one.end - one.first for one in served)
    beside = concurrency(served)
    per_stream, per_token = tpot_slopes(beside, served)
    return Evidence(
        prompt=Spread.of([one.prompt for one in served]),
        output=Spread.of([one.output for one in served]),
        queue_share=summary.queue_share,
        prefill_share=summary.prefill_share,
        decode_share=summary.decode_share,
        queue_of_ttft=queue / max(float(ttft.sum()), 1e-12),
        prefill_per_1k=1000
        * slope([one.prompt - one.cached for one in served], [one.first - one.scheduled for one in served]),
        ttft_over_ideal=float(ttft.sum()) / max(sum(ideal.start), 1e-12),
        decode_over_ideal=decode / max(sum(ideal.writing), 1e-12),
        stall_share=stalls(served),
        tpot_per_stream=per_stream,
        tpot_per_1k=1000 * per_token,
        batch=float(np.mean(beside)) if len(beside) else 0.0,
        prefill_mfu=prefill_mfu(served, roofline),
        decode_mbu=decode_mbu(served, roofline, beside),
        kv_peak=outcome.kv_peak if kv_known else None,
        hit_rate=summary.hit_rate,
        shareable=shareable,
        preemptions=summary.preemptions,
        recomputed=summary.recomputed,
    )


def concurrency(served: Sequence[Served]) -> np.ndarray:
    """For each request, how many streams were being written when it was half written, itself included."""
    firsts = sorted(one.first for one in served)
    ends = sorted(one.end for one in served)
    middles = [(one.first + one.end) / 2 for one in served]
    return np.array([max(1, bisect_right(firsts, at) - bisect_left(ends, at)) for at in middles], dtype=np.float64)


def tpot_slopes(beside: np.ndarray, served: Sequence[Served]) -> tuple[float, float]:
    """Seconds of TPOT for one more stream at once and for one more token of context, both from one plane; 0 for what
    hardly varies."""
    rows = [
        (float(count), one.prompt + one.output / 2, one.tpot)
        for count, one in zip(beside, served, strict=True)
        if one.tpot is not None
    ]
    if len(rows) < 4:
        return 0.0, 0.0
    table = np.array(rows)
    varies = [spreads(table[:, column]) for column in (0, 1)]
    columns = [table[:, column] for column in (0, 1) if varies[column]]
    found = iter(np.linalg.lstsq(np.column_stack([*columns, np.ones(len(rows))]), table[:, 2], rcond=None)[0])
    per_stream, per_token = (float(next(found)) if one else 0.0 for one in varies)
    return per_stream, per_token


def spreads(values: Sequence[float] | np.ndarray) -> bool:
    return float(np.std(values)) >= 0.1 * abs(float(np.mean(values)))


def slope(x: Sequence[float], y: Sequence[float] | np.ndarray) -> float:
    """Of the straight line through the points; 0 where they hardly spread."""
    if len(x) < 3 or not spreads(x):
        return 0.0
    return float(np.polyfit(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64), 1)[0])


def stalls(served: Sequence[Served]) -> float:
    gaps = np.concatenate([one.gaps for one in served]) if served else np.empty(0)
    if not len(gaps):
        return 0.0
    usual = float(np.median(gaps))
    long = gaps[gaps > STALL * usual]
    return float((long - usual).sum() / max(float(gaps.sum()), 1e-12))


def prefill_mfu(served: Sequence[Served], roofline: Roofline) -> float:
    """FLOPs of prompts over the seconds their prefill took, the median over requests, against the reached peak."""
    found = []
    for one in served:
        took = one.first - one.scheduled
        if took > 0 and one.prompt > one.cached:
            flops = roofline.flops([(one.cached, one.prompt - one.cached)], [], 1)
            found.append(flops / took / roofline.rates.compute)
    return float(np.median(found)) if found else 0.0


def decode_mbu(served: Sequence[Served], roofline: Roofline, beside: np.ndarray) -> float:
    """Bytes a step of the usual batch reads over the usual TPOT, against the reached bandwidth."""
    tpots = [one.tpot for one in served if one.tpot is not None]
    if not tpots:
        return 0.0
    context = float(np.mean([one.prompt + one.output / 2 for one in served]))
    streams = max(1, round(float(np.median(beside))))
    return roofline.bytes([], [round(context)] * streams, streams) / float(np.median(tpots)) / roofline.rates.bandwidth
