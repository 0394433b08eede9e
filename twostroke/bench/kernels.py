"""The backend's attention kernel against plain torch, with the same rows and the same cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from twostroke.kv.storage import KVStorage
from twostroke.model.layers import Grouped
from twostroke.ops.arrays import batch_of_tensors
from twostroke.ops.interface import BLOCK, Array, Attention, Batch, GroupBlocks, KVLayer, Norm, Ops, RopeTable
from twostroke.ops.reference.backend import ReferenceOps, rotated, stored
from twostroke.ops.reference.kv_codec import write_kv
from twostroke.record import replace
from twostroke.run.runner import ModelRunner
from twostroke.run.torch_runner import TorchRunner

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
    if not isinstance(runner, ModelRunner) or isinstance(runner, TorchRunner):
        return None
    mixer = runner.model.layers[0].mixer
    if not isinstance(mixer, Grouped):
        return None
    layer = mixer.attention
    context = min(CONTEXT, llm.settings.max_model_len)
    found = []
    for ops in (PlainTorchOps(), runner.ops):
        chunk, streams = (
            measured(ops, llm, layer, context, *shape) for shape in ((1, min(CHUNK, context)), (STREAMS, 1))
        )
        found.append({"ttft": len(llm.arch.layers) * chunk, "tpot": len(llm.arch.layers) * streams})
    return found[0], found[1]


class PlainTorchOps(ReferenceOps):
    """Attention in plain torch: all scores of a request at once, in float32."""

    def attend(self, qkv: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int) -> Tensor:
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
        q, k, v = qkv.view(-1, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)
        if attention.rope is not None:
            q, k = (rotated(x, attention.rope, batch.positions) for x in (q, k))
        write_kv(kv, batch.groups[group].slots, k, v)
        out = torch.empty_like(q)
        for request, context in enumerate(batch.contexts.tolist()):
            rows = slice(int(batch.starts[request]), int(batch.starts[request + 1]))
            keys, values = stored(kv, batch.groups[group].tables[request], torch.arange(context))  # (n, kv_heads, D)
            keys, values = (
                x.float().repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for x in (keys, values)
            )
            scores = q[rows].transpose(0, 1) @ keys.transpose(1, 2) * attention.scale  # (heads, rows, n)
            hidden = batch.positions[rows, None] < torch.arange(context)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            out[rows] = (weights @ values).transpose(0, 1)
        return out.flatten(1)


def measured(ops: Ops, llm: LLM, attention: Attention, context: int, requests: int, count: int) -> float:
    """The fastest of several runs: `count` new tokens of each request, which has `context` tokens with them."""
    columns = -(-context // BLOCK)
    groups = len(llm.settings.layout.groups)
    blocks = groups * requests * columns
    storage = KVStorage(llm.settings.layout, blocks, llm.settings.kv_dtype, ops.device)
    storage.data[:] = 0
    kv, group = storage.layer(0)
    batch = make_batch(requests, count, context, groups)
    width = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
    rows: Array = np.random.default_rng(0).standard_normal((requests * count, width), np.float32)
    if ops.device is not None:
        attention, batch, rows = attention_of_tensors(attention), batch_of_tensors(batch), torch.from_numpy(rows)
    taken = []
    with torch.inference_mode():
        for _ in range(TIMES):
            began = time.perf_counter()
            ops.attend(rows, attention, kv, batch, group)
            taken.append(time.perf_counter() - began)
    return min(taken)


def attention_of_tensors(attention: Attention) -> Attention:
    def norm(given: Norm | None) -> Norm | None:
        return None if given is None else Norm(torch.from_numpy(given.weight), given.eps)

    rope = attention.rope
    if rope is not None:
        rope = RopeTable(torch.from_numpy(rope.cos), torch.from_numpy(rope.sin))
    return replace(attention, rope=rope, query_norm=norm(attention.query_norm), key_norm=norm(attention.key_norm))


def make_batch(requests: int, count: int, context: int, groups: int) -> Batch:
    columns = -(-context // BLOCK)
    positions = np.tile(np.arange(context - count, context), requests)
    owner = np.repeat(np.arange(requests), count)
    blocks = []
    for group in range(groups):
        tables = np.arange(requests * columns, dtype=np.int32).reshape(requests, columns)
        tables += group * requests * columns
        slots = tables[owner, positions // BLOCK] * np.int64(BLOCK) + positions % BLOCK
        blocks.append(GroupBlocks(slots, tables))
    return Batch(
        tokens=np.zeros(requests * count, np.int64),
        positions=positions,
        starts=np.arange(0, requests * count + 1, count, dtype=np.int32),
        contexts=np.full(requests, context, np.int32),
        groups=tuple(blocks),
        logit_rows=np.arange(requests),
    )
