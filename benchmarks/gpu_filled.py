"""A decode step of many streams with long contexts, without reading their prompts first.

The streams' blocks are taken anywhere in an engine's cache, each for one stream: a step reads what it would read if the
prompts had been computed, and its time does not depend on the values there.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.gpu_rig import Rig
from twostroke.ops.cuda.cuts import DeviceBatch
from twostroke.ops.cuda.kernels.decode import split_count
from twostroke.ops.interface import BLOCK, GroupBlocks

REPLAYS = 20


def filled_batch(rig: Rig, count: int, context: int) -> DeviceBatch:
    """`count` streams that hold `context` tokens each once the step has written its own."""
    device, columns = rig.model.ops.device, -(-context // BLOCK)
    groups = len(rig.runner.kv.layout.groups)
    blocks = rig.runner.kv.data.shape[0]
    if count * columns > blocks:
        raise ValueError(f"{count} streams of {context} tokens need {count * columns} blocks; the cache has {blocks}")
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(count))[: count * columns]
    tables = order.view(count, columns).to(device, torch.int32)
    positions = torch.full((count,), context - 1, dtype=torch.int64, device=device)
    slots = tables[:, (context - 1) // BLOCK].long() * BLOCK + (context - 1) % BLOCK
    lengths = np.full(count, context)
    return DeviceBatch(
        torch.arange(count, device=device), positions, torch.arange(count + 1, dtype=torch.int32, device=device),
        torch.full((count,), context, dtype=torch.int32, device=device), (GroupBlocks(slots, tables),) * groups,
        torch.arange(count, device=device), np.ones(count, np.int64), lengths, streams=True,
        splits=split_count(context),
    )  # fmt: skip


@torch.inference_mode()
def filled_step(rig: Rig, count: int, context: int) -> float:
    """Seconds of the step on the device, captured and replayed as the engine does."""
    batch, stream, graph = filled_batch(rig, count, context), rig.runner.stream, torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):
            rig.model.logits(rig.model.forward(batch, rig.runner.kv))
        with torch.cuda.graph(graph, stream=stream):
            rig.model.logits(rig.model.forward(batch, rig.runner.kv))
        graph.replay()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(REPLAYS):
            graph.replay()
        ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / REPLAYS / 1e3
