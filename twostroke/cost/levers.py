"""The levers: what can be done about a slow stroke. One entry in a table each, so that a new lever is one more entry.

`pull` takes a case (deployment, arrivals) and returns it with the lever pulled, or the reason why there is nothing to
pull. What it brings is never written here: it is found by replaying the arrivals. `expect` is what textbooks say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from twostroke.config import DEFAULT_BATCH_TOKENS, DEFAULT_REQUESTS, Config
from twostroke.cost.deploy import Deployment
from twostroke.cost.hardware import Device, known_gpu
from twostroke.cost.trace import Arrival, shared_first
from twostroke.errors import ConfigError

GROW = 4  # how far a cap is raised
QUANTIZED = {"cpu": ("int8", "int4"), "cuda": ("fp8", "int8", "int4")}  # as config.check_quantize has it


class Case(NamedTuple):
    deployment: Deployment
    arrivals: Sequence[Arrival]


@dataclass(frozen=True, slots=True)
class Lever:
    name: str
    title: str  # what to do, in words
    phase: str  # "prefill", "decode" or "both": the stroke it is meant for
    live: bool  # whether a running server can take it
    because: str  # the cause that this lever removes, as the end of "slow …, because"
    expect: str  # what is generally said of it
    pull: Callable[[Case], Case | str]
    setting: Callable[[Deployment], dict[str, Any]] | None = None  # what to set, where a setting does it
    lossy: float = 0.0  # gain that it must bring before it is worth changing the answers


def changed(case: Case, **settings: Any) -> Case | str:
    """The case with other settings, or why they do not go together."""
    try:
        config: Config = replace(case.deployment.config, **settings)
        deployment = replace(case.deployment, config=config)
        _ = deployment.settings
    except ConfigError as error:
        return str(error)
    return Case(deployment, case.arrivals)


def more_tokens(case: Case) -> Case | str:
    now = case.deployment.settings.max_batch_tokens
    if not case.deployment.settings.chunked_prefill:
        return "prompts already run whole"
    wanted = max(GROW * now, DEFAULT_BATCH_TOKENS[case.deployment.device.kind])
    return changed(case, max_batch_tokens=wanted)


def more_requests(case: Case) -> Case | str:
    settings = case.deployment.settings
    wanted = max(GROW * settings.max_requests, DEFAULT_REQUESTS[case.deployment.device.kind])
    wanted = min(wanted, settings.max_batch_tokens)
    if wanted <= settings.max_requests:
        return "every running request needs a token of the step: the token budget comes first"
    return changed(case, max_requests=wanted)


def fewer_requests(case: Case) -> Case | str:
    now = case.deployment.settings.max_requests
    return changed(case, max_requests=now // 2) if now > 1 else "only one request runs at once already"


def continuous(case: Case) -> Case | str:
    if case.deployment.config.batching == "continuous":
        return "batching is continuous already"
    return changed(case, batching="continuous")


def chunked(case: Case) -> Case | str:
    return (
        "prompts are read in chunks already"
        if case.deployment.config.chunked_prefill
        else changed(case, chunked_prefill=True)
    )


def gap(factor: float) -> Callable[[Case], Case | str]:
    def pull(case: Case) -> Case | str:
        settings = case.deployment.settings
        if not settings.chunked_prefill:
            return "prompts run whole: there is no chunk to size"
        return changed(case, max_gap=factor * settings.max_gap)

    return pull


def policy(name: str) -> Callable[[Case], Case | str]:
    def pull(case: Case) -> Case | str:
        if case.deployment.config.policy == name:
            return f"the policy is {name} already"
        return changed(case, policy=name, max_gap=None) if name == "prefill-first" else changed(case, policy=name)

    return pull


def prefix_cache(case: Case) -> Case | str:
    return "the prefix cache is on already" if case.deployment.config.prefix_cache else changed(case, prefix_cache=True)


def stable_prefix(case: Case) -> Case | str:
    moved = shared_first(case.arrivals)
    if all(one.parts == other.parts for one, other in zip(moved, case.arrivals, strict=True)):
        return "prompts already begin with what they share"
    return Case(case.deployment, moved)


def prefix_router(case: Case) -> Case | str:
    pools = case.deployment.pools
    if case.deployment.workers < 2 or pools.router == "prefix":
        return "there is one worker" if case.deployment.workers < 2 else "the router knows prefixes already"
    return Case(replace(case.deployment, pools=replace(pools, router="prefix")), case.arrivals)


def weights(precision: str) -> Callable[[Case], Case | str]:
    def pull(case: Case) -> Case | str:
        now, device = case.deployment.model, case.deployment.device
        if precision not in QUANTIZED[device.kind]:
            return f"{precision} weights are not served on a {device.kind}"
        if precision == "fp8" and "fp8" not in device.flops:
            return no_fp8(device)
        then = case.deployment.quantized(precision)
        if then.model.bytes >= 0.95 * now.bytes:
            return f"the weights take no more than {precision} would"
        return Case(then, case.arrivals)

    return pull


def no_fp8(device: Device) -> str:
    if known_gpu(device.title) is None:
        return f"{device.title} is not in the table of devices: whether it multiplies in fp8 is not known"
    return f"{device.title} has no products in fp8"


def kv(precision: str) -> Callable[[Case], Case | str]:
    def pull(case: Case) -> Case | str:
        now, blocks = case.deployment.settings, case.deployment.config.kv_blocks
        then = changed(case, kv_dtype=precision)
        if isinstance(then, str):
            return then
        size = then.deployment.settings.layout.block_bytes
        if size >= now.layout.block_bytes:
            return f"K and V take no more than {precision} would"
        if blocks is None:
            return then
        return changed(then, kv_blocks=blocks * now.layout.block_bytes // size)  # the same memory holds more of them

    return pull


def more_kv(case: Case) -> Case | str:
    config, now = case.deployment.config, case.deployment.settings
    whole = changed(case, kv_blocks=None, kv_memory=None)
    if isinstance(whole, str):
        return whole
    if whole.deployment.settings.kv_blocks <= now.kv_blocks:
        return "the cache already takes what memory there is"
    room = min(whole.deployment.settings.kv_blocks, GROW * now.kv_blocks)
    length = config.max_model_len or now.max_model_len
    return changed(case, kv_blocks=room, kv_memory=None, max_model_len=length)


def replica(case: Case) -> Case | str:
    pools = case.deployment.pools
    return Case(replace(case.deployment, pools=replace(pools, workers=pools.workers + 1)), case.arrivals)


def split(case: Case) -> Case | str:
    """The same number of workers (two at least), the strokes in pools of their own."""
    deployment = case.deployment
    if deployment.pools.prefill:
        return "the pools are split already"
    count = max(2, deployment.workers)
    config = replace(deployment.config, prefix_cache=True)
    halves = replace(deployment.pools, workers=count - count // 2, prefill=count // 2)
    return Case(replace(deployment, config=config, pools=halves), case.arrivals)


def sets(**values: Any) -> Callable[[Deployment], dict[str, Any]]:
    return lambda after: values


def takes(*names: str) -> Callable[[Deployment], dict[str, Any]]:
    """The settings a pulled deployment has, by name."""
    return lambda after: {name: getattr(after.config, name) for name in names}


LEVERS: tuple[Lever, ...] = (
    Lever("token-budget", "let a step carry more prompt tokens", "prefill", True,
          "a step may carry too few prompt tokens, and every small chunk reads all the weights again",
          "TTFT falls, streams' gaps grow", more_tokens, takes("max_batch_tokens")),
    Lever("batch-cap", "let more requests run at once", "both", False,
          "too few requests may run at once, so the others wait though the machine could take them",
          "throughput rises, TPOT rises a little", more_requests, takes("max_requests")),
    Lever("smaller-batch", "let fewer requests run at once", "decode", True,
          "so many streams share a step that each is slow", "TPOT falls, TTFT and throughput suffer",
          fewer_requests, takes("max_requests")),
    Lever("continuous-batching", "let requests join and leave the batch at any step", "both", True,
          "a batch admits nobody until its last answer is written", "throughput and TTFT improve several times",
          continuous, sets(batching="continuous")),
    Lever("chunked-prefill", "read long prompts in chunks", "decode", True,
          "a long prompt is read in one step while every stream waits", "gaps shrink, TTFT of the long prompt grows",
          chunked, sets(chunked_prefill=True)),
    Lever("shorter-gap", "halve max_gap: smaller chunks while streams run", "decode", True,
          "prompts take too much of each step from the streams", "gaps shrink, TTFT grows", gap(0.5), takes("max_gap")),
    Lever("longer-gap", "double max_gap: larger chunks while streams run", "prefill", True,
          "prompts may take too little of each step beside the streams", "TTFT falls, gaps grow",
          gap(2.0), takes("max_gap")),
    Lever("shortest-first", "serve the shortest prompts first", "prefill", True,
          "short prompts wait behind long ones", "mean TTFT falls, long prompts wait longer",
          policy("shortest"), sets(policy="shortest")),
    Lever("prefill-first", "read prompts before streams go on", "prefill", True,
          "prompts wait for streams", "TTFT falls, streams stall", policy("prefill-first"),
          sets(policy="prefill-first", max_gap=None)),
    Lever("decode-first", "let prompts at most double a stream's step", "decode", True,
          "streams wait for prompts", "gaps shrink, TTFT grows", policy("decode-first"), sets(policy="decode-first")),
    Lever("prefix-cache", "keep the K and V of prompts for those that begin alike", "prefill", True,
          "prompts begin alike and are read again every time", "TTFT falls by the shared part",
          prefix_cache, sets(prefix_cache=True)),
    Lever("stable-prefix", "move what changes (a time, an id) behind what prompts share", "prefill", False,
          "prompts share most of their text but differ at their front, so that none of it is found in the cache",
          "TTFT falls by the shared part", stable_prefix),
    Lever("prefix-router", "send prompts that begin alike to the same worker", "prefill", True,
          "prompts that begin alike are spread over workers that each read them", "hit rate rises with the workers",
          prefix_router),
    Lever("weights-fp8", "hold the weights in fp8, and multiply in fp8", "both", False,
          "every token reads all the weights", "decode up to 2× as fast as from 16 bits, prefill too",
          weights("fp8"), takes("quantize"), lossy=0.1),
    Lever("weights-int8", "hold the weights in int8", "decode", False,
          "every token reads all the weights", "decode up to 2× as fast as from 16 bits, prefill hardly changes",
          weights("int8"), takes("quantize"), lossy=0.1),
    Lever("weights-int4", "hold the weights in int4", "decode", False,
          "every token reads all the weights", "decode up to 3.5× as fast as from 16 bits, prefill hardly changes",
          weights("int4"), takes("quantize"), lossy=0.2),
    Lever("kv-int8", "hold K and V in 8 bits", "decode", False,
          "K and V of long contexts fill the memory and are read for every token",
          "twice the batch or context in the same memory", kv("int8"), sets(kv_dtype="int8"), lossy=0.1),
    Lever("kv-int4", "hold K and V in 4 bits (the answers suffer)", "decode", False,
          "K and V of long contexts fill the memory and are read for every token",
          "four times the batch or context in the same memory", kv("int4"), sets(kv_dtype="int4"), lossy=0.8),
    Lever("kv-memory", "give the KV cache more memory", "decode", False,
          "the KV cache is too small: requests lose their blocks and start again",
          "preemptions end, larger batches", more_kv, takes("kv_blocks")),
    Lever("replica", "add a worker", "both", False, "more arrives than this many workers can serve",
          "queues end; the bill grows", replica),
    Lever("split-pools", "give prefill and decode workers of their own", "both", False,
          "the strokes disturb each other", "gaps become even; K and V have to travel", split),
)  # fmt: skip
BY_NAME = {lever.name: lever for lever in LEVERS}
