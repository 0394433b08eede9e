"""How a number of workers is best divided: all of them do both, or some compute prompts and the others write answers.

Every division is simulated with the same arrivals. The best one has the most requests a second within the targets. A
large fleet is divided as a part of it is, at that part's share of the rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twostroke.config import DEFAULT_GAP
from twostroke.cost.answers.diagnose import busiest
from twostroke.cost.answers.workers import prefill_share
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.served import Summary, Targets
from twostroke.cost.simulation.trace import Arrival, faster
from twostroke.cost.units import seconds
from twostroke.record import replace

GAIN = 0.05  # smallest gain of goodput that is worth a change
FEWEST = 0.05  # share of the requests within the targets below which no division is any good
AROUND = 2  # divisions on each side of the estimate that are simulated
FINEST = 16  # of a fleet: the difference between two of them
MOST = 32  # workers that are simulated
USUAL_TTFT = 2.0  # seconds, where no target is given


class Division(NamedTuple):
    prefill: int  # workers that compute prompts; 0: all do both
    workers: int  # the others
    goodput: float  # requests/s within the targets
    share: float  # of the requests that meet them
    summary: Summary

    @property
    def title(self) -> str:
        return f"split {self.prefill}:{self.workers}" if self.prefill else f"{self.workers} mixed"


@dataclass(frozen=True, slots=True)
class Verdict:
    now: Division
    best: Division
    tried: list[Division]
    targets: Targets

    @property
    def changes(self) -> bool:
        return self.best is not self.now

    @property
    def sentence(self) -> str:
        if self.changes:
            gain = self.best.goodput / self.now.goodput - 1 if self.now.goodput else 0.0
            how = f"goodput {gain:+.0%}" if gain else "goodput instead of none"
            rates = f"{self.best.goodput:.2f} requests/s within {self.targets} instead of {self.now.goodput:.2f}"
            return f"{self.best.title} instead of {self.now.title}: {how} ({rates})"
        if self.best.share < FEWEST:
            count = self.now.prefill + self.now.workers
            return f"{count} workers are too few for {self.targets}, however they are divided"
        others = [one for one in self.tried if bool(one.prefill) != bool(self.now.prefill)]
        if not others:
            return f"{self.now.title}: there is nothing to divide"
        other = max(others, key=lambda one: one.goodput)
        kept = "one pool" if not self.now.prefill else self.now.title
        if other.goodput > (1 - GAIN) * self.now.goodput:
            return f"{kept} may stay: {other.title} would serve {other.goodput:.2f} requests/s, about as much"
        return f"{kept} is better here, because {why(self.now, other)}"


def why(now: Division, other: Division) -> str:
    """What another division would make worse."""
    ttft, tpot = (now.summary.ttft.p95, other.summary.ttft.p95), (now.summary.tpot.p95, other.summary.tpot.p95)
    if ttft[1] * max(tpot[0], 1e-9) >= tpot[1] * max(ttft[0], 1e-9):
        few = f"{other.prefill} of {other.prefill + other.workers} workers" if other.prefill else "workers that write"
        return (
            f"with {other.title} the first token would take {seconds(ttft[1])} instead of {seconds(ttft[0])} (p95): "
            f"{few} would compute all prompts"
        )
    return (
        f"with {other.title} a token would take {seconds(tpot[1])} instead of {seconds(tpot[0])} (p95): fewer workers "
        "would write, or prompts would come between the tokens"
    )


def usual_targets(device: str) -> Targets:
    return Targets(USUAL_TTFT, DEFAULT_GAP[device])


def divide(
    deployment: Deployment,
    arrivals: Sequence[Arrival],
    targets: Targets,
    progress: Callable[[str], None] | None = None,
) -> Verdict:
    """deployment: with its pools as they are now."""
    arrivals, _ = busiest(arrivals, None)
    targets = targets if targets.given else usual_targets(deployment.device.kind)
    part = part_of(deployment)
    arrivals = faster(arrivals, part.workers / deployment.workers)
    tried = []
    for pools in divisions(part, arrivals):
        if progress is not None:
            progress(f"simulating {pools.prefill}:{pools.workers}" if pools.prefill else "simulating one pool")
        found = simulate(replace(part, pools=pools), arrivals, targets)
        tried.append(in_whole(found, deployment, pools == part.pools))
    now = next(one for one in tried if one[:2] == (deployment.pools.prefill, deployment.pools.workers))
    best = max(tried, key=lambda one: one.goodput)
    worth = best.goodput > (1 + GAIN) * now.goodput and best.share >= FEWEST
    return Verdict(now, best if worth else now, tried, targets)


def part_of(deployment: Deployment) -> Deployment:
    """A smaller deployment: at most MOST of its workers, divided as they all are."""
    count, pools = deployment.workers, deployment.pools
    if count <= MOST:
        return deployment
    prefill = min(MOST - 1, max(1, round(pools.prefill * MOST / count))) if pools.prefill else 0
    return replace(deployment, pools=replace(pools, workers=MOST - prefill, prefill=prefill))


def in_whole(one: Division, deployment: Deployment, present: bool) -> Division:
    """A division of a part as one of the whole fleet. present: it stands for the one that is."""
    times = deployment.workers / (one.prefill + one.workers)
    prefill = deployment.pools.prefill if present else round(one.prefill * times)
    return one._replace(prefill=prefill, workers=deployment.workers - prefill, goodput=one.goodput * times)


def divisions(deployment: Deployment, arrivals: Sequence[Arrival]) -> list[Pools]:
    """The one that is, one pool, and those around the share of the time that prompts take."""
    count, like = deployment.workers, deployment.pools
    middle = round(prefill_share(deployment, arrivals) * count)
    step = -(-count // FINEST)
    tried = range(middle - AROUND * step, middle + AROUND * step + 1, step)
    near = {prefill for prefill in tried if 0 < prefill < count}
    wanted = sorted({0, like.prefill, *near, *([min(max(1, middle), count - 1)] if count > 1 else [])})
    return [replace(like, workers=count - prefill, prefill=prefill) for prefill in wanted]


def simulate(deployment: Deployment, arrivals: Sequence[Arrival], targets: Targets) -> Division:
    if deployment.pools.prefill and not deployment.config.prefix_cache:  # blocks that arrive are found by their names
        deployment = replace(deployment, config=replace(deployment.config, prefix_cache=True))
    outcome = deployment.run(arrivals)
    met = sum(map(targets.met_by, outcome.served)) / max(1, len(outcome.served))
    pools = deployment.pools
    per_second = len(arrivals) / max(1.0, arrivals[-1].at - arrivals[0].at)
    return Division(pools.prefill, pools.workers, met * per_second, met, outcome.summary)


def role_changes(roles: dict[str, str], division: Division) -> dict[str, str]:
    """Which workers change to which role, as few as can be. roles: by the name of the worker."""
    if not division.prefill:
        return {name: "both" for name, role in roles.items() if role != "both"}
    ordered = sorted(roles, key=lambda name: roles[name] != "prefill")  # those that compute prompts stay
    wanted = {name: "prefill" if place < division.prefill else "decode" for place, name in enumerate(ordered)}
    return {name: role for name, role in wanted.items() if roles[name] != role}
