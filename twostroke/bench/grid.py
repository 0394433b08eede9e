"""Steps of every kind, measured on an engine: streams × context, prompt chunks × start, and mixtures of both.

Contexts are not computed, they are put into the cache (as K and V that travelled from another worker are), so that a
cell costs little more than its steps. The cells are measured in several rounds, each in an order of its own: a machine
that slows down for a while slows a part of every cell's repeats instead of some of the cells. Repeats during which
other programs used the processor count only where there are no others. What a step takes is the median of its repeats.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from twostroke.bench.others import Others
from twostroke.cost.fleet import deliver
from twostroke.engine.core import Core
from twostroke.metrics.steplog import KEPT, Step, StepLog
from twostroke.ops.interface import BLOCK
from twostroke.sampling import SamplingParams
from twostroke.types import Request, RequestState

DISTURBED = 0.15  # share of a core that others used
TICK = 0.02  # seconds by which the system's account of it may be wrong
STREAM_STEPS = 4  # of each cell in a round, the first of which admits and does not count
FEWEST_ROUNDS = 2
ENOUGH = 2  # repeats that had the machine to themselves
UNBOUNDED = 1e6  # seconds: no stream's gap makes a chunk smaller here
FIRST_ID = 1 << 40
PARAMS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
Progress = Callable[[str], None]


class Cell(NamedTuple):
    """Streams that are `context` tokens deep, and a stretch of a prompt beside them; either may be missing."""

    streams: int
    context: int
    start: int = 0
    count: int = 0  # type: ignore[assignment]  # hides tuple.count


class Sizes(NamedTuple):
    """What a grid is made of; starts and contexts in whole blocks."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    starts: tuple[int, ...]
    streams: tuple[tuple[int, int], ...]  # (streams, context) that some chunks are measured beside
    mixed: tuple[tuple[int, int], ...]  # those chunks, as (start, count)
    tokens: int  # of context of all streams in one cell, at most
    work: int  # start × count of one chunk, at most: it costs the square of it


CALIBRATION = {
    "cpu": Sizes(
        (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64), (16, 128, 512, 1536),
        (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 480), (0, 512, 1536),
        ((2, 128), (8, 512)), ((0, 16), (512, 16), (0, 64), (512, 192)), 16_384, 400_000,
    ),
    "cuda": Sizes(
        (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256), (16, 512, 2048, 8192),
        (16, 64, 128, 256, 512, 1024, 2048, 4096, 7680), (0, 4096, 16_384),
        ((4, 2048), (64, 512)), ((0, 64), (4096, 64), (0, 512), (4096, 2048)), 200_000, 1 << 26,
    ),
}  # fmt: skip
# Shapes that no calibration has seen: between its own.
HELD_OUT = {
    "cpu": Sizes(
        (1, 2, 3, 4, 7, 10, 14, 20, 28, 40), (48, 256, 1024),
        (12, 20, 40, 80, 112, 160, 320, 448), (0, 256, 1024),
        ((1, 256), (5, 256)), ((0, 20), (1024, 20), (0, 112), (1024, 112)), 16_384, 400_000,
    ),
    "cuda": Sizes(
        (1, 2, 3, 6, 12, 20, 40, 80, 112, 160, 224), (128, 1024, 4096, 16_384),
        (48, 192, 384, 768, 1536, 3072, 6144), (0, 1024, 8192),
        ((2, 1024), (32, 1024)), ((0, 192), (8192, 192), (0, 768), (8192, 768)), 200_000, 1 << 26,
    ),
}  # fmt: skip


