"""What to send and when: arrivals (Poisson, burst, constant, closed loop, a trace) of named workloads.

Every workload says which parts of its prompts are the same text, because that is what a prefix cache finds:

    rag     a system text and one of a few documents, then a question; short answers
    code    long unshared prompts and very short answers, as the Azure code trace has them
    chat    conversations that grow: every turn begins with all the turns before it
    batch   many independent documents, all at once; only the throughput counts
    agent   a long shared list of tools, then steps that each begin with the steps before; short answers

Two more have prompts of real text (texts.py), for what depends on the text: edit, questions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path

from twostroke.bench.texts import CHARACTERS, TEMPERATURE, TEXTS
from twostroke.cost.simulation.trace import Arrival, Contents, PromptPart, at_rate, from_zero, read_trace, shorter
from twostroke.errors import InputError
from twostroke.record import replace

ARRIVALS = ("poisson", "burst", "constant", "closed")
BURST = 8  # requests that arrive together
OTHER = 1 << 35  # added to the number of a content, it makes another text
TRACES = {
    "azure-code": "azure_code.csv",
    "azure-conv": "azure_conv.csv",
    "mooncake": "mooncake_conversation.jsonl",
}
Lengths = tuple[tuple[PromptPart, ...], int]  # parts of the prompt, tokens of the answer


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    arrivals: list[Arrival]
    closed: int | None = None  # requests under way at once; the arrivals' times then do not count
    rate: float | None = None  # requests/s; None: the trace's own
    texts: tuple[str, ...] = ()  # the prompts, where they are real text; empty: made up from the arrivals' parts
    temperature: float = 0.0


def shipped_trace(name: str, limit: int | None = None) -> list[Arrival]:
    """An excerpt from the package by its name, or a full trace by its path."""
    if name not in TRACES:
        if not Path(name).exists():
            raise InputError(f"--trace {name}: no such file: give its path, or one of {', '.join(TRACES)}.")
        return read_trace(name, limit)
    with as_file(files("twostroke.bench") / "data" / TRACES[name]) as path:
        return read_trace(path, limit)


# ---- workloads -------------------------------------------------------------------------------------------------------


def rag(rng: random.Random, contents: Contents) -> Iterator[Lengths]:
    while True:
        document = rng.randrange(8)
        question = contents.own(rng.randint(15, 60))
        yield (PromptPart(1000, 200), PromptPart(1001 + document, 900 + 100 * document), question), rng.randint(40, 160)


def code(rng: random.Random, contents: Contents) -> Iterator[Lengths]:
    rows = shipped_trace("azure-code")
    while True:
        row = rng.choice(rows)
        yield (contents.own(row.prompt),), row.output


def chat(rng: random.Random, contents: Contents) -> Iterator[Lengths]:
    system = PromptPart(2000, 60)
    talks: list[list[PromptPart]] = []
    while True:
        if len(talks) < 8 or rng.random() < 0.3:
            talks.append([system])
        talk = rng.choice(talks[-8:])
        talk.append(contents.own(rng.randint(10, 80)))
        answer = rng.randint(60, 250)
        yield tuple(talk), answer
        talk.append(contents.own(answer))  # the next turn contains this answer
        if len(talk) > 12:
            talks.remove(talk)


def batch(rng: random.Random, contents: Contents) -> Iterator[Lengths]:
    while True:
        yield (PromptPart(3000, 50), contents.own(rng.randint(150, 450))), rng.randint(100, 250)


def agent(rng: random.Random, contents: Contents) -> Iterator[Lengths]:
    tools = PromptPart(4000, 1400)
    runs: list[list[PromptPart]] = []
    while True:
        if len(runs) < 4 or rng.random() < 0.15:
            runs.append([tools, contents.own(rng.randint(30, 120))])
        run = rng.choice(runs[-4:])
        yield tuple(run), rng.randint(20, 90)
        run.append(contents.own(rng.randint(60, 300)))  # the call and the tool's result
        if len(run) > 14:
            runs.remove(run)


WORKLOADS: dict[str, Callable[[random.Random, Contents], Iterator[Lengths]]] = {
    "rag": rag,
    "code": code,
    "chat": chat,
    "batch": batch,
    "agent": agent,
}


def equal_lengths(prompt: int, output: int) -> Callable[[random.Random, Contents], Iterator[Lengths]]:
    """Prompts and answers of one length each; prompts share nothing."""

    def rows(rng: random.Random, contents: Contents) -> Iterator[Lengths]:
        while True:
            yield (contents.own(prompt),), output

    return rows


# ---- arrivals --------------------------------------------------------------------------------------------------------


def times(kind: str, count: int, per_second: float, rng: random.Random) -> list[float]:
    if kind == "constant":
        return [number / per_second for number in range(count)]
    if kind == "closed":
        return [0.0] * count
    moments: list[float] = []
    at = 0.0
    if kind == "burst":
        while len(moments) < count:
            at += rng.expovariate(per_second / BURST)
            moments += [at] * BURST
        return moments[:count]
    if kind == "poisson":
        for _ in range(count):
            at += rng.expovariate(per_second)
            moments.append(at)
        return moments
    raise InputError(f"arrivals must be one of {', '.join(ARRIVALS)} (recorded ones come with --trace); got {kind!r}.")


def make_load(
    workload: str,
    kind: str = "poisson",
    count: int = 100,
    per_second: float = 1.0,
    seed: int = 0,
    scale: float = 1.0,
    concurrency: int = 8,
    lengths: tuple[int, int] | None = None,
) -> Load:
    """A named workload, or prompts and answers of one length each."""
    if workload not in (*WORKLOADS, *TEXTS):
        raise InputError(f"workload must be one of {', '.join((*WORKLOADS, *TEXTS))}; got {workload!r}.")
    if per_second <= 0 or count < 1 or scale <= 0 or concurrency < 1:
        raise InputError("rate, requests, scale and concurrency must be above 0.")
    rng = random.Random(seed)
    moments = times(kind, count, per_second, rng)
    closed = kind == "closed"
    limits = (concurrency if closed else None, None if closed else per_second)
    if workload in TEXTS and lengths is None:
        return text_load(workload, moments, rng, scale, *limits)
    made = WORKLOADS[workload] if lengths is None else equal_lengths(*lengths)
    each = islice(made(rng, Contents()), count)
    rows = [Arrival(at, parts, output) for at, (parts, output) in zip(moments, each, strict=True)]
    rows = shorter(rows, scale) if scale != 1.0 else rows
    name = workload if lengths is None else f"{lengths[0]} + {lengths[1]} tokens"
    return Load(name, from_zero(rows), *limits)


def text_load(
    workload: str, moments: list[float], rng: random.Random, scale: float, closed: int | None, per_second: float | None
) -> Load:
    """Prompts of real text; `scale` divides the answers. No two prompts begin alike: each has a number."""
    contents, rows, texts = Contents(), [], []
    for number, (at, text) in enumerate(zip(sorted(moments), TEXTS[workload](rng), strict=False)):
        texts.append(numbered(number, text.prompt))
        prompt = contents.own(max(1, round(len(texts[-1]) / CHARACTERS)))
        rows.append(Arrival(at, (prompt,), max(2, round(text.output / scale))))
    return Load(workload, from_zero(rows), closed, per_second, tuple(texts), TEMPERATURE[workload])


def numbered(number: int, text: str) -> str:
    return f"Text {number}.\n{text}"


def trace_load(
    name: str, count: int | None = None, per_second: float | None = None, scale: float = 1.0, longest: int | None = None
) -> Load:
    """A recorded trace, at its own rate or at another; prompts above `longest` are cut to it."""
    rows = shipped_trace(name, count)
    if per_second is not None:
        rows = at_rate(rows, per_second)
    rows = shorter(rows, scale) if scale != 1.0 else rows
    if longest is not None:
        rows = [cut(row, longest) for row in rows]
    return Load(name, rows, None, per_second)


def choose_load(
    trace: str | None = None,
    workload: str = "chat",
    kind: str = "poisson",
    count: int | None = 100,
    per_second: float | None = None,
    seed: int = 0,
    scale: float = 1.0,
    concurrency: int = 8,
    longest: int | None = None,
    lengths: tuple[int, int] | None = None,
) -> Load:
    """A trace where one is given (without `count` all of it), otherwise a workload."""
    if trace is not None:
        return trace_load(trace, count, per_second, scale, longest)
    return make_load(workload, kind, count or 100, per_second or 1.0, seed, scale, concurrency, lengths)


def renewed(load: Load, times: int = 1) -> Load:
    """The same load with other text, which no cache has; prompts share the same parts as before."""
    rows = [
        replace(row, parts=tuple(PromptPart(part.content + times * OTHER, part.length) for part in row.parts))
        for row in load.arrivals
    ]
    texts = tuple(numbered(times, text) if times else text for text in load.texts)
    return replace(load, arrivals=rows, texts=texts)


def cut(row: Arrival, longest: int) -> Arrival:
    """The request with its prompt cut so that prompt and answer have `longest` tokens at most."""
    output = min(row.output, max(1, longest // 2))
    left, parts = longest - output, []
    for part in row.parts:
        parts.append(PromptPart(part.content, min(part.length, left)))
        left -= parts[-1].length
        if left <= 0:
            break
    return replace(row, parts=tuple(parts), output=output)
