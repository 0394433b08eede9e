"""How many workers a load needs, and which kind is the cheapest: found by simulating the load.

The answer is the smallest fleet with which 95 % of the requests meet the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import NamedTuple

from twostroke.config import QUANTIZATIONS_OF, Config
from twostroke.cost.model.devices import DEVICES, Device
from twostroke.cost.simulation.deployment import Deployment, Outcome
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.served import Targets
from twostroke.cost.simulation.trace import Arrival, at_rate, fresh_tokens, mean_lengths, rate, repeat
from twostroke.errors import ConfigError
from twostroke.model.arch import Arch

SHARE = 0.95  # of the requests that must meet the targets
SIMULATED = 300  # arrivals in one simulation
STEADY = 6.0  # length of a simulated load, in typical request durations
MOST_SIMULATED = 64  # workers; a larger fleet is made of copies of a smaller one
UNIT = 4  # workers in one copy of a fleet with two pools
BATCHES = 4  # full batches for each worker of a copy
MOST_REQUESTS = 1500  # in the load for a copy
RATE_SHARES = (1.0, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)  # of the highest rate of a copy, tried in turn
GPUS = (1, 2, 4, 8)
PRICIER = 1.75  # options with an estimate above this multiple of the cheapest that meets the targets are not simulated


class Demand(NamedTuple):
    """What a fleet must serve: requests like these, so many a second, within the targets."""

    arrivals: Sequence[Arrival]
    per_second: float
    targets: Targets


@dataclass(frozen=True, slots=True)
class Need:
    """The smallest fleet of one kind of worker that serves a load within the targets."""

    deployment: Deployment
    outcome: Outcome
    workers: int  # decode workers where there are two pools
    prefill: int
    dollars_per_hour: float
    dollars_per_million: float  # output tokens
    load: list[Arrival]  # that was simulated
    copies: float = 1.0  # of the simulated fleet


def workers_needed(deployment: Deployment, demand: Demand, split: bool = False) -> Need | None:
    """None when more workers do not help: a request alone already misses the targets."""
    arrivals, per_second, targets = demand
    if _misses_alone(deployment, arrivals, targets):
        return None
    span = STEADY * _typical_seconds(deployment, arrivals)
    copies = max(1.0, per_second * span / SIMULATED)
    each = per_second / copies
    if copies > 1.0 and each * _busy_seconds(deployment, arrivals) < 1.0:
        return _copies(deployment, demand, split)
    load = at_rate(repeat(arrivals, max(50, ceil(each * span))), each)
    found = _smallest(deployment, load, targets, split)
    if found is not None and (copies == 1.0 or found[0].workers > (2 if split else 1)):
        return _need(*found, load, copies)
    return _copies(deployment, demand, split)  # the smallest fleet may be half idle


def _need(tested: Deployment, outcome: Outcome, load: list[Arrival], copies: float) -> Need:
    pools = tested.pools
    workers, prefill = ceil(pools.workers * copies), ceil(pools.prefill * copies)
    hourly = tested.price / tested.workers * (workers + prefill)
    tokens = outcome.summary.output_rate * copies
    return Need(tested, outcome, workers, prefill, hourly, hourly / 3600 / max(tokens, 1e-12) * 1e6, load, copies)


def _copies(deployment: Deployment, demand: Demand, split: bool) -> Need | None:
    """A large load is served by copies of a small fleet, each at the highest rate at which it meets the targets. All
    requests at once give the highest rate that the fleet serves; lower rates are then tried in turn. There are enough
    requests to fill the batches."""
    arrivals, per_second, targets = demand
    share = prefill_share(deployment, arrivals)
    unit = replace(deployment, pools=_pools(UNIT if split else 1, split, share, deployment.pools))
    requests = repeat(arrivals, min(MOST_REQUESTS, BATCHES * _batch(deployment, arrivals) * unit.pools.workers))
    most = unit.run(at_rate(requests, 1e6)).summary.request_rate
    for rate_share in RATE_SHARES:
        load = at_rate(requests, rate_share * most)
        outcome = unit.run(load)
        if targets.met_by_share(outcome.served, SHARE):
            return _need(unit, outcome, load, per_second / (rate_share * most))
    return None


def _pools(count: int, split: bool, prefill_share: float, like: Pools) -> Pools:
    if not split:
        return replace(like, workers=count, prefill=0)
    prefill = min(count - 1, max(1, round(prefill_share * count)))
    return replace(like, workers=count - prefill, prefill=prefill)


def _smallest(
    deployment: Deployment, load: Sequence[Arrival], targets: Targets, split: bool
) -> tuple[Deployment, Outcome] | None:
    """The smallest number of workers that meets the targets: doubled until one does, then by bisection."""
    share = prefill_share(deployment, load)

    def attempt(count: int) -> tuple[Deployment, Outcome] | None:
        tried = replace(deployment, pools=_pools(count, split, share, deployment.pools))
        outcome = tried.run(load)
        return (tried, outcome) if targets.met_by_share(outcome.served, SHARE) else None

    fewest = 2 if split else 1
    high = max(fewest, int(0.6 * rate(load) * _busy_seconds(deployment, load)))
    low = high - 1
    best = attempt(high)
    while best is not None and high > fewest:  # the estimate was enough: try fewer
        found = attempt(low)
        if found is None:
            return best
        high, low, best = low, low - 1, found
    while best is None:
        low, high = high, 2 * high
        if high > MOST_SIMULATED:
            return None
        best = attempt(high)
    while high - low > 1:
        middle = (low + high) // 2
        found = attempt(middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def _busy_seconds(deployment: Deployment, arrivals: Sequence[Arrival]) -> float:
    """Seconds of a worker that one request takes: its share of full batches, cached prompt tokens left out."""
    settings, batch = deployment.settings, _batch(deployment, arrivals)
    line = deployment.roofline(settings)
    mean, output = mean_lengths(arrivals)
    prompt = round(mean)
    fresh = round(sum(fresh_tokens(arrivals)) / len(arrivals)) if settings.prefix_cache else prompt
    prefill = line.prefill_seconds(prompt, prompt - max(1, fresh))
    return prefill + output * line.decode_seconds(batch, prompt + round(output / 2)) / batch


def _batch(deployment: Deployment, arrivals: Sequence[Arrival]) -> int:
    """Most requests that run at once on one worker."""
    settings = deployment.settings
    typical = round(sum(arrival.prompt + arrival.output for arrival in arrivals) / len(arrivals))
    return max(1, min(settings.max_requests, settings.kv_blocks // max(1, settings.layout.blocks_for(typical))))


def _typical_seconds(deployment: Deployment, arrivals: Sequence[Arrival]) -> float:
    """Duration of a typical request in a batch of up to 32."""
    line = deployment.roofline()
    prompt, output = mean_lengths(arrivals)
    batch, context = min(32, deployment.settings.max_requests), round(prompt) + round(output / 2)
    return line.prefill_seconds(round(prompt)) + output * line.decode_seconds(batch, context)


def _misses_alone(deployment: Deployment, load: Sequence[Arrival], targets: Targets) -> bool:
    """Whether too many requests miss the targets even alone, so that no number of workers helps."""
    alone = [replace(arrival, at=1e6 * number) for number, arrival in enumerate(load[:50])]
    return not targets.met_by_share(replace(deployment, pools=Pools()).run(alone).served, SHARE)


def prefill_share(deployment: Deployment, load: Sequence[Arrival]) -> float:
    """Share of a worker's time that prefill takes."""
    line = deployment.roofline()
    prompt, output = mean_lengths(load)
    batch = min(32, deployment.settings.max_requests)
    prefill = line.prefill_seconds(round(prompt))
    decode = output * line.decode_seconds(batch, round(prompt + output / 2)) / batch
    return prefill / (prefill + decode)