def cells(sizes: Sizes, core: Core) -> list[Cell]:
    """Those that the engine can take: requests and tokens in a step, tokens of a request, blocks in its pool."""
    limits, tables = core.scheduler.limits, core.scheduler.tables
    max_requests, max_tokens = limits.max_requests, limits.max_batch_tokens
    room = BLOCK * tables.array.shape[2] - STREAM_STEPS - 2
    most = min(sizes.tokens, BLOCK * tables.pool.total // (4 * len(tables.windows)))
    found = [
        Cell(batch, context)
        for batch, context in product(sizes.batches, sizes.contexts)
        if batch <= min(max_requests, max_tokens) and context <= room and batch * context <= most
    ]
    alone = [Cell(0, 0, start, count) for start, count in product(sizes.starts, sizes.chunks)]
    beside = [Cell(*streams, *chunk) for streams, chunk in product(sizes.streams, sizes.mixed)]
    for cell in (*alone, *beside):
        fits = cell.streams < max_requests and cell.streams + cell.count <= max_tokens
        if fits and max(cell.context, cell.start + cell.count) <= room and cell.start * cell.count <= sizes.work:
            found.append(cell)
    return found


class Rig:
    """An engine's core, asked for steps of given shapes."""

    def __init__(self, core: Core, vocabulary: int):
        self.core = core
        self.vocabulary = vocabulary
        self.made = 0
        self.texts: list[list[int]] = []  # one for each stream: contexts are their beginnings

    def measure(self, cell: Cell) -> None:
        streams = [self._ask(self._text(n, cell.context + 1), cell.context, STREAM_STEPS + 2)
                   for n in range(cell.streams)]  # fmt: skip
        if streams:
            for _ in range(STREAM_STEPS):
                self.core.step()
        if cell.count:
            tail = random.Random(self.made).choices(range(self.vocabulary), k=cell.count)
            request = self._ask(self._text(0, cell.start) + tail, cell.start, 1)
            while request.finish_reason is None:
                self.core.step()
        for request in streams:
            self.core.abort(request.id)
        while not self.core.idle:
            self.core.step()

    def _text(self, number: int, length: int) -> list[int]:
        while len(self.texts) <= number:
            self.texts.append([])
        text = self.texts[number]
        if len(text) < length:
            rng = random.Random(number)
            text[:] = rng.choices(range(self.vocabulary), k=2 * length)
        return text[:length]

    def _ask(self, tokens: list[int], known: int, answer: int) -> RequestState:
        """A request whose first `known` tokens are in the cache."""
        request = Request(FIRST_ID + self.made, tuple(tokens), PARAMS, 0, self.core.clock(), len(tokens) + answer)
        self.made += 1
        for block in deliver(self.core.scheduler.tables, RequestState(request), known // BLOCK):
            self._blank(block)
        return self.core.submit(request)

    def _blank(self, block: int) -> None:
        """Memory that was never written is read faster than any other, and may hold what is no number."""
        storage: Any = self.core.runner.kv  # type: ignore[attr-defined]
        storage.data[block] = 0


def run_grid(
    core: Core,
    vocabulary: int,
    wanted: Sequence[Cell],
    seconds: float,
    rounds: int = 1000,
    progress: Progress | None = None,
) -> list[Step]:
    """Every step of up to so many rounds, as long as there is time for one more. An engine that captures and compiles
    what it meets rehearses them first."""
    with bench_settings(core) as log:
        rig, rng, others = Rig(core, vocabulary), random.Random(0), Others()
        quiet: list[Step] = []
        disturbed: list[Step] = []
        rig.measure(wanted[0])
        log.clear()
        began = time.monotonic()
        for number in range(1 if core.runner.depth == 1 else 0, rounds + 1):
            started = time.monotonic()
            for done, cell in enumerate(rng.sample(wanted, len(wanted))):
                others.mark()
                rig.measure(cell)
                kept = disturbed if others.share > DISTURBED and others.seconds > TICK else quiet
                if progress is not None:
                    progress(f"round {number} of steps, {done + 1} of {len(wanted)}")
                if number:
                    steps = settled(list(log)) if core.runner.depth > 1 else list(log)
                    kept += [step for step in steps if counts(step, cell)]
                log.clear()
            now = time.monotonic()
            if number >= FEWEST_ROUNDS and now - began + (now - started) > seconds:
                break
    return best_of(quiet, disturbed)


def best_of(quiet: list[Step], disturbed: list[Step]) -> list[Step]:
    """Undisturbed repeats of every shape; of those that have too few, all."""
    found = Counter(shape(step) for step in quiet)
    return quiet + [step for step in disturbed if found[shape(step)] < ENOUGH]


@contextmanager
def bench_settings(core: Core) -> Iterator[StepLog]:
    """A log of its own, chunks as asked for, contexts that stay in the cache; all as it was afterwards."""
    scheduler, pool = core.scheduler, core.scheduler.tables.pool
    before = core.steplog, scheduler.pace, scheduler.limits, pool.keep_cached
    core.steplog, scheduler.pace = StepLog(KEPT), scheduler.pace.anew(UNBOUNDED)
    scheduler.limits, pool.keep_cached = replace(scheduler.limits, static=False, chunked=True), True
    try:
        yield core.steplog
    finally:
        core.steplog, scheduler.pace, scheduler.limits, pool.keep_cached = before
        pool.clear()


def settled(steps: list[Step]) -> list[Step]:
    """With two steps in flight, the time that a chunk's launch took is found in the step that was collected after it:
    the last of the streams alone. What that one took beyond those before it is given to the chunk's."""
    for place in range(2, len(steps)):
        before = [step.seconds for step in steps[1 : place - 1] if not step.chunks]
        last, step = steps[place - 1], steps[place]
        if step.chunks and step.streams and before and not last.chunks:
            moved = max(0.0, last.seconds - median(before))
            steps[place - 1] = last._replace(seconds=last.seconds - moved)
            steps[place] = step._replace(seconds=step.seconds + moved)
    return steps


def counts(step: Step, cell: Cell) -> bool:
    """Not the step that admits the streams of a cell (their context is whole blocks then), nor one that computes what
    should have been found in the cache."""
    if step.chunks:
        return [(piece.start, piece.count) for piece in step.chunks] == [(cell.start, cell.count)]
    return len(step.streams) == cell.streams and all(piece.start % BLOCK for piece in step.streams)


def shape(step: Step) -> tuple[Any, ...]:
    """What equal steps have in common: stretches of prompts, and streams by the blocks they hold."""
    streams = sorted(piece.start // BLOCK for piece in step.streams)
    return (*sorted((piece.start, piece.count) for piece in step.chunks), None, *streams, step.sampled)


def typical(steps: Sequence[Step]) -> list[Step]:
    """One step for each shape, which takes the median of all of that shape."""
    return [alike[0]._replace(seconds=median(step.seconds for step in alike)) for alike in by_shape(steps)]


def spread(steps: Sequence[Step]) -> list[float]:
    """How far each step is from the typical one of its shape, relative to it: what no model can predict."""
    found = []
    for alike in by_shape(steps):
        middle = median(step.seconds for step in alike)
        found += [abs(step.seconds / middle - 1) for step in alike]
    return found


def by_shape(steps: Sequence[Step]) -> list[list[Step]]:
    groups: dict[tuple[Any, ...], list[Step]] = {}
    for step in steps:
        groups.setdefault(shape(step), []).append(step)
    return list(groups.values())
