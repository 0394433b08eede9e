"""Each lever off and on, measured on this machine, beside what textbooks say.

Every variant is a new engine with other settings under the same load. Variants take turns within a round and medians
over the rounds are kept, so that a change of the machine's speed affects all of them.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from twostroke.bench.inprocess import measure, warm_up
from twostroke.bench.workload import Load, make_load
from twostroke.cost.model.roofline import kv_bytes_per_token, model_cost
from twostroke.cost.simulation.trace import Arrival, Contents
from twostroke.cost.units import times
from twostroke.errors import TwostrokeError
from twostroke.kv.layout import make_layout

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM

Settings = dict[str, Any]
Numbers = dict[str, float]
Open = Callable[[Settings], "LLM"]


@dataclass(frozen=True, slots=True)
class Experiment:
    name: str
    stroke: str
    off: Settings
    on: Settings
    load: Callable[[], Load]
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
        named = (("KV", "kv_bytes_per_token"), ("weights", "weight_bytes"))
        return ", ".join(f"{name} {times(effect[key])}" for name, key in named if effect.get(key, 1.0) != 1.0) or "–"


def streams_and_prompts() -> Load:
    """Six streams, and a long prompt every half second."""
    contents = Contents()
    rows = [Arrival(0.0, (contents.own(40),), 150) for _ in range(6)]
    rows += [Arrival(0.5 + 0.5 * number, (contents.own(900),), 4) for number in range(3)]
    return Load("streams and prompts", rows)


def offline() -> Load:
    return make_load("batch", "closed", 24, seed=1, scale=4.0, concurrency=24)


def questions() -> Load:
    return make_load("rag", "closed", 16, seed=2, scale=2.0, concurrency=1)


def one_stream() -> Load:
    contents = Contents()
    return Load("one stream", [Arrival(0.0, (contents.own(256),), 64)], 1)


def long_context() -> Load:
    contents = Contents()
    return Load("long contexts", [Arrival(0.0, (contents.own(1200),), 48) for _ in range(4)], 4)


SAME_KV: Settings = {"kv_dtype": "float16"}  # otherwise it follows `dtype`: two levers at once
FLOAT_WEIGHTS: Settings = {"dtype": "float32"} | SAME_KV
EXPERIMENTS = (
    Experiment("continuous batching", "both", {"batching": "static", "max_requests": 8}, {"max_requests": 8}, offline,
               "2–20× throughput over static batches"),
    Experiment("batch of 16", "decode", {"max_requests": 1}, {"max_requests": 16}, offline,
               "throughput nearly ×16 while memory-bound; TPOT rises"),
    Experiment("chunked prefill", "decode", {"chunked_prefill": False}, {}, streams_and_prompts,
               "gaps bounded; TTFT of long prompts a little longer"),
    Experiment("prefix cache", "prefill", {"prefix_cache": False}, {}, questions,
               "TTFT falls by the shared share; decode unchanged"),
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
)  # fmt: skip


def run(
    open_llm: Open, rounds: int = 3, progress: Callable[[str], None] | None = None, stored: int | None = None
) -> list[Row]:
    """stored: bytes of the weights in the file."""
    measures: dict[str, Callable[[], Row]] = {
        "attention kernel": lambda: attention_kernel(open_llm),  # first: plain torch is slower after long contexts
        "KV cache": lambda: kv_cache(open_llm, rounds),
    }
    for experiment in EXPERIMENTS:
        measures[experiment.name] = partial(measure_experiment, experiment, open_llm, rounds, stored)
    measures["grouped queries"] = lambda: grouped_queries(open_llm)
    rows = []
    for number, (name, measured) in enumerate(measures.items(), 1):
        if progress is not None:
            progress(f"{number} of {len(measures)}: {name}")
        rows.append(measured())
    return rows


def measure_experiment(experiment: Experiment, open_llm: Open, rounds: int, stored: int | None) -> Row:
    row = Row(experiment.name, experiment.stroke, experiment.textbook)
    found: dict[str, list[Numbers]] = {"off": [], "on": []}
    try:
        for _ in range(rounds):
            for name, settings in (("off", experiment.off), ("on", experiment.on)):
                found[name].append(numbers(open_llm(settings), experiment.load(), stored))
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
    """Of the weights in memory: as in the file, unless a setting converts them."""
    settings = llm.settings
    held = settings.quantize or settings.dtype
    return stored if held is None else model_cost(llm.arch, held, None, settings.device).bytes


def as_document(machine: str, model: str, rounds: int, rows: list[Row]) -> str:
    document = {"machine": machine, "model": model, "rounds": rounds}
    return json.dumps({**document, "rows": [{**asdict(row), "effect": row.effect} for row in rows]}, indent=1) + "\n"


def medians(rounds: list[Numbers]) -> Numbers:
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def kv_cache(open_llm: Open, rounds: int, prompt: int = 128, tokens: int = 24) -> Row:
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


def attention_kernel(open_llm: Open) -> Row:
    """Attention alone: the end of a prompt under TTFT, a step of streams under TPOT."""
    from twostroke.bench.kernels import attention_seconds  # imports torch

    row = Row("attention kernel (attention alone)", "both", "2–4× on prompts over plain attention; less on decode")
    found = attention_seconds(open_llm({}))
    if found is None:
        row.trouble = "there is only one attention kernel here"
    else:
        row.off, row.on = found
    return row


def grouped_queries(open_llm: Open) -> Row:
    """K and V of the model against those of one without shared heads. Computed, not measured."""
    llm = open_llm({})
    row = Row("grouped queries (computed)", "decode", "KV memory over the heads that share it")
    layout = llm.settings.layout
    every_head = llm.arch.with_mixers(kv_heads=max(mixer.heads for mixer, _ in llm.arch.mixers))  # type: ignore[attr-defined]
    row.on = {"kv_bytes_per_token": layout.token_bytes}
    row.off = {"kv_bytes_per_token": make_layout(every_head, llm.settings.kv_dtype).token_bytes}
    return row
