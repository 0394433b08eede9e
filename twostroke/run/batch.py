"""Turns a plan into the tensors of one step: rows laid flat, no padding anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

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
    numbers = np.array([(work.start, work.count, work.request.row) for work in plan.works], np.int64)
    first, counts, rows = numbers.T
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    if starts[-1] == len(counts):  # one row each, as in every step of plain decoding
        owner, positions = np.arange(len(counts)), first.copy()
    else:
        owner = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(starts[-1]) - starts[owner] + first[owner]
    contexts = (first + counts).astype(np.int32)
    tokens: list[int] = []
    for request, start, count in plan.works:
        if count == 1:
            tokens.append(request.tokens[start])
        else:
            tokens += request.tokens[start : start + count]
    columns = -(-int(contexts.max()) // BLOCK)
    blocks, offsets = positions // BLOCK, positions % BLOCK
    groups = []
    for table in tables[:, rows, :columns]:
        slots = table[owner, blocks].astype(np.int64) * BLOCK + offsets
        groups.append(GroupBlocks(torch.from_numpy(slots), torch.from_numpy(table)))
    samplers, prompts, logit_rows = _wanted_rows(plan, starts)
    batch = Batch(
        tokens=torch.from_numpy(np.array(tokens, np.int64)),
        positions=torch.from_numpy(positions),
        starts=torch.from_numpy(starts),
        contexts=torch.from_numpy(contexts),
        groups=tuple(groups),
        logit_rows=torch.from_numpy(np.array(logit_rows, np.int64)),
    )
    return StepRows(batch, samplers, prompts)


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
