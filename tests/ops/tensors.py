"""The native backend for tests that hold tensors: the same memory as NumPy arrays on the way in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twostroke.ops.cpu.backend import NativeCpuOps, PackedWeight
from twostroke.ops.formats import Stored
from twostroke.ops.interface import Attention, Batch, Gate, GroupBlocks, KVLayer, Norm, RopeTable


class TensorOps:
    """NativeCpuOps, tensors in and tensors out."""

    def __init__(self, ops: NativeCpuOps):
        self.ops, self.isa = ops, ops.isa

    def pack(self, parts: Sequence[Stored], bias: Tensor | None = None) -> PackedWeight:
        return self.ops.pack(parts, None if bias is None else bias.numpy())

    def weight_bytes(self, weight: PackedWeight) -> int:
        return self.ops.weight_bytes(weight)

    def embed(self, table: PackedWeight, tokens: Tensor, scale: float) -> Tensor:
        return torch.from_numpy(self.ops.embed(table, tokens.numpy(), scale))

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return torch.from_numpy(self.ops.norm(x.numpy(), norm_array(norm)))

    def linear(
        self, x: Tensor, weight: PackedWeight, *, before: Norm | Gate | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        before = norm_array(before) if isinstance(before, Norm) else before
        if add_to is None:
            return torch.from_numpy(self.ops.linear(x.numpy(), weight, before=before))
        onto = add_to.numpy()
        assert self.ops.linear(x.numpy(), weight, before=before, add_to=onto) is onto
        return add_to

    def attend(self, qkv: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int) -> Tensor:
        out = self.ops.attend(qkv.numpy(), attention_arrays(attention), kv_arrays(kv), batch_arrays(batch), group)
        return torch.from_numpy(out)

    def argmax(self, logits: Tensor) -> Tensor:
        return torch.from_numpy(self.ops.argmax(logits.numpy()))


@lru_cache(maxsize=64)
def norm_array(norm: Norm) -> Norm:
    return replace(norm, weight=norm.weight.numpy())


@lru_cache(maxsize=64)
def attention_arrays(attention: Attention) -> Attention:
    """The same for the same attention: a backend may remember what it knows of one."""
    rope, query, key = attention.rope, attention.query_norm, attention.key_norm
    return replace(
        attention,
        rope=None if rope is None else RopeTable(rope.cos.numpy(), rope.sin.numpy()),
        query_norm=None if query is None else norm_array(query),
        key_norm=None if key is None else norm_array(key),
    )


def kv_arrays(kv: KVLayer) -> KVLayer:
    return KVLayer(kv.format, *(codes(part) for part in (kv.keys, kv.values, kv.key_scales, kv.value_scales)))


def batch_arrays(batch: Batch) -> Batch:
    groups = tuple(GroupBlocks(group.slots.numpy(), group.tables.numpy()) for group in batch.groups)
    rows: Any = (batch.tokens, batch.positions, batch.starts, batch.contexts)
    return Batch(*(part.numpy() for part in rows), groups, batch.logit_rows.numpy())


def codes(part: Tensor | None) -> np.ndarray | None:
    """The memory of a tensor; what NumPy has no name for is its bits."""
    if part is None:
        return None
    return part.view(torch.uint16).numpy() if part.dtype == torch.bfloat16 else part.numpy()
