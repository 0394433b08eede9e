"""What the attention kernel buys: the backend's own against plain torch, the same rows and the same cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from twostroke.kv.storage import KVStorage
from twostroke.ops.cpu import TorchCpuOps
from twostroke.ops.interface import BLOCK, Attention, Batch, GroupBlocks, Ops
from twostroke.run.runner import ModelRunner

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM

CONTEXT = 1024
CHUNK = 512  # tokens of a prompt in one step
STREAMS = 8
TIMES = 7


def attention_seconds(llm: LLM) -> tuple[dict[str, float], dict[str, float]] | None:
    """Seconds of all layers' attention, plain and with the backend's kernel: the end of a prompt (as TTFT) and a step
    of streams (as TPOT). None where the backend's kernel is plain torch's, or on a device that has only its own."""
    runner = llm.engine.core.runner
    if not isinstance(runner, ModelRunner) or isinstance(runner.ops, TorchCpuOps):
        return None
    layer = runner.model.layers[0].attention
    context = min(CONTEXT, llm.settings.max_model_len)
    found = []
    for ops in (TorchCpuOps(), runner.ops):
        chunk, streams = (
            measured(ops, llm, layer, context, *shape) for shape in ((1, min(CHUNK, context)), (STREAMS, 1))
        )
        found.append({"ttft": len(llm.arch.layers) * chunk, "tpot": len(llm.arch.layers) * streams})
    return found[0], found[1]


def measured(ops: Ops, llm: LLM, attention: Attention, context: int, requests: int, count: int) -> float:
    """The fastest of several: `count` new tokens of each request, the last of them `context` deep."""
    columns = -(-context // BLOCK)
    groups = len(llm.settings.layout.groups)
    storage = KVStorage(
        llm.arch, llm.settings.layout, groups * requests * columns, llm.settings.kv_dtype, torch.device("cpu")
    )
    storage.data.zero_()
    if storage.scales is not None:
        storage.scales.zero_()
    kv, group = storage.layer(0)
    batch = make_batch(requests, count, context, groups)
    width = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
    rows = torch.randn(requests * count, width, generator=torch.Generator().manual_seed(0))
    taken = []
    with torch.inference_mode():
        for _ in range(TIMES):
            began = time.perf_counter()
            ops.attend(rows.clone(), attention, kv, batch, group)
            taken.append(time.perf_counter() - began)
    return min(taken)


def make_batch(requests: int, count: int, context: int, groups: int) -> Batch:
    columns = -(-context // BLOCK)
    positions = torch.arange(context - count, context).repeat(requests)
    owner = torch.repeat_interleave(torch.arange(requests), count)
    blocks = []
    for group in range(groups):
        tables = (
            torch.arange(requests * columns, dtype=torch.int32).view(requests, columns) + group * requests * columns
        )
        slots = tables[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
        blocks.append(GroupBlocks(slots, tables))
    return Batch(
        tokens=torch.zeros(requests * count, dtype=torch.int64),
        positions=positions,
        starts=torch.arange(0, requests * count + 1, count, dtype=torch.int32),
        contexts=torch.full((requests,), context, dtype=torch.int32),
        groups=tuple(blocks),
        logit_rows=torch.arange(requests),
    )
