"""Which stroke is slow, why, and what would help by how much.

1. The complaint. For every request, what it took beyond what the same machine needs for it alone, nothing read
   twice: before the first token (start) and after it (stream). The larger excess names the stroke; where everything
   was asked for at once, only the throughput counts. A target that is given and missed comes first.
2. The levers. The machine's rates are tuned until a replay of the arrivals looks like the measurement. Then they are
   replayed with each lever pulled; its effect is the ratio to the replay without it.
3. The cause. The lever that helps most, for what it costs and for what it does to the other stroke, names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import numpy as np

from twostroke.config import DEFAULT_BATCH_TOKENS, DEFAULT_GAP
from twostroke.cost.deploy import Deployment, Outcome
from twostroke.cost.evidence import Evidence, gather, ideal_times
from twostroke.cost.fleet import Served
from twostroke.cost.levers import LEVERS, Case, Lever
from twostroke.cost.summary import Summary, summarize
from twostroke.cost.trace import Arrival, fresh_tokens
from twostroke.cost.tune import tune

HELPS = 0.05  # gain (of a logarithm) below which a lever does not count as helping
SIDE = 0.5  # weight of harm done to what nobody complained about
AT_ONCE = 0.05  # arrivals within this share of the whole time: a batch job
REPLAYED = 600  # arrivals at most, from the busiest part of the recording
AMISS = 0.1  # share of all time, beyond what requests would take alone, below which nothing is slow
STALLING = 0.25  # share of writing time lost in long gaps above which streams stall rather than crawl


class Targets(NamedTuple):
    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True, slots=True)
class Effect:
    """What one lever is predicted to do: new over old, so 0.5 halves."""

    lever: Lever
    ttft: float
    tpot: float
    stall: float
    throughput: float
    cost: float  # of a million tokens
    score: float
    after: Case
    predicted: Outcome

    @property
    def helps(self) -> bool:
        return self.score > HELPS


@dataclass(frozen=True, slots=True)
class Useless:
    lever: Lever
    reason: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    phase: str  # "prefill" or "decode"
    metric: str  # what was optimised: "ttft", "tpot", "stall" or "throughput"
    sentence: str
    evidence: Evidence
    measured: Summary
    simulated: Summary  # the replay without any lever: how far it is from `measured` is the model's error
    effects: list[Effect]  # best first; only those that help
    useless: list[Useless]

    @property
    def best(self) -> Effect | None:
        return self.effects[0] if self.effects else None


def diagnose(
    deployment: Deployment,
    arrivals: Sequence[Arrival],
    served: Sequence[Served] | None = None,
    targets: Targets = Targets(),  # noqa: B008  frozen
    levers: Sequence[Lever] = LEVERS,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """`served`: what was measured for these arrivals; without it the simulator's own answer stands in."""
    arrivals, served = busiest(arrivals, served)
    if served is not None:
        deployment = tune(deployment, arrivals, served)
    base = deployment.run(arrivals)
    outcome = base if served is None else measured_outcome(base, served)
    step = DEFAULT_BATCH_TOKENS[deployment.device.kind]
    fresh = fresh_tokens(arrivals)
    both = [(one, new) for one, new in zip(outcome.served, fresh, strict=True) if not one.refused and one.output]
    done = [one for one, _ in both]
    ideal = ideal_times(done, [new for _, new in both], deployment.roofline(base.settings), step)
    shareable = 1 - sum(fresh) / sum(arrival.prompt for arrival in arrivals)
    evidence = gather(outcome, ideal, shareable, kv_known=served is None)
    phase, metric, slow = complaint(outcome, evidence, done, ideal.start, ideal.writing, targets)
    effects, useless = try_levers(Case(deployment, arrivals), base, metric, levers, progress)
    sentence = verdict(phase, metric, evidence, outcome.summary, effects[0] if effects else None, slow)
    return Diagnosis(phase, metric, sentence, evidence, outcome.summary, base.summary, effects, useless)


