"""Steps of every kind, measured on an engine: streams × context, prompt chunks × start, and mixtures of both.

Contexts are not computed but put into the cache (like K and V transferred from another worker), so that a cell costs
little more than its steps. Cells are measured in several rounds, each in another order, so that a slow period of the
machine affects some repeats of every cell, not all repeats of some cells. Repeats during which other programs used the
processor count only where there are too few others. The time of a step is the median of its repeats.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from twostroke.bench.processor import OtherPrograms
from twostroke.cost.simulation.fleet import deliver
from twostroke.engine.core import Core
from twostroke.metrics.steplog import KEPT, Step, StepLog
from twostroke.ops.interface import BLOCK
from twostroke.record import replace
from twostroke.sampling import SamplingParams
from twostroke.types import Request, RequestState

DISTURBED = 0.15  # share of a core from which on other programs disturb a repeat
TICK = 0.02  # seconds; resolution of the system's processor times
STREAM_STEPS = 4  # of each cell in a round; the first admits the streams and does not count
FEWEST_ROUNDS = 2
ENOUGH = 2  # undisturbed repeats
UNBOUNDED = 1e6  # seconds of max_gap: chunks are not cut
FIRST_ID = 1 << 40
PARAMS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
OnCell = Callable[[str], None]


class Cell(NamedTuple):
    """Streams with `context` tokens each, and a prompt chunk beside them; either may be missing."""

    streams: int
    context: int
    start: int = 0
    count: int = 0  # type: ignore[assignment]  # hides tuple.count


class Sizes(NamedTuple):
    """The cells of a grid; starts and contexts are whole blocks."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    starts: tuple[int, ...]
    streams: tuple[tuple[int, int], ...]  # of mixed cells: (streams, context)
    mixed: tuple[tuple[int, int], ...]  # of mixed cells: chunks as (start, count)
    tokens: int  # most tokens of context in one cell
    work: int  # largest start × count of a chunk


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


def cells(sizes: Sizes, core: Core) -> list[Cell]:
    """The cells within the engine's limits: requests and tokens of a step, tokens of a request, blocks of the pool."""
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


class CellRunner:
    """Makes an engine run the steps of a cell."""

    def __init__(self, core: Core, vocabulary: int):
        self.core = core
        self.vocabulary = vocabulary
        self.made = 0
        self.texts: list[list[int]] = []  # one for each stream; its contexts are prefixes of it

    def measure(self, cell: Cell) -> None:
        streams = [self._submit(self._text(n, cell.context + 1), cell.context, STREAM_STEPS + 2)
                   for n in range(cell.streams)]  # fmt: skip
        if streams:
            for _ in range(STREAM_STEPS):
                self.core.step()
        if cell.count:
            tail = random.Random(self.made).choices(range(self.vocabulary), k=cell.count)
            request = self._submit(self._text(0, cell.start) + tail, cell.start, 1)
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

    def _submit(self, tokens: list[int], known: int, answer: int) -> RequestState:
        """Submit a request whose first `known` tokens are in the cache."""
        request = Request(FIRST_ID + self.made, tuple(tokens), PARAMS, 0, self.core.clock(), len(tokens) + answer)
        self.made += 1
        for block in deliver(self.core.scheduler.tables, RequestState(request), known // BLOCK):
            self._clear(block)
        return self.core.submit(request)

    def _clear(self, block: int) -> None:
        """Write zeros: memory that was never written is read faster, and may hold NaN."""
        storage: Any = self.core.runner.kv  # type: ignore[attr-defined]
        storage.data[block] = 0


def run_grid(
    core: Core,
    vocabulary: int,
    wanted: Sequence[Cell],
    seconds: float,
    rounds: int = 1000,
    progress: OnCell | None = None,
) -> list[Step]:
    """The steps of up to so many rounds, as long as there is time for one more. On a GPU a first round, in which shapes
    are compiled and captured, does not count."""
    with bench_settings(core) as log:
        runner, rng, others = CellRunner(core, vocabulary), random.Random(0), OtherPrograms()
        quiet: list[Step] = []
        disturbed: list[Step] = []
        runner.measure(wanted[0])
        log.clear()
        began = time.monotonic()
        for number in range(1 if core.runner.depth == 1 else 0, rounds + 1):
            started = time.monotonic()
            for done, cell in enumerate(rng.sample(wanted, len(wanted))):
                others.mark()
                runner.measure(cell)
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
    return undisturbed(quiet, disturbed)


def undisturbed(quiet: list[Step], disturbed: list[Step]) -> list[Step]:
    """The undisturbed repeats of every shape; all repeats of a shape with too few."""
    found = Counter(shape(step) for step in quiet)
    return quiet + [step for step in disturbed if found[shape(step)] < ENOUGH]


@contextmanager
def bench_settings(core: Core) -> Iterator[StepLog]:
    """An own step log, chunks that are not cut, contexts that stay cached; the previous settings are restored."""
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
    """With two steps in flight, the launch of a chunk delays the collection of the step before it, which has streams
    only. What that step took beyond the ones before it is moved to the chunk's step."""
    for place in range(2, len(steps)):
        before = [step.seconds for step in steps[1 : place - 1] if not step.chunks]
        last, step = steps[place - 1], steps[place]
        if step.chunks and step.streams and before and not last.chunks:
            moved = max(0.0, last.seconds - median(before))
            steps[place - 1] = last._replace(seconds=last.seconds - moved)
            steps[place] = step._replace(seconds=step.seconds + moved)
    return steps


def counts(step: Step, cell: Cell) -> bool:
    """Whether a step counts: not the step that admits the streams of a cell (their context is whole blocks then), nor
    one that computes what should have been found in the cache."""
    if step.chunks:
        return [(work.start, work.count) for work in step.chunks] == [(cell.start, cell.count)]
    return len(step.streams) == cell.streams and all(work.start % BLOCK for work in step.streams)


def shape(step: Step) -> tuple[Any, ...]:
    """Equal for steps that count as repeats: the same chunks, and streams with the same numbers of blocks."""
    streams = sorted(work.start // BLOCK for work in step.streams)
    return (*sorted((work.start, work.count) for work in step.chunks), None, *streams, step.sampled)


def typical(steps: Sequence[Step]) -> list[Step]:
    """One step for each shape, with the median time of its repeats."""
    return [alike[0]._replace(seconds=median(step.seconds for step in alike)) for alike in by_shape(steps)]


def by_shape(steps: Sequence[Step]) -> list[list[Step]]:
    groups: dict[tuple[Any, ...], list[Step]] = {}
    for step in steps:
        groups.setdefault(shape(step), []).append(step)
    return list(groups.values())
