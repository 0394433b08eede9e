"""How many workers a load needs, and which kind is the cheapest: found by simulating the load.

The answer is the smallest fleet with which 95 % of the requests meet the targets in a steady state (steady.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import ceil, inf
from multiprocessing import get_context
from typing import NamedTuple

from twostroke.config import QUANTIZATIONS_OF, Config
from twostroke.cost.answers.steady import CLOSE, MOST, PART, SHARE, Trial, try_fleet
from twostroke.cost.model.devices import DEVICES, Device
from twostroke.cost.simulation.deployment import Deployment, Outcome
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.served import Targets
from twostroke.cost.simulation.trace import Arrival, at_rate, fresh_tokens, mean_lengths, rate, repeat
from twostroke.cost.units import seconds
from twostroke.errors import ConfigError
from twostroke.model.arch import Arch
from twostroke.record import replace

STEADY = 2.0  # length of a part of the load, in typical request durations
LARGEST_PART = 500  # requests; a load with larger parts is served by copies of a small fleet
MOST_SIMULATED = 64  # workers; a larger fleet is made of copies of a smaller one
MOST_IN_UNIT = 4  # workers of one copy
NEAR = 1.06  # precision of a highest rate, as a factor
RAISED = 1.25  # factor by which a rate is raised while the fleet meets the targets
ROUGH = 0.1  # standard error of a percentile where only the number of workers or a highest rate is wanted
MOST_FOR_RATE = 1000  # requests of a simulation that looks for a highest rate
GPUS = (1, 2, 4, 8)
PRICIER = 1.75  # options with an estimate above this multiple of the cheapest that meets the targets are not simulated


class Demand(NamedTuple):
    """What a fleet must serve: requests like these, so many a second, within the targets."""

    arrivals: Sequence[Arrival]
    per_second: float
    targets: Targets
    least: int = 0  # fewest requests that are simulated
    close: float = CLOSE  # standard error at which a percentile is steady


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
    trial: Trial
    copies: float = 1.0  # of the simulated fleet


@dataclass(frozen=True, slots=True)
class Dropped:
    """A kind of worker that was asked for and does not serve the load."""

    deployment: Deployment
    reason: str
    split: bool = False


def workers_needed(deployment: Deployment, demand: Demand, split: bool = False) -> Need | str:
    """The reason, when more workers do not help."""
    arrivals, per_second, targets, least, _ = demand
    missed = _misses_alone(deployment, arrivals, targets)
    if missed:
        return missed
    part = _part(deployment, arrivals, per_second)
    if part > LARGEST_PART:
        return _copies(deployment, demand, split)
    load = at_rate(repeat(arrivals, max(MOST, least)), per_second)
    found = _smallest(deployment, load, demand, split, part)
    if found is None:
        return _copies(deployment, demand, split)
    return _need(*found, load, demand, 1.0)


def _part(deployment: Deployment, arrivals: Sequence[Arrival], per_second: float) -> int:
    """Requests in one part of a load at this rate."""
    return max(PART, ceil(STEADY * per_second * _typical_seconds(deployment, arrivals)))


def _need(tested: Deployment, trial: Trial, load: list[Arrival], demand: Demand, copies: float) -> Need:
    assert trial.outcome is not None, "the trial was accepted"
    pools = tested.pools
    workers, prefill = ceil(pools.workers * copies), ceil(pools.prefill * copies)
    hourly = tested.price / tested.workers * (workers + prefill)
    tokens = demand.per_second * mean_lengths(demand.arrivals)[1]  # in a steady state all that arrives is served
    dollars = hourly / 3600 / max(tokens, 1e-12) * 1e6
    return Need(tested, trial.outcome, workers, prefill, hourly, dollars, load, trial, copies)


def _copies(deployment: Deployment, demand: Demand, split: bool) -> Need | str:
    """A large load is served by copies of a small fleet, each at the highest rate at which it meets the targets."""
    arrivals, per_second, targets, *_ = demand
    share = prefill_share(deployment, arrivals)
    each = 1 / _busy_seconds(deployment, mean_request(arrivals))  # requests/s of one worker, estimated
    fits = int(LARGEST_PART / _part(deployment, arrivals, each)) if each else 1
    count = max(2 if split else 1, min(MOST_IN_UNIT, fits))
    unit = replace(deployment, pools=_pools(count, split, share, deployment.pools))
    found = highest_rate(unit, arrivals, targets, 0.7 * count * each)
    if found is None:
        return "no rate that is worth a worker was found within the targets"
    highest, trial = found
    load = at_rate(repeat(arrivals, trial.requests), highest)
    return _need(unit, trial, load, demand, per_second / highest)


def highest_rate(
    deployment: Deployment, arrivals: Sequence[Arrival], targets: Targets, guess: float, known: Trial | None = None
) -> tuple[float, Trial] | None:
    """The highest rate at which the fleet meets the targets, and how it does then; None: none above a hundredth of the
    guess. `known`: a trial at the guess that met them."""
    low, high, best = (guess, inf, known) if known is not None else (0.0, inf, None)
    estimate = deployment.workers / _busy_seconds(deployment, mean_request(arrivals))
    per_second = guess if known is None else max(RAISED * guess, 0.85 * estimate)
    while high > NEAR * max(low, guess / 100):
        part = _part(deployment, arrivals, per_second)
        load = at_rate(repeat(arrivals, max(MOST_FOR_RATE, 8 * part)), per_second)
        trial = try_fleet(deployment, load, targets, part, close=ROUGH)
        if trial.met:
            low, best = per_second, trial
        else:
            high = per_second
        per_second = RAISED * low if high == inf else (low * high) ** 0.5 if low else high / 1.6
    return None if best is None else (low, best)


def _pools(count: int, split: bool, prefill_share: float, like: Pools) -> Pools:
    if not split:
        return replace(like, workers=count, prefill=0)
    prefill = min(count - 1, max(1, round(prefill_share * count)))
    return replace(like, workers=count - prefill, prefill=prefill)


def _smallest(
    deployment: Deployment, load: Sequence[Arrival], demand: Demand, split: bool, part: int
) -> tuple[Deployment, Trial] | None:
    """The smallest number of workers that meets the targets: raised until one does, then by bisection."""
    share = prefill_share(deployment, load)

    def attempt(count: int) -> tuple[Deployment, Trial] | None:
        tried = replace(deployment, pools=_pools(count, split, share, deployment.pools))
        trial = try_fleet(tried, load, demand.targets, part, demand.least, demand.close)
        return (tried, trial) if trial.met else None

    fewest = 2 if split else 1
    high = max(fewest, int(0.9 * rate(load) * _busy_seconds(deployment, mean_request(load))))
    low = high - 1
    best = attempt(high)
    while best is not None and high > fewest:  # the estimate was enough: try fewer
        found = attempt(low)
        if found is None:
            return best
        high, low, best = low, low - 1, found
    while best is None:
        low, high = high, ceil(1.3 * high) if high > 1 else 2
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


class MeanRequest(NamedTuple):
    """The mean lengths of a request, in tokens."""

    prompt: float
    output: float
    fresh: float  # of the prompt: in no earlier prompt


def mean_request(arrivals: Sequence[Arrival]) -> MeanRequest:
    return MeanRequest(*mean_lengths(arrivals), sum(fresh_tokens(arrivals)) / len(arrivals))


def _busy_seconds(deployment: Deployment, mean: MeanRequest) -> float:
    """Seconds of a worker that one request takes: its share of full batches, cached prompt tokens left out."""
    settings, batch = deployment.settings, _batch(deployment, mean)
    line = deployment.roofline(settings)
    prompt = round(mean.prompt)
    fresh = round(mean.fresh) if settings.prefix_cache else prompt
    prefill = line.prefill_seconds(prompt, prompt - max(1, fresh))
    return prefill + mean.output * line.decode_seconds(batch, prompt + round(mean.output / 2)) / batch


def _batch(deployment: Deployment, mean: MeanRequest) -> int:
    """Most requests that run at once on one worker."""
    settings, typical = deployment.settings, round(mean.prompt + mean.output)
    return max(1, min(settings.max_requests, settings.kv_blocks // max(1, settings.layout.blocks_for(typical))))


def _typical_seconds(deployment: Deployment, arrivals: Sequence[Arrival]) -> float:
    """Duration of a typical request in a batch of up to 32."""
    line = deployment.roofline()
    prompt, output = mean_lengths(arrivals)
    batch, context = min(32, deployment.settings.max_requests), round(prompt) + round(output / 2)
    return line.prefill_seconds(round(prompt)) + output * line.decode_seconds(batch, context)


def _misses_alone(deployment: Deployment, load: Sequence[Arrival], targets: Targets) -> str | None:
    """Why no number of workers helps: too many requests miss the targets even alone. None: they meet them."""
    alone = [replace(arrival, at=1e6 * number) for number, arrival in enumerate(load[:50])]
    outcome = replace(deployment, pools=Pools()).run(alone)
    if targets.met_by_share(outcome.served, SHARE):
        return None
    found = outcome.summary
    if not found.requests:
        return "no request fits"
    return f"a request alone misses the targets: TTFT p95 {seconds(found.ttft.p95)}, TPOT p95 {seconds(found.tpot.p95)}"


def prefill_share(deployment: Deployment, load: Sequence[Arrival]) -> float:
    """Share of a worker's time that prefill takes."""
    line = deployment.roofline()
    prompt, output = mean_lengths(load)
    batch = min(32, deployment.settings.max_requests)
    prefill = line.prefill_seconds(round(prompt))
    decode = output * line.decode_seconds(batch, round(prompt + output / 2)) / batch
    return prefill / (prefill + decode)