def busiest(
    arrivals: Sequence[Arrival], served: Sequence[Served] | None
) -> tuple[Sequence[Arrival], Sequence[Served] | None]:
    """The stretch of REPLAYED neighbours that arrived in the shortest time."""
    if len(arrivals) <= REPLAYED:
        return arrivals, served
    spans = [arrivals[i + REPLAYED - 1].at - arrivals[i].at for i in range(len(arrivals) - REPLAYED + 1)]
    first = int(np.argmin(spans))
    part = slice(first, first + REPLAYED)
    return arrivals[part], None if served is None else served[part]


def measured_outcome(base: Outcome, served: Sequence[Served]) -> Outcome:
    summary = summarize(served)
    return Outcome(base.deployment, base.settings, list(served), summary, base.kv_peak, base.utilisation)


# ---- the complaint -------------------------------------------------------------------------------------------------


def complaint(
    outcome: Outcome,
    evidence: Evidence,
    done: Sequence[Served],
    start: Sequence[float],
    writing: Sequence[float],
    targets: Targets,
) -> tuple[str, str, bool]:
    """(phase, metric) that somebody should complain about, or, where nobody should, that could be better."""
    summary = outcome.summary
    slow_start = targets.ttft is not None and summary.ttft.p95 > targets.ttft
    slow_stream = targets.tpot is not None and summary.tpot.p95 > targets.tpot
    noticed = summary.stall.mean > DEFAULT_GAP[outcome.deployment.device.kind]
    stream_metric = "stall" if noticed and evidence.stall_share > STALLING else "tpot"
    if slow_start != slow_stream:
        return ("prefill", "ttft", True) if slow_start else ("decode", stream_metric, True)
    span = max(one.arrival for one in done) - min(one.arrival for one in done)
    if len(done) > 1 and span < AT_ONCE * summary.seconds:
        return ("prefill" if sum(start) > sum(writing) else "decode", "throughput", True)
    late = sum(one.ttft for one in done) - sum(start)
    slow = sum(one.end - one.first for one in done) - sum(writing)
    whole = sum(one.end - one.arrival for one in done)
    amiss = slow_start or max(late, slow) >= AMISS * whole
    if not amiss:  # the stroke that takes longest is what could be faster
        late, slow = sum(start), sum(writing)
    return ("prefill", "ttft", amiss) if late > slow else ("decode", stream_metric, amiss)


# ---- the levers ----------------------------------------------------------------------------------------------------


def try_levers(
    case: Case, base: Outcome, metric: str, levers: Sequence[Lever], progress: Callable[[str], None] | None
) -> tuple[list[Effect], list[Useless]]:
    effects, useless = [], []
    for lever in levers:
        if progress is not None:
            progress(lever.name)
        after = lever.pull(case)
        if isinstance(after, str):
            useless.append(Useless(lever, after))
            continue
        effect = compare(lever, after, base, after.deployment.run(after.arrivals), metric)
        if effect.helps:
            effects.append(effect)
        else:
            useless.append(Useless(lever, why_not(effect, metric)))
    return sorted(effects, key=lambda effect: -effect.score), useless


def compare(lever: Lever, after: Case, before: Outcome, then: Outcome, metric: str) -> Effect:
    old, new = before.summary, then.summary
    ttft = (ratio(new.ttft.p50, old.ttft.p50) * ratio(new.ttft.p95, old.ttft.p95)) ** 0.5
    tpot = (ratio(new.tpot.p50, old.tpot.p50) * ratio(new.tpot.p95, old.tpot.p95)) ** 0.5
    fine = DEFAULT_GAP[before.deployment.device.kind]  # a gap that readers hardly notice: shorter is no gain
    stall = ratio(max(fine, new.stall.mean), max(fine, old.stall.mean))
    throughput = ratio(new.output_rate, old.output_rate)
    cost = ratio(then.deployment.price, before.deployment.price) / throughput
    gains = {"ttft": -log(ttft), "tpot": -log(tpot), "stall": -log(stall), "throughput": log(throughput)}
    others = ("ttft", "tpot") if metric == "throughput" else ("ttft", "tpot", "throughput")
    harm = sum(min(0.0, gains[name] + HELPS) for name in others if name != metric)
    paid = log(ratio(then.deployment.price, before.deployment.price))
    refused = max(0, new.refused - old.refused)
    weight = 0.0 if metric == "throughput" else SIDE
    score = gains[metric] + weight * harm - paid - lever.lossy - 10.0 * refused / max(1, old.requests)
    return Effect(lever, ttft, tpot, stall, throughput, cost, score, after, then)