def candidates(arch: Arch, devices: Sequence[Device], config: Config, gpus: Sequence[int] = GPUS) -> list[Deployment]:
    """Every kind of worker that the model fits on, cheapest first."""
    found = []
    for device in devices:
        for count in gpus if device.kind == "cuda" else (1,):
            for precision in precisions(device):
                deployment = Deployment(arch, device, config, precision, gpus=count)
                if deployment.model.bytes < 0.9 * device.memory * count:
                    found.append(deployment)
    return sorted(found, key=lambda deployment: deployment.price)


def precisions(device: Device) -> list[str]:
    """Precisions of the weights that the device serves."""
    narrow = [name for name in QUANTIZATIONS_OF[device.kind] if name != "fp8" or "fp8" in device.flops]
    return ["bfloat16", *narrow]


def cheapest(
    options: Sequence[Deployment],
    demand: Demand,
    progress: Callable[[str, Deployment], None] | None = None,
    split: Sequence[bool] = (False,),
) -> list[Need]:
    """Options that meet the targets, the cheapest first. Options whose estimate is far above one of them are not
    simulated. With both values of `split`, two pools are tried where one misses the targets, and for the cheapest."""
    demand = demand._replace(arrivals=demand.arrivals[:SIMULATED])
    needs: list[Need] = []
    missed: list[Deployment] = []
    enough = inf  # estimated dollars above which an option is not simulated

    def attempt(option: Deployment, apart: bool) -> Need | None:
        if progress is not None:
            progress("with two pools" if apart else "", option)
        return workers_needed(option, demand, apart)

    for dollars, option in _by_estimate(options, demand):
        if dollars > enough:
            break
        need = attempt(option, split[0])
        if need is None:
            missed.append(option)
        else:
            enough = min(enough, PRICIER * dollars)
            needs.append(need)
    needs.sort(key=_dollars)
    if len(split) > 1:
        again = missed + [replace(need.deployment, pools=Pools()) for need in needs[:1]]
        needs += [need for option in again if (need := attempt(option, split[1])) is not None]
    return sorted(needs, key=_dollars)


def _by_estimate(options: Sequence[Deployment], demand: Demand) -> list[tuple[float, Deployment]]:
    """Options with their estimated dollars an hour; those on which no request fits are left out."""
    found = []
    for option in options:
        with suppress(ConfigError):
            workers = max(1.0, demand.per_second * _busy_seconds(option, demand.arrivals))
            found.append((workers * option.price / option.workers, option))
    return sorted(found, key=lambda pair: pair[0])


def _dollars(need: Need) -> float:
    return need.dollars_per_hour


def priced() -> list[Device]:
    """Devices of the table with a price."""
    return [device for device in DEVICES.values() if device.price is not None]
