"""Turns a plan into the arrays of one step: rows laid flat, no padding anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from twostroke.ops.interface import BLOCK, Batch, GroupBlocks
from twostroke.types import Plan


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one work whose logits tell how likely the prompt itself was."""

    work: int  # index in the plan
    first: int  # index of the first such row among the batch's logit rows
    position: int  # position of the first token predicted
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    batch: Batch
    samplers: tuple[int, ...]  # indices of the works that sample; their logit rows come first, in this order
    prompts: tuple[PromptRows, ...]


def build_step(plan: Plan, tables: np.ndarray) -> StepRows:
    """`tables`: (groups, rows, columns) int32, the block tables of all running requests."""
    if all(
        count == 1 and len(request.tokens) == start + 1 > request.prompt_length for request, start, count in plan.works
    ):
        return _decode_step(plan, tables)
    numbers = np.array([(work.start, work.count, work.request.row) for work in plan.works], np.int64)
    first, counts, rows = numbers.T
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    owner = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(starts[-1]) - starts[owner] + first[owner]
    tokens = [token for request, start, count in plan.works for token in request.tokens[start : start + count]]
    samplers, prompts, logit_rows = _wanted_rows(plan, starts)
    batch = Batch(
        tokens=np.array(tokens, np.int64),
        positions=positions,
        starts=starts,
        contexts=(first + counts).astype(np.int32),
        groups=_group_blocks(tables, rows, owner, positions),
        logit_rows=np.array(logit_rows, np.int64),
    )
    return StepRows(batch, samplers, prompts)


def _decode_step(plan: Plan, tables: np.ndarray) -> StepRows:
    """The same where every work is the newest token of a stream: one row each, and every row samples."""
    places = [work.start for work in plan.works]
    newest = [request.tokens[start] for request, start, _ in plan.works]
    tokens, positions, rows = np.array((newest, places, [work.request.row for work in plan.works]), np.int64)
    samplers, starts, logit_rows = _one_row_each(len(places))
    columns = max(places) // BLOCK + 1
    groups = []
    for every in tables:  # a few numbers: Python is done with them before NumPy has begun
        table = every[rows, :columns]
        slots = [table.item(row, place // BLOCK) * BLOCK + place % BLOCK for row, place in enumerate(places)]
        groups.append(GroupBlocks(np.array(slots, np.int64), table))
    batch = Batch(
        tokens=tokens,
        positions=positions,
        starts=starts,
        contexts=np.array([place + 1 for place in places], np.int32),
        groups=tuple(groups),
        logit_rows=logit_rows,
    )
    return StepRows(batch, samplers, ())


@lru_cache(maxsize=1024)
def _one_row_each(count: int) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Samplers, starts and logit rows of such a step."""
    return tuple(range(count)), np.arange(count + 1, dtype=np.int32), np.arange(count)


def _group_blocks(
    tables: np.ndarray, rows: np.ndarray, owner: np.ndarray, positions: np.ndarray
) -> tuple[GroupBlocks, ...]:
    """owner: the work each position belongs to; rows: each work's row in the tables."""
    columns = int(positions.max()) // BLOCK + 1
    blocks, offsets = np.divmod(positions, BLOCK)
    groups = []
    for every in tables:
        table = every[rows, :columns]
        groups.append(GroupBlocks(table[owner, blocks] * np.int64(BLOCK) + offsets, table))
    return tuple(groups)


def _wanted_rows(plan: Plan, starts: np.ndarray) -> tuple[tuple[int, ...], tuple[PromptRows, ...], list[int]]:
    samplers = tuple(index for index, work in enumerate(plan.works) if work.samples)
    logit_rows = [int(starts[index + 1]) - 1 for index in samplers]
    prompts = []
    for index, (request, start, count) in enumerate(plan.works):
        if request.params.prompt_logprobs is None or request.output_length or request.sample:
            continue
        known = min(count, request.prompt_length - 1 - start)  # the newest token predicts no prompt token
        if known > 0:
            prompts.append(PromptRows(index, len(logit_rows), start + 1, known))
            logit_rows += range(int(starts[index]), int(starts[index]) + known)
    return samplers, tuple(prompts), logit_rows
