"""Before owning anything: does a model fit, how fast will it be, what will it cost, how many workers does a load need.

Bytes are exact (the engine's own `resolve` and layout); times come from the roofline; what a load needs is found by
simulating it: the smallest fleet under which 95 % of the requests meet the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, inf

from twostroke.config import Config
from twostroke.cost.deploy import Deployment, Outcome
from twostroke.cost.fleet import Pools
from twostroke.cost.hardware import DEVICES, Device
from twostroke.cost.levers import QUANTIZED
from twostroke.cost.roofline import kv_bytes_per_token
from twostroke.cost.summary import meets
from twostroke.cost.trace import Arrival, at_rate, fresh_tokens, rate, repeat
from twostroke.errors import ConfigError
from twostroke.model.arch import Arch

SHARE = 0.95  # of the requests that must meet the targets
SIMULATED = 300  # arrivals in one attempt
STEADY = 6.0  # times the length of an answer that a load must last before a fleet shows what it can do
MOST_SIMULATED = 64  # workers; a larger fleet is as many copies of a smaller one
UNIT = 4  # workers of a fleet with two pools that is copied
BATCHES = 4  # that each of its workers is to fill
MOST_REQUESTS = 1500
PARTS = (1.0, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)  # of the most that a fleet can do, tried in turn
GPUS = (1, 2, 4, 8)
PRICIER = 1.75  # times the cheapest that is known, above which an option is not worth simulating
ROOM = 0.97  # of the memory that weights may take, as long as there is to be a KV cache too


@dataclass(frozen=True, slots=True)
class Phase:
    """One stroke of one typical request, alone and in the largest batch."""

    seconds: float  # prefill: TTFT of the prompt alone; decode: TPOT alone
    intensity: float  # FLOP for each byte
    bound: str  # "compute" or "memory"
    batch_seconds: float  # decode: TPOT with the batch full; prefill: the same prompt while that batch runs
    tokens_rate: float  # tokens/s that a worker reaches in this stroke
    dollars_per_million: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """What fits, exactly, and how fast it is, by the roofline."""

    deployment: Deployment
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_blocks: int
    kv_bytes: int
    max_model_len: int
    prompt: int
    output: int
    largest_batch: int  # typical requests whose K and V fit at once
    batch: int  # the smaller of that and max_requests
    ridge: float
    prefill: Phase
    decode: Phase
    reasons: dict[str, str]


def check_weights(deployment: Deployment) -> None:
    """ConfigError when the weights leave no room for a KV cache."""
    weights, memory = deployment.model.bytes, deployment.device.memory * deployment.gpus
    if weights > ROOM * memory:
        raise ConfigError(
            f"{deployment.precision} weights take {weights / 1e9:.1f} GB; {deployment.gpus} × {deployment.device.name} "
            f"has {memory / 1e9:.0f} GB, of which K and V need some: use more devices or a narrower precision."
        )


def size(deployment: Deployment, prompt: int, output: int) -> Sizing:
    """ConfigError when not even one request fits."""
    check_weights(deployment)
    weights, settings = deployment.model.bytes, deployment.settings
    each = settings.layout.blocks_for(min(prompt + output, settings.max_model_len), settings.max_batch_tokens)
    largest = settings.kv_blocks // each
    batch = max(1, min(largest, settings.max_requests))
    prefill, decode = _phases(deployment, prompt, output, batch)
    return Sizing(
        deployment=deployment,
        parameters=deployment.arch.parameters,
        weight_bytes=weights,
        kv_bytes_per_token=kv_bytes_per_token(settings.layout),
        kv_blocks=settings.kv_blocks,
        kv_bytes=settings.kv_blocks * settings.layout.block_bytes,
        max_model_len=settings.max_model_len,
        prompt=prompt,
        output=output,
        largest_batch=largest,
        batch=batch,
        ridge=deployment.roofline(settings).ridge,
        prefill=prefill,
        decode=decode,
        reasons=settings.reasons,
    )


def _phases(deployment: Deployment, prompt: int, output: int, batch: int) -> tuple[Phase, Phase]:
    settings = deployment.settings
    line = deployment.roofline(settings)
    hourly = deployment.price / max(1, deployment.workers) / 3600
    alone = line.prefill_seconds(prompt, 0, settings.max_batch_tokens)
    context = prompt + output // 2
    single, full = line.decode_seconds(1, context), line.decode_seconds(batch, context)
    reading = line.intensity([(0, prompt)], [], 1)
    writing = line.intensity([], [context] * batch, batch)

    def bound(intensity: float) -> str:
        return "compute" if intensity > line.ridge else "memory"

    prefill_rate, decode_rate = prompt / alone, batch / full
    return (
        Phase(alone, reading, bound(reading), alone + full, prefill_rate, hourly / prefill_rate * 1e6),
        Phase(single, writing, bound(writing), full, decode_rate, hourly / decode_rate * 1e6),
    )


# ---- how many workers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Need:
    """The smallest fleet of one kind that serves a load within the targets."""

    deployment: Deployment
    outcome: Outcome
    workers: int  # decode workers where the pools are split
    prefill: int
    dollars_per_hour: float
    dollars_per_million: float  # output tokens
    load: list[Arrival]  # what was simulated
    copies: float = 1.0  # of the simulated fleet, for loads beyond what is simulated


def workers_needed(
    deployment: Deployment,
    arrivals: Sequence[Arrival],
    requests_per_second: float,
    ttft: float,
    tpot: float,
    split: bool = False,
) -> Need | None:
    """None when more workers do not help: a single request already misses the targets."""
    if _hopeless(deployment, arrivals, ttft, tpot):
        return None
    span = STEADY * _typical_seconds(deployment, arrivals)
    copies = max(1.0, requests_per_second * span / SIMULATED)
    each = requests_per_second / copies
    if copies > 1.0 and each * _busy_seconds(deployment, arrivals) < 1.0:
        return _many(deployment, arrivals, requests_per_second, ttft, tpot, split)
    load = at_rate(repeat(arrivals, max(50, ceil(each * span))), each)
    found = _smallest(deployment, load, ttft, tpot, split)
    if found is not None and (copies == 1.0 or found[0].workers > (2 if split else 1)):
        return _need(*found, load, copies)
    return _many(deployment, arrivals, requests_per_second, ttft, tpot, split)  # the smallest may be half idle


def _need(tested: Deployment, outcome: Outcome, load: list[Arrival], copies: float) -> Need:
    pools = tested.pools
    workers, prefill = ceil(pools.workers * copies), ceil(pools.prefill * copies)
    hourly = tested.price / tested.workers * (workers + prefill)
    tokens = outcome.summary.output_rate * copies
    return Need(tested, outcome, workers, prefill, hourly, hourly / 3600 / max(tokens, 1e-12) * 1e6, load, copies)


def _many(
    deployment: Deployment,
    arrivals: Sequence[Arrival],
    requests_per_second: float,
    ttft: float,
    tpot: float,
    split: bool,
) -> Need | None:
    """A load beyond what is simulated is served by copies of a small fleet, each at the highest rate that it sustains:
    a crowd tells what it can do at most, then less and less is tried. Long enough for its batches to be full."""
    share = prefill_share(deployment, arrivals)
    unit = replace(deployment, pools=_pools(UNIT if split else 1, split, share, deployment.pools))
    crowd = repeat(arrivals, min(MOST_REQUESTS, BATCHES * _batch(deployment, arrivals) * unit.pools.workers))
    most = unit.run(at_rate(crowd, 1e6)).summary.request_rate
    for part in PARTS:
        load = at_rate(crowd, part * most)
        outcome = unit.run(load)
        if meets(outcome.served, ttft, tpot, SHARE):
            return _need(unit, outcome, load, requests_per_second / (part * most))
    return None  # even a trickle misses them


def _pools(count: int, split: bool, prefill_share: float, like: Pools) -> Pools:
    if not split:
        return replace(like, workers=count, prefill=0)
    prefill = min(count - 1, max(1, round(prefill_share * count)))
    return replace(like, workers=count - prefill, prefill=prefill)


def _smallest(
    deployment: Deployment, load: Sequence[Arrival], ttft: float, tpot: float, split: bool
) -> tuple[Deployment, Outcome] | None:
    """Doubling, then halving the interval."""
    share = prefill_share(deployment, load)

    def attempt(count: int) -> tuple[Deployment, Outcome] | None:
        tried = replace(deployment, pools=_pools(count, split, share, deployment.pools))
        outcome = tried.run(load)
        return (tried, outcome) if meets(outcome.served, ttft, tpot, SHARE) else None

    fewest = 2 if split else 1
    high = max(fewest, int(0.6 * rate(load) * _busy_seconds(deployment, load)))
    low = high - 1
    best = attempt(high)
    while best is not None and high > fewest:  # it was fewer than the estimate
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
    """Of a worker that one request costs, less what its neighbours bear of each step and what it finds in the cache."""
    settings, batch = deployment.settings, _batch(deployment, arrivals)
    line = deployment.roofline(settings)
    prompt = round(sum(arrival.prompt for arrival in arrivals) / len(arrivals))
    fresh = round(sum(fresh_tokens(arrivals)) / len(arrivals)) if settings.prefix_cache else prompt
    output = sum(arrival.output for arrival in arrivals) / len(arrivals)
    reading = line.prefill_seconds(prompt, prompt - max(1, fresh))
    return reading + output * line.decode_seconds(batch, prompt + round(output / 2)) / batch


def _batch(deployment: Deployment, arrivals: Sequence[Arrival]) -> int:
    """Requests that run at once on one worker, at most."""
    settings = deployment.settings
    typical = round(sum(arrival.prompt + arrival.output for arrival in arrivals) / len(arrivals))
    return max(1, min(settings.max_requests, settings.kv_blocks // max(1, settings.layout.blocks_for(typical))))


def _typical_seconds(deployment: Deployment, arrivals: Sequence[Arrival]) -> float:
    """What a request takes in a well-filled batch."""
    line = deployment.roofline()
    prompt = round(sum(arrival.prompt for arrival in arrivals) / len(arrivals))
    output = sum(arrival.output for arrival in arrivals) / len(arrivals)
    batch = min(32, deployment.settings.max_requests)
    return line.prefill_seconds(prompt) + output * line.decode_seconds(batch, prompt + round(output / 2))


def _hopeless(deployment: Deployment, load: Sequence[Arrival], ttft: float, tpot: float) -> bool:
    """Whether so many requests miss the targets even alone that no number of workers helps."""
    alone = [replace(arrival, at=1e6 * number) for number, arrival in enumerate(load[:50])]
    return not meets(replace(deployment, pools=Pools()).run(alone).served, ttft, tpot, SHARE)


def prefill_share(deployment: Deployment, load: Sequence[Arrival]) -> float:
    """Share of a worker's time that reading takes, with batches as they will be."""
    line = deployment.roofline()
    prompt = sum(arrival.prompt for arrival in load) / len(load)
    output = sum(arrival.output for arrival in load) / len(load)
    batch = min(32, deployment.settings.max_requests)
    reading = line.prefill_seconds(round(prompt))
    writing = output * line.decode_seconds(batch, round(prompt + output / 2)) / batch
    return reading / (reading + writing)


