"""What can be done about a slow stroke. Each lever is one entry of a table.

`pull` returns the scenario with the lever pulled, or the reason why the lever does not apply. Its effect is not written
here: a replay of the arrivals predicts it. `expect` is what textbooks say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from twostroke.config import DEFAULT_BATCH_TOKENS, DEFAULT_REQUESTS, QUANTIZATIONS_OF, Config
from twostroke.cost.answers.tune import tune
from twostroke.cost.model.devices import Device, known_gpu
from twostroke.cost.model.drafts import best_length
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.served import Served
from twostroke.cost.simulation.trace import Arrival, shared_first
from twostroke.errors import ConfigError
from twostroke.record import replace

LOOKUP = 0.001  # seconds of the answer cache that a request waits in vain
FEW_REPEATED = 0.01  # share of prompts
GROW = 4  # factor by which a cap is raised


class Scenario(NamedTuple):
    """A deployment and the requests that it serves."""

    deployment: Deployment
    arrivals: Sequence[Arrival]
    known: Sequence[Arrival] = ()  # requests beside them that the answer cache answers,
    lookup: float = 0.0  # after so many seconds, which the others wait for too,
    saved: int = 0  # with so many tokens: those of the stored answers, which need not be as long as their own
    served: Sequence[Served] = ()  # of each arrival, where it was measured


@dataclass(frozen=True, slots=True)
class Lever:
    name: str
    title: str  # what to do, in words
    phase: str  # "prefill", "decode" or "both": the stroke it is meant for
    live: bool  # whether a running server can take it
    because: str  # the cause that this lever removes: the end of "slow …, because"
    expect: str  # the effect that textbooks expect
    pull: Callable[[Scenario], Scenario | str]
    setting: Callable[[Deployment], dict[str, Any]] | None = None  # the settings that pull it; None: no setting does
    lossy: float = 0.0  # gain that it must have to be worth a change of the answers


def changed(scenario: Scenario, **settings: Any) -> Scenario | str:
    """The scenario with other settings, or why they are refused."""
    try:
        config: Config = replace(scenario.deployment.config, **settings)
        deployment = replace(scenario.deployment, config=config)
        _ = deployment.settings
    except ConfigError as error:
        return str(error)
    return Scenario(deployment, scenario.arrivals)


def more_tokens(scenario: Scenario) -> Scenario | str:
    now = scenario.deployment.settings.max_batch_tokens
    if not scenario.deployment.settings.chunked_prefill:
        return "prompts already run whole"
    wanted = max(GROW * now, DEFAULT_BATCH_TOKENS[scenario.deployment.device.kind])
    return changed(scenario, max_batch_tokens=wanted)


def more_requests(scenario: Scenario) -> Scenario | str:
    settings = scenario.deployment.settings
    wanted = max(GROW * settings.max_requests, DEFAULT_REQUESTS[scenario.deployment.device.kind])
    wanted = min(wanted, settings.max_batch_tokens)
    if wanted <= settings.max_requests:
        return "every running request needs a token of the step: the token budget comes first"
    return changed(scenario, max_requests=wanted)


def fewer_requests(scenario: Scenario) -> Scenario | str:
    now = scenario.deployment.settings.max_requests
    return changed(scenario, max_requests=now // 2) if now > 1 else "only one request runs at once already"


def switch(already: str, **settings: Any) -> Callable[[Scenario], Scenario | str]:
    """Give the settings these values, unless the first has its value already."""
    name, value = next(iter(settings.items()))

    def pull(scenario: Scenario) -> Scenario | str:
        return already if getattr(scenario.deployment.config, name) == value else changed(scenario, **settings)

    return pull


def gap(factor: float) -> Callable[[Scenario], Scenario | str]:
    def pull(scenario: Scenario) -> Scenario | str:
        settings = scenario.deployment.settings
        if not settings.chunked_prefill:
            return "prompts run whole: there is no chunk to size"
        return changed(scenario, max_gap=factor * settings.max_gap)

    return pull


def stable_prefix(scenario: Scenario) -> Scenario | str:
    moved = shared_first(scenario.arrivals)
    if all(one.parts == other.parts for one, other in zip(moved, scenario.arrivals, strict=True)):
        return "prompts already begin with what they share"
    return Scenario(scenario.deployment, moved)


def prefix_router(scenario: Scenario) -> Scenario | str:
    pools = scenario.deployment.pools
    if scenario.deployment.workers < 2 or pools.router == "prefix":
        return "there is one worker" if scenario.deployment.workers < 2 else "the router knows prefixes already"
    return Scenario(replace(scenario.deployment, pools=replace(pools, router="prefix")), scenario.arrivals)


def weights(precision: str) -> Callable[[Scenario], Scenario | str]:
    def pull(scenario: Scenario) -> Scenario | str:
        now, device = scenario.deployment.model, scenario.deployment.device
        if precision not in QUANTIZATIONS_OF[device.kind]:
            return f"{precision} weights are not served on a {device.kind}"
        if precision == "fp8" and "fp8" not in device.flops:
            return no_fp8(device)
        then = scenario.deployment.quantized(precision)
        if then.model.bytes >= 0.95 * now.bytes:
            return f"the weights take no more than {precision} would"
        return Scenario(then, scenario.arrivals)

    return pull


def no_fp8(device: Device) -> str:
    if known_gpu(device.title) is None:
        return f"{device.title} is not in the table of devices: whether it multiplies in fp8 is not known"
    return f"{device.title} has no products in fp8"


def kv(precision: str) -> Callable[[Scenario], Scenario | str]:
    def pull(scenario: Scenario) -> Scenario | str:
        now, blocks = scenario.deployment.settings, scenario.deployment.config.kv_blocks
        then = changed(scenario, kv_dtype=precision)
        if isinstance(then, str):
            return then
        size = then.deployment.settings.layout.block_bytes
        if size >= now.layout.block_bytes:
            return f"K and V take no more than {precision} would"
        if blocks is None:
            return then
        return changed(then, kv_blocks=blocks * now.layout.block_bytes // size)  # as many as the same memory holds

    return pull


def lookup(scenario: Scenario) -> Scenario | str:
    deployment, drafts = scenario.deployment, scenario.deployment.lookup
    if deployment.looks_up:
        return "prompt lookup is on already"
    if drafts is None:
        return "how often its guesses would be right is not known: no answers were recorded"
    then = changed(scenario, speculate="auto")  # a draft model that the engine has stays in use
    if isinstance(then, str):
        return then
    context = round(sum(one.prompt + one.output / 2 for one in scenario.arrivals) / max(1, len(scenario.arrivals)))
    if not best_length(deployment.roofline(), drafts, 1, context).length:
        return (
            f"{drafts.covered:.0%} of the steps would have had a guess, and {drafts.right:.0%} of the guessed tokens "
            "would have been right: too few to pay for verifying them"
        )
    return then


def known_answers(scenario: Scenario) -> Scenario | str:
    """The exact tier of the answer cache answers requests whose whole prompt came before. Only requests whose answers
    are determined count."""
    if not any(arrival.determined for arrival in scenario.arrivals):
        return "no request is known to have temperature 0 or a seed, and only such answers are used again"
    found = without_repeated(
        scenario, lambda arrival: arrival.parts if arrival.determined else None, "prompts", "a whole"
    )
    return found if isinstance(found, str) else found._replace(lookup=LOOKUP)


def known_questions(scenario: Scenario) -> Scenario | str:
    """The semantic tier also answers questions that ask what another one asked, once there is enough evidence."""
    if not any(arrival.topic is not None for arrival in scenario.arrivals):
        return "which questions ask the same is not known: serve --record-questions records it"
    found = without_repeated(scenario, lambda arrival: arrival.topic, "questions", "the same in meaning")
    return found if isinstance(found, str) else found._replace(lookup=LOOKUP)


def without_repeated(scenario: Scenario, key: Callable[[Arrival], Any], what: str, how: str) -> Scenario | str:
    """key: equal for requests that have one answer; None: of no other request."""
    stored: dict[Any, int] = {}  # tokens of the answer to the first request with each key
    first: list[int] = []
    known: list[Arrival] = []
    saved = 0
    for place, arrival in enumerate(scenario.arrivals):
        mine = key(arrival)
        if mine is not None and mine in stored:
            known.append(arrival)
            saved += stored[mine]
        else:
            first.append(place)
            stored[mine] = arrival.output
    repeated = len(known) / max(1, len(scenario.arrivals))
    if repeated < FEW_REPEATED:
        return f"{repeated:.1%} of the {what} came before as {how}: too few to answer from"
    rest = [scenario.arrivals[place] for place in first]
    return Scenario(at_their_pace(scenario, first), rest, known, saved=saved)


def at_their_pace(scenario: Scenario, places: Sequence[int]) -> Deployment:
    """The deployment with rates as these requests met them. An answer that was written before is guessed from the
    earlier one, several tokens in a step, so the median of all requests is too fast for those that remain."""
    if not scenario.served:
        return scenario.deployment
    return tune(scenario.deployment, scenario.arrivals, scenario.served, places)


def more_kv(scenario: Scenario) -> Scenario | str:
    config, now = scenario.deployment.config, scenario.deployment.settings
    whole = changed(scenario, kv_blocks=None, kv_memory=None)
    if isinstance(whole, str):
        return whole
    if whole.deployment.settings.kv_blocks <= now.kv_blocks:
        return "the cache already takes what memory there is"
    room = min(whole.deployment.settings.kv_blocks, GROW * now.kv_blocks)
    length = config.max_model_len or now.max_model_len
    return changed(scenario, kv_blocks=room, kv_memory=None, max_model_len=length)


def replica(scenario: Scenario) -> Scenario | str:
    pools = scenario.deployment.pools
    return Scenario(replace(scenario.deployment, pools=replace(pools, workers=pools.workers + 1)), scenario.arrivals)


def split(scenario: Scenario) -> Scenario | str:
    """The same number of workers (two at least) in two pools."""
    deployment = scenario.deployment
    if deployment.pools.prefill:
        return "the pools are split already"
    count = max(2, deployment.workers)
    config = replace(deployment.config, prefix_cache=True)
    halves = replace(deployment.pools, workers=count - count // 2, prefill=count // 2)
    return Scenario(replace(deployment, config=config, pools=halves), scenario.arrivals)


def sets(**values: Any) -> Callable[[Deployment], dict[str, Any]]:
    return lambda after: values


def takes(*names: str) -> Callable[[Deployment], dict[str, Any]]:
    """The named settings of the deployment after the lever. None: it replaces a setting that may have been given."""
    return lambda after: {name: getattr(after.config, name) for name in names}


SAME_MEMORY = ("kv_dtype", "kv_blocks", "kv_memory")  # as many blocks of the new type as the same memory holds
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
          "a batch admits no request until its last answer is written", "throughput and TTFT improve several times",
          switch("batching is continuous already", batching="continuous"), sets(batching="continuous")),
    Lever("chunked-prefill", "read long prompts in chunks", "decode", True,
          "a long prompt is read in one step while every stream waits", "gaps shrink, TTFT of the long prompt grows",
          switch("prompts are read in chunks already", chunked_prefill=True), sets(chunked_prefill=True)),
    Lever("shorter-gap", "halve max_gap: smaller chunks while streams run", "decode", True,
          "prompts take too much of each step from the streams", "gaps shrink, TTFT grows", gap(0.5), takes("max_gap")),
    Lever("longer-gap", "double max_gap: larger chunks while streams run", "prefill", True,
          "prompts may take too little of each step beside the streams", "TTFT falls, gaps grow",
          gap(2.0), takes("max_gap")),
    Lever("shortest-first", "serve the shortest prompts first", "prefill", True,
          "short prompts wait behind long ones", "mean TTFT falls, long prompts wait longer",
          switch("the policy is shortest already", policy="shortest"), sets(policy="shortest")),
    Lever("prefill-first", "read prompts before streams go on", "prefill", True,
          "prompts wait for streams", "TTFT falls, streams stall",
          switch("the policy is prefill-first already", policy="prefill-first", max_gap=None),
          sets(policy="prefill-first", max_gap=None)),
    Lever("decode-first", "let prompts at most double a stream's step", "decode", True,
          "streams wait for prompts", "gaps shrink, TTFT grows",
          switch("the policy is decode-first already", policy="decode-first"), sets(policy="decode-first")),
    Lever("prefix-cache", "keep the K and V of prompts for those that begin alike", "prefill", True,
          "prompts begin alike and are read again every time", "TTFT falls by the shared part",
          switch("the prefix cache is on already", prefix_cache=True), sets(prefix_cache=True)),
    Lever("stable-prefix", "move what changes (a time, an id) behind what prompts share", "prefill", False,
          "prompts share most of their text but differ at their front, so that none of it is found in the cache",
          "TTFT falls by the shared part", stable_prefix),
    Lever("prefix-router", "send prompts that begin alike to the same worker", "prefill", True,
          "prompts that begin alike are spread over workers that each read them", "hit rate rises with the workers",
          prefix_router),
    Lever("weights-fp8", "hold the weights in fp8, and multiply in fp8", "both", False,
          "a step reads all weights that it uses", "decode up to 2× as fast as from 16 bits, prefill too",
          weights("fp8"), takes("quantize", "dtype"), lossy=0.1),
    Lever("weights-int8", "hold the weights in int8", "decode", False,
          "a step reads all weights that it uses", "decode up to 2× as fast as from 16 bits, prefill hardly changes",
          weights("int8"), takes("quantize", "dtype"), lossy=0.1),
    Lever("weights-int4", "hold the weights in int4", "decode", False,
          "a step reads all weights that it uses", "decode up to 3.5× as fast as from 16 bits, prefill hardly changes",
          weights("int4"), takes("quantize", "dtype"), lossy=0.2),
    Lever("kv-int8", "hold K and V in 8 bits", "decode", False,
          "K and V of long contexts fill the memory and are read for every token",
          "twice the batch or context in the same memory", kv("int8"), takes(*SAME_MEMORY), lossy=0.1),
    Lever("kv-int4", "hold K and V in 4 bits (the answers suffer)", "decode", False,
          "K and V of long contexts fill the memory and are read for every token",
          "four times the batch or context in the same memory", kv("int4"), takes(*SAME_MEMORY), lossy=0.8),
    Lever("prompt-lookup", "guess tokens from the text so far and verify several in one step", "decode", True,
          "every step reads all the weights for one token, although answers repeat text that is already there",
          "TPOT falls where answers repeat their prompt, and nowhere else", lookup, sets(speculate="auto")),
    Lever("answer-cache", "serve --answer-cache exact: answer equal requests from known answers", "both", False,
          "the same prompts are read and answered again", "repeated requests take neither stroke, the others wait less "
          "(only requests with temperature 0 or a seed)", known_answers),
    Lever("semantic-cache", "serve --answer-cache semantic: answer questions that ask the same from known answers",
          "both", False, "questions that were answered come again in other words", "they take neither stroke, once "
          "there is evidence that few of the shared answers are wrong", known_questions, lossy=0.05),
    Lever("kv-memory", "give the KV cache more memory", "decode", False,
          "the KV cache is too small: requests lose their blocks and start again",
          "preemptions end, larger batches", more_kv, takes("kv_blocks", "kv_memory")),
    Lever("replica", "add a worker", "both", False, "more requests arrive than this many workers can serve",
          "queues end; the price grows", replica),
    Lever("split-pools", "separate pools for prefill and decode: twostroke cluster", "both", False,
          "prefill and decode slow each other down", "gaps become even; K and V must be transferred", split),
)  # fmt: skip
