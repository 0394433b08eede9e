"""The numbers that a diagnosis rests on: lengths, shares of phases, how TTFT and TPOT grow, MFU and MBU."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.cost.model.roofline import Roofline
from twostroke.cost.simulation.deployment import Outcome
from twostroke.cost.simulation.served import Served, Spread

STALL = 4.0  # times the median gap that a gap must have to count as a stall


@dataclass(frozen=True, slots=True)
class TimesAlone:
    """What the same machine takes for each request alone, with a perfect prefix cache: the floor."""

    start: list[float]  # TTFT of each request
    decode: list[float]  # decode time of each request


@dataclass(frozen=True, slots=True)
class Evidence:
    prompt: Spread
    output: Spread
    queue_share: float  # of all requests' time
    prefill_share: float
    decode_share: float
    queue_of_ttft: float
    prefill_per_1k: float  # seconds that 1,000 more prompt tokens add to the prefill phase
    ttft_over_alone: float  # mean TTFT over that of the same requests alone
    decode_over_alone: float
    stall_share: float  # of decode time: what long gaps (STALL times the median) take beyond the median gap
    tpot_per_stream: float  # seconds that one more stream adds to TPOT
    tpot_per_1k: float  # seconds that 1,000 more tokens of context add to TPOT
    batch: float  # streams that ran at once, on average
    prefill_mfu: float  # of the FLOP/s that the machine reaches
    decode_mbu: float  # of the bandwidth that the machine reaches
    kv_peak: float | None  # largest share of blocks held; None: not known
    hit_rate: float
    shareable: float  # share of prompt tokens whose text an earlier prompt had, at any position
    preemptions: int


def times_alone(served: Sequence[Served], fresh: Sequence[int], roofline: Roofline, step_tokens: int) -> TimesAlone:
    """`fresh`: prompt tokens of each request that no earlier one had."""
    start = [
        roofline.prefill_seconds(one.prompt, min(one.prompt - 1, one.prompt - new), step_tokens)
        for one, new in zip(served, fresh, strict=True)
    ]
    decode = []
    for one in served:
        steps = max(0, one.output - 1)
        # Steps times the one in the middle of the answer: the cost grows linearly with the context.
        decode.append(steps * roofline.decode_seconds(1, one.prompt + 1 + steps // 2))
    return TimesAlone(start, decode)


def gather(outcome: Outcome, alone: TimesAlone, shareable: float, kv_known: bool = True) -> Evidence:
    served = [one for one in outcome.served if one.answered]
    summary, roofline = outcome.summary, outcome.deployment.roofline(outcome.settings)
    ttft = np.array([one.ttft for one in served])
    queue = sum(one.scheduled - one.arrival for one in served)
    decode = sum(one.end - one.first for one in served)
    streams = concurrency(served)
    per_stream, per_token = tpot_slopes(streams, served)
    return Evidence(
        prompt=Spread.of([one.prompt for one in served]),
        output=Spread.of([one.output for one in served]),
        queue_share=summary.queue_share,
        prefill_share=summary.prefill_share,
        decode_share=summary.decode_share,
        queue_of_ttft=queue / max(float(ttft.sum()), 1e-12),
        prefill_per_1k=1000
        * slope([one.prompt - one.cached for one in served], [one.first - one.scheduled for one in served]),
        ttft_over_alone=float(ttft.sum()) / max(sum(alone.start), 1e-12),
        decode_over_alone=decode / max(sum(alone.decode), 1e-12),
        stall_share=stalls(served),
        tpot_per_stream=per_stream,
        tpot_per_1k=1000 * per_token,
        batch=float(np.mean(streams)) if len(streams) else 0.0,
        prefill_mfu=prefill_mfu(served, roofline),
        decode_mbu=decode_mbu(served, roofline, streams),
        kv_peak=outcome.kv_peak if kv_known else None,
        hit_rate=summary.hit_rate,
        shareable=shareable,
        preemptions=summary.preemptions,
    )


def concurrency(served: Sequence[Served]) -> np.ndarray:
    """For each request, how many streams were decoding at the middle of its decode phase, itself included."""
    firsts = sorted(one.first for one in served)
    ends = sorted(one.end for one in served)
    middles = [(one.first + one.end) / 2 for one in served]
    return np.array([max(1, bisect_right(firsts, at) - bisect_left(ends, at)) for at in middles], dtype=np.float64)


def tpot_slopes(streams: np.ndarray, served: Sequence[Served]) -> tuple[float, float]:
    """Seconds of TPOT for one more stream and for one more token of context, fitted together; 0 for what hardly
    varies."""
    rows = [
        (float(count), one.prompt + one.output / 2, one.tpot)
        for count, one in zip(streams, served, strict=True)
        if one.tpot is not None
    ]
    if len(rows) < 4:
        return 0.0, 0.0
    table = np.array(rows)
    varied = [varies(table[:, column]) for column in (0, 1)]
    columns = [table[:, column] for column in (0, 1) if varied[column]]
    found = iter(np.linalg.lstsq(np.column_stack([*columns, np.ones(len(rows))]), table[:, 2], rcond=None)[0])
    per_stream, per_token = (float(next(found)) if one else 0.0 for one in varied)
    return per_stream, per_token


def varies(values: Sequence[float] | np.ndarray) -> bool:
    return float(np.std(values)) >= 0.1 * abs(float(np.mean(values)))


def slope(x: Sequence[float], y: Sequence[float] | np.ndarray) -> float:
    """The slope of the straight line through the points; 0 where x hardly varies."""
    if len(x) < 3 or not varies(x):
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
    """FLOP/s of each request's prefill, the median over requests, as a share of what the machine reaches."""
    found = []
    for one in served:
        took = one.first - one.scheduled
        if took > 0 and one.prompt > one.cached:
            flops = roofline.flops([(one.cached, one.prompt - one.cached)], [], 1)
            found.append(flops / took / roofline.rates.compute)
    return min(1.0, float(np.median(found))) if found else 0.0


def decode_mbu(served: Sequence[Served], roofline: Roofline, concurrent: np.ndarray) -> float:
    """Bytes that a typical step reads over the median TPOT, as a share of the bandwidth that the machine reaches."""
    tpots = [one.tpot for one in served if one.tpot is not None]
    if not tpots:
        return 0.0
    context = float(np.mean([one.prompt + one.output / 2 for one in served]))
    streams = max(1, round(float(np.median(concurrent))))
    read = roofline.bytes([], [round(context)] * streams, streams) / float(np.median(tpots))
    return min(1.0, read / roofline.rates.bandwidth)