def ratio(new: float, old: float) -> float:
    return 1.0 if not (new > 0 and old > 0) else new / old


def why_not(effect: Effect, metric: str) -> str:
    """Why a lever that was tried does not help with this complaint."""
    change = {"ttft": effect.ttft, "tpot": effect.tpot, "stall": effect.stall, "throughput": effect.throughput}
    name = {"ttft": "TTFT", "tpot": "TPOT", "stall": "the longest gap", "throughput": "throughput"}[metric]
    moved = change[metric]
    better = moved > 1 + HELPS if metric == "throughput" else moved < 1 - HELPS
    if not better:
        return f"{name} {moved - 1:+.0%} here; in general: {effect.lever.expect}"
    costs = [
        f"{label} {value - 1:+.0%}"
        for label, value in (("TTFT", effect.ttft), ("TPOT", effect.tpot))
        if value > 1 + HELPS and label != name
    ]
    if effect.cost > 1 + HELPS:
        costs.append(f"cost {effect.cost - 1:+.0%}")
    return f"{name} {moved - 1:+.0%}, but at too high a price: {', '.join(costs) or 'answers change'}"


# ---- the sentence --------------------------------------------------------------------------------------------------


def verdict(
    phase: str, metric: str, evidence: Evidence, summary: Summary, best: Effect | None, slow: bool = True
) -> str:
    if not slow:
        stroke = "reading prompts" if phase == "prefill" else "writing answers"
        opening = (
            f"Nothing is slow: TTFT {seconds(summary.ttft.p50)} and TPOT {seconds(summary.tpot.p50)} are what this "
            f"machine needs for a request alone, most of it for {stroke}"
        )
    elif metric == "throughput":
        stroke = "reading prompts" if phase == "prefill" else "writing answers"
        opening = f"Throughput-bound: {summary.output_rate:,.0f} tokens/s, most of the time spent {stroke}"
    elif metric == "ttft":
        what = (
            f"{evidence.queue_of_ttft:.0%} of TTFT is queueing"
            if evidence.queue_of_ttft > 0.5
            else f"{1 - evidence.queue_of_ttft:.0%} of TTFT is reading the prompt"
        )
        opening = f"Slow to start: TTFT {seconds(summary.ttft.p50)} (p95 {seconds(summary.ttft.p95)}), {what}"
    elif metric == "stall":
        opening = (
            f"Streams stall: {evidence.stall_share:.0%} of the writing time is lost in long gaps "
            f"(the longest of each answer {seconds(summary.stall.mean)}, the usual {seconds(summary.itl.p50)})"
        )
    else:
        opening = (
            f"Slow to stream: TPOT {seconds(summary.tpot.p50)}, {evidence.decode_over_ideal:.1f}× that of a stream "
            f"alone, with {evidence.batch:.0f} {'stream' if round(evidence.batch) == 1 else 'streams'} at once"
        )
    if best is None:
        return f"{opening}. No lever helps much."
    if best.lever.phase not in (phase, "both"):  # its cause is one of the other stroke's: only what it brings is known
        return f"{opening}. What helps most: {best.lever.title}."
    return f"{opening}, because {best.lever.because}."


def seconds(value: float) -> str:
    if 0 < value < 5e-5:
        return f"{1e6 * value:.2g} µs"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"
