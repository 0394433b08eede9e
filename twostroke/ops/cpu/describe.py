"""Layers, batches and caches as the native library sees them: structures with addresses into NumPy arrays.

A structure does not keep the arrays alive: what makes one holds on to them as long as it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twostroke.ops.cpu.arrays import address
from twostroke.ops.cpu.library import AttendBatch, AttendLayer
from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer, LatentAttention, latent_scales

KV_FORMATS = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int4": 4}
LATENT_FORMATS = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 5}
BATCH_TYPES = tuple(map(np.dtype, ("i8", "i8", "i4", "i4", "i4")))  # positions, slots, tables, starts, contexts
MAX_LATENT, MAX_TURNED = 1024, 64  # kMaxEntryDim of kernels.h


def describe_layer(attention: Attention, kv: KVLayer) -> AttendLayer:
    dim = attention.head_dim
    if kv.format not in KV_FORMATS:
        raise ValueError(f"a cache in {kv.format} is not supported here; use one of {', '.join(KV_FORMATS)}")
    if dim % 2 or not 2 <= dim <= 256 or attention.heads % attention.kv_heads:
        raise ValueError(f"heads of {dim} ({attention.heads} over {attention.kv_heads}) are not supported")
    layer = AttendLayer(
        heads=attention.heads, kv_heads=attention.kv_heads, head_dim=dim, value_dim=dim, window=attention.window,
        scale=attention.scale, softcap=attention.softcap, kv_format=KV_FORMATS[kv.format],
    )  # fmt: skip
    if attention.rope is not None:
        cos, sin = attention.rope.cos, attention.rope.sin
        if not (cos.flags.c_contiguous and sin.flags.c_contiguous) or 2 * cos.shape[1] > dim:
            raise ValueError(f"a rotary table of shape {cos.shape} does not fit heads of {dim}")
        layer.rope_half, layer.cos, layer.sin = cos.shape[1], address(cos), address(sin)
    if attention.query_norm is not None:
        layer.query_norm, layer.query_eps = address(attention.query_norm.weight), attention.query_norm.eps
    if attention.key_norm is not None:
        layer.key_norm, layer.key_eps = address(attention.key_norm.weight), attention.key_norm.eps
    if attention.key_center is not None:
        layer.key_center = address(attention.key_center)
    if attention.sinks is not None:
        layer.sinks = address(attention.sinks)
    if kv.values is None:
        raise ValueError("a cache without values is not supported here")
    for name, codes in (("key", kv.keys), ("value", kv.values)):
        place_codes(layer, name, codes)
    for name, scales in (("key", kv.key_scales), ("value", kv.value_scales)):
        if scales is not None:
            place_scales(layer, name, scales)
    return layer


def place_codes(layer: AttendLayer, name: str, codes: np.ndarray) -> None:
    width = codes.shape[3] * codes.itemsize
    if codes.strides[2:] != (width, codes.itemsize) or codes.shape[2] != BLOCK:
        raise ValueError(f"a block of the cache must hold adjacent tokens, not strides {codes.strides}")
    setattr(layer, f"{name}s", codes.ctypes.data)
    setattr(layer, f"{name}_block_stride", codes.strides[0])
    setattr(layer, f"{name}_head_stride", codes.strides[1])


def place_scales(layer: AttendLayer, name: str, scales: np.ndarray) -> None:
    setattr(layer, f"{name}_scales", scales.ctypes.data)
    setattr(layer, f"{name}_scale_block_stride", scales.strides[0] // 4)
    setattr(layer, f"{name}_scale_head_stride", scales.strides[1] // 4)


def describe_latent(attention: LatentAttention, kv: KVLayer) -> AttendLayer:
    """One K/V head whose values are the first numbers of its keys. The norm is that of the latent."""
    dim, cos, sin = attention.latent + attention.rope_dim, attention.rope.cos, attention.rope.sin
    if kv.format not in LATENT_FORMATS:
        raise ValueError(f"latents in {kv.format} are not supported here; use one of {', '.join(LATENT_FORMATS)}")
    groups = latent_scales(dim) if kv.format == "int8" else 0
    if (0 if kv.key_scales is None else kv.key_scales.shape[1]) != groups:
        raise ValueError(f"entries of {dim} numbers in {kv.format} have {groups} scales each")
    if attention.latent > MAX_LATENT or attention.rope_dim > MAX_TURNED or 2 * cos.shape[1] != attention.rope_dim:
        raise ValueError(
            f"a latent of {attention.latent} with {attention.rope_dim} rotated dimensions is not supported; at most "
            f"{MAX_LATENT} and {MAX_TURNED} are"
        )
    layer = AttendLayer(
        heads=attention.heads, kv_heads=1, head_dim=dim, value_dim=attention.latent, scale=attention.scale,
        rope_half=cos.shape[1], cos=address(cos), sin=address(sin), kv_format=LATENT_FORMATS[kv.format],
        key_norm=address(attention.norm.weight), key_eps=attention.norm.eps,
    )  # fmt: skip
    for name in ("key", "value"):
        place_codes(layer, name, kv.keys)
    if kv.key_scales is not None:
        place_scales(layer, "key", kv.key_scales)
    return layer


def describe_batch(batch: Batch, group: int) -> tuple[AttendBatch, list[np.ndarray]]:
    """The structure, and the arrays it points into."""
    blocks = batch.groups[group]
    found = (batch.positions, blocks.slots, blocks.tables, batch.starts, batch.contexts)
    if tuple([array.dtype for array in found]) != BATCH_TYPES:
        raise ValueError(f"a batch holds {[str(array.dtype) for array in found]}, not {list(map(str, BATCH_TYPES))}")
    kept = [np.ascontiguousarray(array) for array in found]
    positions, slots, tables, starts, contexts = map(address, kept)
    structure = AttendBatch(len(kept[0]), len(kept[4]), positions, slots, tables, kept[2].shape[1], starts, contexts)
    return structure, kept


def signature(kv: KVLayer) -> tuple[Any, ...]:
    return (
        kv.format,
        kv.keys.strides,
        None if kv.values is None else kv.values.ctypes.data,
        None if kv.key_scales is None else kv.key_scales.ctypes.data,
    )