def candidates(arch: Arch, devices: Sequence[Device], config: Config, gpus: Sequence[int] = GPUS) -> list[Deployment]:
    """Every kind of worker that holds the model, cheapest first."""
    found = []
    for device in devices:
        for count in gpus if device.kind == "cuda" else (1,):
            for precision in precisions(device):
                deployment = Deployment(arch, device, config, precision, gpus=count)
                if deployment.model.bytes < 0.9 * device.memory * count:
                    found.append(deployment)
    return sorted(found, key=lambda deployment: deployment.price)


def precisions(device: Device) -> list[str]:
    """What weights are served in there."""
    narrow = [name for name in QUANTIZED[device.kind] if name != "fp8" or "fp8" in device.flops]
    return ["bfloat16", *narrow]


def cheapest(
    options: Sequence[Deployment],
    arrivals: Sequence[Arrival],
    requests_per_second: float,
    ttft: float,
    tpot: float,
    progress: Callable[[str, Deployment], None] | None = None,
    split: Sequence[bool] = (False,),
) -> list[Need]:
    """Options that meet the targets, the cheapest first. What would cost far more than one of them is not simulated.
    With both kinds of `split`, pools of their own are tried where one pool misses the targets, and for the cheapest."""
    arrivals, needs, missed = arrivals[:SIMULATED], [], []
    enough = inf  # dollars, by the estimate: what has to be paid for one that meets the targets, and a margin

    def attempt(option: Deployment, apart: bool) -> Need | None:
        if progress is not None:
            progress("prefill and decode apart" if apart else "", option)
        return workers_needed(option, arrivals, requests_per_second, ttft, tpot, apart)

    for dollars, option in _by_estimate(options, arrivals, requests_per_second):
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


def _by_estimate(
    options: Sequence[Deployment], arrivals: Sequence[Arrival], requests_per_second: float
) -> list[tuple[float, Deployment]]:
    """With the dollars an hour that each might cost; what does not hold a request is left out."""
    found = []
    for option in options:
        with suppress(ConfigError):
            workers = max(1.0, requests_per_second * _busy_seconds(option, arrivals))
            found.append((workers * option.price / option.workers, option))
    return sorted(found, key=lambda pair: pair[0])


def _dollars(need: Need) -> float:
    return need.dollars_per_hour


def priced() -> list[Device]:
    """Devices of the table that can be rented."""
    return [device for device in DEVICES.values() if device.price is not None]
