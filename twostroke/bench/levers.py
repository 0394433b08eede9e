"""Each lever off and on, measured on this machine, beside what textbooks say.

Every variant is a new engine with other settings under the same load. Variants take turns within a round and medians
over the rounds are kept, so that a change of the machine's speed affects all of them.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from twostroke.bench.inprocess import measure, warm_up
from twostroke.bench.known_answers import asked_again, run_cached, run_plain
from twostroke.bench.workload import Load, make_load
from twostroke.config import make_config
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.model.roofline import kv_bytes_per_token, model_cost
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.trace import Arrival, Contents
from twostroke.cost.units import times
from twostroke.errors import TwostrokeError
from twostroke.kv.layout import make_layout
from twostroke.model.arch import Arch
from twostroke.ops.interface import BLOCK
from twostroke.record import replace

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM

LeverSettings = dict[str, Any]
Numbers = dict[str, float]
OpenEngine = Callable[[LeverSettings], "LLM"]


@dataclass(frozen=True, slots=True)
class Experiment:
    name: str
    stroke: str
    off: LeverSettings
    on: LeverSettings
    load: Callable[[bool], Load]  # True: a smaller one
    textbook: str


@dataclass(slots=True)
class Row:
    """One line of the result. `effect` is on over off: below 1 is better for times, above 1 for throughput."""

    name: str
    stroke: str
    textbook: str
    off: Numbers = field(default_factory=dict)
    on: Numbers = field(default_factory=dict)
    trouble: str | None = None

    @property
    def effect(self) -> Numbers:
        return {name: self.on[name] / self.off[name] for name in self.on if self.off.get(name)}

    @property
    def memory(self) -> str:
        """The bytes that it changes."""
        effect = self.effect
        named = (("KV", "kv_bytes_per_token"), ("KV held", "kv_bytes"), ("weights", "weight_bytes"))
        return ", ".join(f"{name} {times(effect[key])}" for name, key in named if effect.get(key, 1.0) != 1.0) or "–"


def streams_and_prompts(quick: bool) -> Load:
    """Streams, and a long prompt every half second."""
    contents = Contents()
    rows = [Arrival(0.0, (contents.own(40),), 100 if quick else 150) for _ in range(4 if quick else 6)]
    rows += [Arrival(0.3 + 0.5 * number, (contents.own(900),), 4) for number in range(1 if quick else 3)]
    return Load("streams and prompts", rows)


def offline(quick: bool) -> Load:
    count = 12 if quick else 24
    return make_load("batch", "closed", count, seed=1, scale=4.0, concurrency=count)


def documents(quick: bool) -> Load:
    """A few documents, each asked about three times: two thirds of the requests begin with a text that was read."""
    contents = Contents()
    texts = [contents.own(450) for _ in range(3 if quick else 6)]
    rows = [Arrival(0.0, (text, contents.own(30)), 16) for _ in range(3) for text in texts]
    return Load("documents asked about again", rows, 1)


def many_documents(quick: bool) -> Load:
    """More documents than the cache of the experiment holds, each asked for twice."""
    contents = Contents()
    texts = [contents.own(420) for _ in range(6 if quick else 10)]
    rows = [Arrival(0.0, (text, contents.own(20)), 4) for _ in range(2) for text in texts]
    return Load("documents in turn", rows, 1)


def mixed_prompts(quick: bool) -> Load:
    """A long prompt before several short ones, all at once."""
    contents = Contents()
    lengths = [1000, *[30] * (6 if quick else 10)]
    return Load("a long prompt first", [Arrival(0.0, (contents.own(length),), 8) for length in lengths])


def one_stream(quick: bool) -> Load:
    contents = Contents()
    return Load("one stream", [Arrival(0.0, (contents.own(256),), 32 if quick else 64)], 1)


def long_context(quick: bool) -> Load:
    contents = Contents()
    streams, context = (2, 800) if quick else (4, 1200)
    rows = [Arrival(0.0, (contents.own(context),), 24 if quick else 48) for _ in range(streams)]
    return Load("long contexts", rows, streams)


def repeated_file(quick: bool) -> Load:
    return make_load("edit", "closed", 2 if quick else 4, seed=3, concurrency=1)


def open_questions(quick: bool) -> Load:
    return make_load("questions", "closed", 2 if quick else 4, seed=4, concurrency=1)


SAME_KV: LeverSettings = {"kv_dtype": "float16"}  # otherwise it follows `dtype`: two levers at once
FLOAT_WEIGHTS: LeverSettings = {"dtype": "float32"} | SAME_KV
SMALL_CACHE: LeverSettings = {"kv_blocks": 100, "max_model_len": 1024, "max_requests": 1}
EXPERIMENTS = (
    Experiment("continuous batching", "both", {"batching": "static", "max_requests": 8}, {"max_requests": 8}, offline,
               "2–20× throughput over static batches"),
    Experiment("batch of 16", "decode", {"max_requests": 1}, {"max_requests": 16}, offline,
               "throughput nearly ×16 while memory-bound; TPOT rises"),
    Experiment("chunked prefill", "decode", {"chunked_prefill": False}, {}, streams_and_prompts,
               "gaps bounded; TTFT of long prompts a little longer"),
    Experiment("shortest first", "prefill", {}, {"policy": "shortest"}, mixed_prompts,
               "the median TTFT falls, long prompts wait longer"),
    Experiment("prefix cache", "prefill", {"prefix_cache": False}, {}, documents,
               "TTFT falls by the shared share; decode unchanged"),
    Experiment("evicted K and V kept on the host", "prefill", SMALL_CACHE, SMALL_CACHE | {"kv_offload": 1 << 28},
               many_documents, "a copy is faster than reading the prompt again"),
    Experiment("weights as in the file", "decode", FLOAT_WEIGHTS, SAME_KV, one_stream,
               "decode speeds up with the bytes saved; prefill hardly"),
    Experiment("weights in int8", "decode", FLOAT_WEIGHTS, {"quantize": "int8"} | SAME_KV, one_stream,
               "decode up to 4× from 32 bits; prefill hardly"),
    Experiment("weights in int4", "decode", FLOAT_WEIGHTS, {"quantize": "int4"} | SAME_KV, one_stream,
               "decode up to 7× from 32 bits; prefill hardly"),
    Experiment("KV in float16", "decode", {"kv_dtype": "float32"}, {"kv_dtype": "float16"}, long_context,
               "half the KV memory; long contexts decode faster"),
    Experiment("KV in int8", "decode", {"kv_dtype": "float16"}, {"kv_dtype": "int8"}, long_context,
               "half the KV memory again"),
    Experiment("KV in int4", "decode", {"kv_dtype": "float16"}, {"kv_dtype": "int4"}, long_context,
               "a quarter of float16's KV memory"),
    Experiment("prompt lookup, a file repeated", "decode", {"speculate": "off"}, {"speculate": "lookup"},
               repeated_file, "2–3× where the answer repeats its prompt"),
    Experiment("prompt lookup, open questions", "decode", {"speculate": "off"}, {"speculate": "lookup"},
               open_questions, "nothing to look up: no gain, and no loss"),
)  # fmt: skip


DRAFT_MODEL = Experiment(
    "draft model, open questions", "decode", {"speculate": "off"}, {"speculate": "draft"}, open_questions,
    "1.5–2.5× for one stream; less in a batch",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Round:
    """How experiments are measured."""

    open_llm: OpenEngine
    rounds: int = 3
    quick: bool = False  # smaller loads
    stored: int | None = None  # bytes of the weights in the file
    drafts: bool = False  # whether the engines have a draft model


def measures(how: Round) -> dict[str, Callable[[], Row]]:
    """The rows by name, in the order in which they are measured."""
    open_llm = how.open_llm
    found: dict[str, Callable[[], Row]] = {
        "attention kernel": lambda: attention_kernel(open_llm),  # first: plain torch is slower after long contexts
        "KV cache": lambda: kv_cache(open_llm, how.rounds),
        "answer cache": lambda: answer_cache(how),
    }
    for experiment in (*EXPERIMENTS, *((DRAFT_MODEL,) if how.drafts else ())):
        found[experiment.name] = partial(measure_experiment, experiment, how)
    for computed in (grouped_queries, sliding_windows, blocks_of_tokens):
        found[computed.__name__.replace("_", " ")] = partial(computed, open_llm)
    found["separate pools"] = separate_pools
    return found


def run(how: Round, progress: Callable[[str], None] | None = None) -> Iterator[Row]:
    """Yields each row when it is measured."""
    all_of_them = measures(how)
    for number, (name, measured) in enumerate(all_of_them.items(), 1):
        if progress is not None:
            progress(f"{number} of {len(all_of_them)}: {name}")
        yield measured()


def measure_experiment(experiment: Experiment, how: Round) -> Row:
    row = Row(experiment.name, experiment.stroke, experiment.textbook)
    found: dict[str, list[Numbers]] = {"off": [], "on": []}
    try:
        for _ in range(how.rounds):
            for name, settings in (("off", experiment.off), ("on", experiment.on)):
                found[name].append(numbers(how.open_llm(settings), experiment.load(how.quick), how.stored))
                gc.collect()
    except (TwostrokeError, ValueError) as error:
        row.trouble = str(error)
        return row
    row.off, row.on = medians(found["off"]), medians(found["on"])
    return row


def numbers(llm: LLM, load: Load, stored: int | None) -> Numbers:
    warm_up(llm)
    summary = measure(llm, load, "").summary()
    weights = weight_bytes(llm, stored)
    return {
        "ttft": summary.ttft.p50,
        "tpot": summary.tpot.p50,
        "gap": summary.stall.mean,
        "throughput": summary.output_rate,
        "kv_bytes_per_token": float(kv_bytes_per_token(llm.settings.layout)),
        **({} if weights is None else {"weight_bytes": weights}),
    }


def weight_bytes(llm: LLM, stored: int | None) -> float | None:
    """Bytes of the weights in memory: as in the file, unless a setting converts them."""
    settings = llm.settings
    held = settings.quantize or settings.dtype
    return stored if held is None else model_cost(llm.arch, held, None, settings.device).bytes


def as_document(machine: str, model: str, rounds: int, rows: list[Row]) -> str:
    document = {"machine": machine, "model": model, "rounds": rounds}
    return json.dumps({**document, "rows": [{**asdict(row), "effect": row.effect} for row in rows]}, indent=1) + "\n"


def medians(rounds: list[Numbers]) -> Numbers:
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def kv_cache(open_llm: OpenEngine, rounds: int, prompt: int = 128, tokens: int = 24) -> Row:
    """Without the cache every token needs a prefill of the whole text: one request for each token."""
    row = Row("KV cache", "decode", "without it every token costs a prefill: decode many times faster with it")
    contents = Contents()
    found: dict[str, list[Numbers]] = {"off": [], "on": []}
    for _ in range(rounds):
        llm = open_llm({"prefix_cache": False})
        warm_up(llm)
        whole = measure(llm, Load("on", [Arrival(0.0, (contents.own(prompt),), tokens)], 1), "").summary()
        again = [Arrival(0.0, (contents.own(prompt + written),), 1) for written in range(tokens)]
        each = measure(llm, Load("off", again, 1), "").summary()
        found["on"].append({"ttft": whole.ttft.p50, "tpot": whole.tpot.p50, "throughput": whole.output_rate})
        found["off"].append({"ttft": whole.ttft.p50, "tpot": each.ttft.mean, "throughput": each.output_rate})
    row.off, row.on = medians(found["off"]), medians(found["on"])
    return row


def answer_cache(how: Round) -> Row:
    """A known answer is returned at once, so only the time to it and the throughput are compared."""
    row = Row("answer cache, asked again", "both", "a known answer skips both strokes: it costs a lookup")
    found: dict[str, list[Numbers]] = {"off": [], "on": []}
    for _ in range(how.rounds):
        for name, run_load in (("off", run_plain), ("on", run_cached)):
            llm = how.open_llm({})
            warm_up(llm)
            summary = run_load(llm, asked_again(how.quick)).summary()
            found[name].append({"ttft": summary.ttft.p50, "throughput": summary.output_rate})
            gc.collect()
    row.off, row.on = medians(found["off"]), medians(found["on"])
    return row


def attention_kernel(open_llm: OpenEngine) -> Row:
    """Attention alone: the end of a prompt under TTFT, a step of streams under TPOT."""
    from twostroke.bench.kernels import attention_seconds  # imports torch

    row = Row("attention kernel (attention alone)", "both", "2–4× on prompts over plain attention; less on decode")
    found = attention_seconds(open_llm({}))
    if found is None:
        row.trouble = "there is only one attention kernel here"
    else:
        row.off, row.on = found
    return row


def grouped_queries(open_llm: OpenEngine) -> Row:
    """K and V of the model against those of one without shared heads. Computed, not measured."""
    llm = open_llm({})
    row = Row("grouped queries (computed)", "decode", "KV memory over the heads that share it")
    layout = llm.settings.layout
    every_head = llm.arch.with_mixers(kv_heads=max(mixer.heads for mixer, _ in llm.arch.mixers))  # type: ignore[attr-defined]
    row.on = {"kv_bytes_per_token": layout.token_bytes}
    row.off = {"kv_bytes_per_token": make_layout(every_head, llm.settings.kv_dtype).token_bytes}
    return row


def sliding_windows(open_llm: OpenEngine) -> Row:
    """K and V of one request of the longest length, with the model's windows and without. Computed, not measured."""
    llm = open_llm({})
    row = Row("sliding windows (computed)", "decode", "K and V of a long context shrink to those of its windows")
    windowed = llm.settings.layout
    if not any(group.window for group in windowed.groups):
        row.trouble = "this model has no windows"
        return row
    whole = make_layout(llm.arch.with_mixers(window=None), llm.settings.kv_dtype)
    length = llm.settings.max_model_len
    row.on, row.off = ({"kv_bytes": one.read_bytes(length)} for one in (windowed, whole))
    return row


