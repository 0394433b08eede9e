"""Which stroke is slow, why, and what each lever would change.

0. Overload. If requests arrive faster than they are served, that comes before all else, whatever a replay says, and
   then only what serves more requests counts as help.
1. The complaint. For every request, its time beyond what the same machine needs for that request alone, before the
   first token (start) and after it (stream). The larger sum names the stroke. Where all requests arrive at once, only
   the throughput counts. A target that is given and missed comes first.
2. The levers. The machine's rates are tuned until a replay of the arrivals matches the measurement. Then the arrivals
   are replayed with each lever; its effect is the ratio to the replay without it.
3. The cause. It is that of the lever with the best score: its gain, less its price and its harm to the other stroke.

A replay that is far from the measurement explains nothing: then the diagnosis says so and names no lever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from twostroke.config import DEFAULT_BATCH_TOKENS, DEFAULT_GAP
from twostroke.cost.answers.evidence import Evidence, TimesAlone, gather, times_alone
from twostroke.cost.answers.levers import LEVERS, Lever, Scenario
from twostroke.cost.answers.overload import AT_ONCE, Overload, find_overload
from twostroke.cost.answers.tune import tune
from twostroke.cost.answers.wording import mismatch_sentence, sentence
from twostroke.cost.simulation.deployment import Deployment, Outcome
from twostroke.cost.simulation.served import Served, Summary, Targets, summarize
from twostroke.cost.simulation.trace import Arrival, fresh_tokens
from twostroke.cost.units import seconds
from twostroke.errors import InputError
from twostroke.record import replace

HELPS = 0.05  # smallest gain (a logarithm) of a lever that helps
SIDE = 0.5  # weight of the harm to the other metrics
REPLAYED = 600  # most arrivals that are replayed: those of the busiest part of the recording
SLOW = 0.1  # excess over the time of requests alone, as a share of all time, from which on something is slow
APART = 2.0  # factor between a replay and the measurement from which on the replay explains nothing
UNNOTICED = {"ttft": 0.02, "tpot": 0.002}  # seconds: a smaller difference is none
PRICE = 0.5  # weight of a lever's price under overload: there more hardware is a remedy
KNOWN = 0.005  # seconds until an answer from the answer cache begins, and again until it ends
STALLING = 0.25  # share of decode time lost in long gaps from which on streams stall


@dataclass(frozen=True, slots=True)
class Effect:
    """Predicted effect of one lever, as new over old: 0.5 halves."""

    lever: Lever
    ttft: float
    tpot: float
    stall: float
    throughput: float
    cost: float  # per million tokens
    score: float
    after: Scenario
    predicted: Outcome

    @property
    def helps(self) -> bool:
        return self.score > HELPS


@dataclass(frozen=True, slots=True)
class Rejected:
    lever: Lever
    reason: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    phase: str  # "prefill" or "decode"
    metric: str  # the metric to improve: "ttft", "tpot", "stall" or "throughput"
    sentence: str
    evidence: Evidence
    measured: Summary
    simulated: Summary  # the replay without any lever; its distance from `measured` is the model's error
    effects: list[Effect]  # best first; only those that help
    rejected: list[Rejected]
    overload: Overload | None = None
    mismatch: str | None = None  # how far the replay is from the measurement; then there are no effects

    @property
    def best(self) -> Effect | None:
        return self.effects[0] if self.effects else None


def diagnose(
    deployment: Deployment,
    arrivals: Sequence[Arrival],
    served: Sequence[Served] | None = None,
    targets: Targets = Targets(),
    levers: Sequence[Lever] = LEVERS,
    progress: Callable[[str], None] | None = None,
    paced: bool = False,
) -> Diagnosis:
    """`served`: the measured results of these arrivals; without them the simulator's are used. paced: they were sent at
    a rate that was asked for. InputError where no request was answered."""
    arrivals, served = busiest(arrivals, served)
    if served is not None:
        deployment = tune(deployment, arrivals, served)
    base = deployment.run(arrivals)
    check_answered(arrivals, served, base)
    outcome = base if served is None else measured_outcome(base, served)
    step = DEFAULT_BATCH_TOKENS[deployment.device.kind]
    fresh = fresh_tokens(arrivals)
    both = [(one, new) for one, new in zip(outcome.served, fresh, strict=True) if one.answered]
    done = [one for one, _ in both]
    alone = times_alone(done, [new for _, new in both], deployment.roofline(base.settings), step)
    shareable = 1 - sum(fresh) / sum(arrival.prompt for arrival in arrivals)
    evidence = gather(outcome, alone, shareable, kv_known=served is None)
    longest = max(start + decode for start, decode in zip(alone.start, alone.decode, strict=True))
    overload = find_overload(outcome.served, paced, longest)
    phase, metric, slow = complaint(outcome, evidence, done, alone, targets)
    if overload is not None:
        metric, slow = "throughput", True
    mismatch = None if served is None else mismatch_of(outcome.summary, base.summary)
    if mismatch is not None:
        said = mismatch_sentence(phase, metric, evidence, outcome.summary, slow, overload, mismatch)
        untried = [Rejected(lever, "not tried: the replay does not match the measurement") for lever in levers]
        return Diagnosis(
            phase, metric, said, evidence, outcome.summary, base.summary, [], untried, overload, mismatch
        )  # fmt: skip
    price = 1.0 if overload is None else PRICE
    effects, rejected = try_levers(
        Scenario(deployment, arrivals, served=served or ()), base, metric, levers, progress, price
    )
    best, gain = (effects[0].lever, effects[0].throughput) if effects else (None, 1.0)
    said = sentence(phase, metric, evidence, outcome.summary, best, slow, overload, gain)
    return Diagnosis(phase, metric, said, evidence, outcome.summary, base.summary, effects, rejected, overload)


def check_answered(arrivals: Sequence[Arrival], served: Sequence[Served] | None, base: Outcome) -> None:
    """InputError where no request was answered, measured or simulated."""
    if not arrivals or (served is not None and not any(one.answered for one in served)):
        raise InputError("no request was answered, so there is nothing to diagnose: give another load or recording.")
    if not any(one.answered for one in base.served):
        shortest, room = min(one.prompt + one.output for one in arrivals), base.settings.max_model_len
        raise InputError(
            f"no request fits the simulated engine: the shortest has {shortest:,} tokens, max_model_len is {room:,}: "
            "raise max_model_len, or divide the lengths with --scale."
        )


def mismatch_of(measured: Summary, replayed: Summary) -> str | None:
    """How the replay differs from the measurement, where it is too far away to explain it."""
    found = []
    for name, label in (("ttft", "TTFT"), ("tpot", "TPOT")):
        seen, simulated = getattr(measured, name).p50, getattr(replayed, name).p50
        if not (seen > 0 and simulated > 0) or abs(seen - simulated) < UNNOTICED[name]:
            continue
        if not 1 / APART <= simulated / seen <= APART:
            found.append(f"{label} {seconds(simulated)} instead of {seconds(seen)}")
    return " and ".join(found) or None


def busiest(
    arrivals: Sequence[Arrival], served: Sequence[Served] | None
) -> tuple[Sequence[Arrival], Sequence[Served] | None]:
    """The REPLAYED consecutive arrivals that came in the shortest time."""
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
    alone: TimesAlone,
    targets: Targets,
) -> tuple[str, str, bool]:
    """The phase and the metric to improve, and whether it is slow."""
    summary = outcome.summary
    slow_start, slow_stream = summary.ttft.p95 > targets.ttft, summary.tpot.p95 > targets.tpot
    noticed = summary.stall.mean > DEFAULT_GAP[outcome.deployment.device.kind]
    stream_metric = "stall" if noticed and evidence.stall_share > STALLING else "tpot"
    if slow_start != slow_stream:
        return ("prefill", "ttft", True) if slow_start else ("decode", stream_metric, True)
    span = max(one.arrival for one in done) - min(one.arrival for one in done)
    if len(done) > 1 and span < AT_ONCE * summary.seconds:
        return ("prefill" if sum(alone.start) > sum(alone.decode) else "decode", "throughput", True)
    before = sum(one.ttft for one in done) - sum(alone.start)
    after = sum(one.end - one.first for one in done) - sum(alone.decode)
    whole = sum(one.end - one.arrival for one in done)
    slow = slow_start or max(before, after) >= SLOW * whole
    if not slow:  # then the longer stroke
        before, after = sum(alone.start), sum(alone.decode)
    return ("prefill", "ttft", slow) if before > after else ("decode", stream_metric, slow)


# ---- the levers ----------------------------------------------------------------------------------------------------


def try_levers(
    scenario: Scenario,
    base: Outcome,
    metric: str,
    levers: Sequence[Lever],
    progress: Callable[[str], None] | None,
    price: float = 1.0,
) -> tuple[list[Effect], list[Rejected]]:
    effects, rejected = [], []
    for lever in levers:
        if progress is not None:
            progress(lever.name)
        after = lever.pull(scenario)
        if isinstance(after, str):
            rejected.append(Rejected(lever, after))
            continue
        then = with_known(after.deployment.run(after.arrivals), after)
        effect = compare(lever, after, base, then, metric, price)
        if effect.helps:
            effects.append(effect)
        else:
            rejected.append(Rejected(lever, why_not(effect, metric)))
    return sorted(effects, key=lambda effect: -effect.score), rejected


def with_known(outcome: Outcome, scenario: Scenario) -> Outcome:
    """The outcome with the requests that the answer cache answers; the others wait for their lookups."""
    if not scenario.known:
        return outcome
    wait = scenario.lookup
    late = [
        replace(one, scheduled=one.scheduled + wait, first=one.first + wait, end=one.end + wait)
        for one in outcome.served
    ]
    served = [*late, *(at_once(arrival, wait) for arrival in scenario.known)]
    return replace(outcome, served=served, summary=summarize(served))


def at_once(arrival: Arrival, wait: float) -> Served:
    first = arrival.at + wait + KNOWN
    served = Served(arrival.at, arrival.prompt, 0, arrival.at, first, first + KNOWN, arrival.output)
    served.gaps = np.full(max(0, arrival.output - 1), KNOWN / max(1, arrival.output - 1), dtype=np.float32)
    return served


def compare(lever: Lever, after: Scenario, before: Outcome, then: Outcome, metric: str, price: float = 1.0) -> Effect:
    """price: weight of what the lever costs in hardware."""
    old, new = before.summary, then.summary
    ttft = (ratio(new.ttft.p50, old.ttft.p50) * ratio(new.ttft.p95, old.ttft.p95)) ** 0.5
    tpot = (ratio(new.tpot.p50, old.tpot.p50) * ratio(new.tpot.p95, old.tpot.p95)) ** 0.5
    fine = DEFAULT_GAP[before.deployment.device.kind]  # readers hardly notice this gap: a shorter one is no gain
    stall = ratio(max(fine, new.stall.mean), max(fine, old.stall.mean))
    throughput = ratio(new.output_rate, old.output_rate)
    cost = ratio(then.deployment.price, before.deployment.price) / throughput
    gains = {"ttft": -log(ttft), "tpot": -log(tpot), "stall": -log(stall), "throughput": log(throughput)}
    watched = ("ttft", "tpot") if metric == "throughput" else ("ttft", "tpot", "throughput")
    harm = sum(min(0.0, gains[name] + HELPS) for name in watched if name != metric)
    paid = log(ratio(then.deployment.price, before.deployment.price))
    refused = max(0, new.refused - old.refused)
    weight = 0.0 if metric == "throughput" else SIDE
    score = gains[metric] + weight * harm - price * paid - lever.lossy - 10.0 * refused / max(1, old.requests)
    return Effect(lever, ttft, tpot, stall, throughput, cost, score, after, then)


def ratio(new: float, old: float) -> float:
    return 1.0 if not (new > 0 and old > 0) else new / old


def why_not(effect: Effect, metric: str) -> str:
    """Why a lever was rejected."""
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
