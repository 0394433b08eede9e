"""The native backend for tests that hold tensors: the same memory as NumPy arrays on the way in and out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twostroke.ops.cpu.backend import NativeCpuOps, PackedWeight
from twostroke.ops.formats import Stored
from twostroke.ops.interface import BLOCK, Attention, Batch, Gate, GroupBlocks, KVLayer, Norm, RopeTable
from twostroke.record import replace


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
        arrays = kv_arrays(kv)
        out = self.ops.attend(qkv.numpy(), attention_arrays(attention), arrays, batch_arrays(batch), group)
        if kv.format == "int8":
            kv.keys.copy_(torch.from_numpy(key_rows(arrays.keys)))
            kv.values.copy_(torch.from_numpy(value_rows(arrays.values)))
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
        key_center=None if attention.key_center is None else attention.key_center.numpy(),
    )


def kv_arrays(kv: KVLayer) -> KVLayer:
    """The same memory, but for int8 codes: a copy in the order of the native backend (kernels/kv.h)."""
    keys, values, *scales = (codes(part) for part in (kv.keys, kv.values, kv.key_scales, kv.value_scales))
    if kv.format == "int8":
        assert keys is not None
        assert values is not None
        keys, values = key_panels(keys), value_panels(values)
    return KVLayer(kv.format, keys, values, *scales)


def key_panels(rows: np.ndarray) -> np.ndarray:
    """(blocks, heads, 16 tokens, dim) -> dim / 4 times 16 tokens x 4 dimensions, then 16 tokens x those left."""
    blocks, heads, _, dim = rows.shape
    whole = dim // 4 * 4
    quads = rows[..., :whole].reshape(blocks, heads, BLOCK, -1, 4).transpose(0, 1, 3, 2, 4)
    parts = [part.reshape(blocks, heads, -1) for part in (quads, rows[..., whole:])]
    return np.concatenate(parts, axis=2).reshape(rows.shape)


def key_rows(panels: np.ndarray) -> np.ndarray:
    blocks, heads, _, dim = panels.shape
    flat, whole = panels.reshape(blocks, heads, -1), dim // 4 * 4
    quads = flat[..., : BLOCK * whole].reshape(blocks, heads, -1, BLOCK, 4).transpose(0, 1, 3, 2, 4)
    rest = flat[..., BLOCK * whole :].reshape(blocks, heads, BLOCK, dim - whole)
    return np.concatenate((quads.reshape(blocks, heads, BLOCK, whole), rest), axis=3)


def value_panels(rows: np.ndarray) -> np.ndarray:
    """(blocks, heads, 16 tokens, dim) -> 4 times dim x 4 tokens."""
    blocks, heads, _, dim = rows.shape
    return np.ascontiguousarray(rows.reshape(blocks, heads, 4, 4, dim).swapaxes(3, 4)).reshape(rows.shape)


def value_rows(panels: np.ndarray) -> np.ndarray:
    blocks, heads, _, dim = panels.shape
    return np.ascontiguousarray(panels.reshape(blocks, heads, 4, dim, 4).swapaxes(3, 4)).reshape(panels.shape)


def batch_arrays(batch: Batch) -> Batch:
    groups = tuple(GroupBlocks(group.slots.numpy(), group.tables.numpy()) for group in batch.groups)
    rows: Any = (batch.tokens, batch.positions, batch.starts, batch.contexts)
    return Batch(*(part.numpy() for part in rows), groups, batch.logit_rows.numpy())


def codes(part: Tensor | None) -> np.ndarray | None:
    """The memory of a tensor; what NumPy has no name for is its bits."""
    if part is None:
        return None
    return part.view(torch.uint16).numpy() if part.dtype == torch.bfloat16 else part.numpy()