def blocks_of_tokens(open_llm: OpenEngine) -> Row:
    """K and V held by the chat workload: room for the longest answer reserved for every request, or blocks as they
    fill. Computed, not measured."""
    llm = open_llm({})
    row = Row("blocks of 16 tokens (computed)", "decode", "60–80 % of reserved room is never filled")
    requests = make_load("chat", count=200).arrivals
    longest, each = max(one.prompt + one.output for one in requests), llm.settings.layout.token_bytes
    blocks = sum(-(-(one.prompt + one.output) // BLOCK) * BLOCK for one in requests)
    row.on, row.off = {"kv_bytes": each * blocks}, {"kv_bytes": each * longest * len(requests)}
    return row


def separate_pools() -> Row:
    """Two workers in one pool, and as two pools. Simulated: it takes two machines."""
    row = Row("separate pools (simulated, 8B on two H200)", "both", "gaps become even; K and V must be transferred")
    load = make_load("code", count=200, per_second=12.0, seed=5).arrivals
    config = make_config(max_model_len=16_384, seed=0)
    deployment = Deployment(model_arch("llama-3.1-8b"), find_device("h200"), config)
    for numbers_of, pools in ((row.off, Pools(2)), (row.on, Pools(1, prefill=1))):
        found = replace(deployment, pools=pools).run(load).summary
        numbers_of |= {"ttft": found.ttft.p50, "tpot": found.tpot.p50, "gap": found.stall.mean,
                       "throughput": found.output_rate}  # fmt: skip
    return row


def model_arch(name: str) -> Arch:
    found = known_arch(name)
    assert found is not None
    return found