def candidates(
    arch: Arch, devices: Sequence[Device], config: Config, gpus: Sequence[int] = GPUS, published: Sequence[str] = ()
) -> list[Deployment]:
    """Every kind of worker that the model fits on, cheapest first. published: formats of the weights beside those that
    the engine converts to. Where the configuration names a precision, that alone."""
    found = []
    for device in devices:
        for count in gpus if device.kind == "cuda" else (1,):
            for precision in choices(device, config, published):
                deployment = Deployment(arch, device, config, precision, gpus=count)
                if does_not_fit(deployment) is None:
                    found.append(deployment)
    return sorted(found, key=lambda deployment: deployment.price)


def does_not_fit(deployment: Deployment) -> str | None:
    weights, memory = deployment.model.bytes, deployment.device.memory * deployment.gpus
    if weights < 0.9 * memory:
        return None
    return f"its weights take {weights / 1e9:,.0f} GB of {memory / 1e9:,.0f}: no room for K and V"


def choices(device: Device, config: Config, published: Sequence[str]) -> list[str]:
    """Precisions of the weights to compare: the one that the configuration names, else all."""
    if config.quantize is not None:
        return [config.quantize] if config.quantize in precisions(device) else []
    return [*published, *precisions(device)] if config.dtype is None else [config.dtype]


def precisions(device: Device) -> list[str]:
    """Precisions of the weights that the device serves."""
    narrow = [name for name in QUANTIZATIONS_OF[device.kind] if name != "fp8" or "fp8" in device.flops]
    return ["bfloat16", *narrow]


class WorkerPlan(NamedTuple):
    needs: list[Need]  # the cheapest first
    dropped: list[Dropped]  # the options that serve the load at no number of workers, or were not simulated


class Attempt(NamedTuple):
    option: Deployment
    apart: bool  # with two pools
    demand: Demand


def cheapest(
    options: Sequence[Deployment],
    demand: Demand,
    progress: Callable[[str, Deployment], None] | None = None,
    split: Sequence[bool] = (False,),
    pricier: float = PRICIER,
    jobs: int = 1,
) -> WorkerPlan:
    """Options that meet the targets, the cheapest first. Options whose estimate is far above one of them are not
    simulated. With both values of `split`, two pools are tried where one misses the targets, and for the cheapest.
    They are compared roughly; the cheapest is then simulated as closely as the demand asks.
    jobs: processes that simulate at the same time."""
    needs: list[Need] = []
    estimates, dropped = _by_estimate(options, demand)
    enough = inf  # estimated dollars above which an option is not simulated
    rough = demand._replace(close=max(ROUGH, demand.close), least=0)

    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:

        def attempt(tried: Sequence[Attempt]) -> list[Need]:
            for one in tried:
                if progress is not None:
                    progress("with two pools" if one.apart else "", one.option)
            run = pool.map if jobs > 1 and len(tried) > 1 else map  # its processes start when they are first used
            made = []
            for (option, apart, _), need in zip(tried, run(_needed, tried), strict=True):
                if isinstance(need, str):
                    dropped.append(Dropped(option, need, apart))
                else:
                    made.append(need)
            return made

        while estimates:
            wave, estimates = estimates[:jobs], estimates[jobs:]
            made = attempt([Attempt(option, split[0], rough) for dollars, option in wave if dollars <= enough])
            for dollars, option in wave:
                if dollars > enough:
                    dropped.append(Dropped(option, f"not simulated: about ${dollars:,.2f} an hour", split[0]))
            if made:
                enough = min(enough, pricier * wave[0][0])
            needs += made
        needs.sort(key=_dollars)
        last = []
        if len(split) > 1:
            again = [one.deployment for one in dropped if not one.reason.startswith("not simulated")]
            again += [need.deployment for need in needs[:1]]
            one_pool = [replace(option, pools=_pools(1, False, 0.0, option.pools)) for option in again]
            last = [Attempt(option, split[1], rough) for option in one_pool]
        while last or _is_rough(needs, demand):
            if _is_rough(needs, demand):
                best = needs.pop(0)
                one = _pools(1, False, 0.0, best.deployment.pools)
                last.insert(0, Attempt(replace(best.deployment, pools=one), best.prefill > 0, demand))
            needs = sorted(attempt(last) + needs, key=_dollars)
            last = []
    return WorkerPlan(needs, dropped)


def _is_rough(needs: Sequence[Need], demand: Demand) -> bool:
    """Whether the first of them was simulated less closely than the demand asks."""
    return bool(needs) and needs[0].trial.close > demand.close


def _needed(one: Attempt) -> Need | str:
    return workers_needed(one.option, one.demand, one.apart)


def _by_estimate(options: Sequence[Deployment], demand: Demand) -> tuple[list[tuple[float, Deployment]], list[Dropped]]:
    """Options with their estimated dollars an hour, and those on which no request fits."""
    found, dropped = [], []
    mean = mean_request(demand.arrivals)
    for option in options:
        try:
            workers = max(1.0, demand.per_second * _busy_seconds(option, mean))
            found.append((workers * option.price / option.workers, option))
        except ConfigError as error:
            dropped.append(Dropped(option, does_not_fit(option) or str(error)))
    return sorted(found, key=lambda pair: pair[0]), dropped


def _dollars(need: Need) -> float:
    return need.dollars_per_hour


def priced() -> list[Device]:
    """Devices of the table with a price."""
    return [device for device in DEVICES.values() if device.price is not None]
