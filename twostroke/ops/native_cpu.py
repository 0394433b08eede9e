"""The CPU backend on the native library (native/, C++): a call for each op or for all layers, on raw pointers, with the
lock released.

Weights are repacked at load and keep their precision; activations are float32 outside the products and 8-bit codes with
a scale for each 32 inside those with quantized weights. Every op is batch-invariant and gives the same bits for any
number of threads and on every instruction set.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twostroke.ops.formats import Stored, dequantize, from_float
from twostroke.ops.interface import BLOCK, Attention, Batch, Gate, KVLayer, Layer, Norm
from twostroke.ops.native.library import AttendBatch, AttendLayer, LayerCall, NormRef, load_library

_FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_FLOATS = ("F32", "F16", "BF16")
_NARROW = {"float16": ("F16", torch.float16), "bfloat16": ("BF16", torch.bfloat16)}
_KV_FORMATS = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int4": 4}
_ACTIVATIONS = {"silu": 2, "gelu_tanh": 3}
_STATUS = {1: "out of memory", 2: "a token id lies outside the table", 3: "bad argument"}
_CACHED = 4096  # layers remembered by attend; a model has a few dozen


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    handle: int
    outputs: int
    inputs: int
    owner: Any  # frees the handle when the last reference goes


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """All layers of a model over one cache, described once for `run_layers`."""

    calls: ctypes.Array[LayerCall]
    groups: int
    kept: tuple[Any, ...]  # what the descriptions point into


class _Owner:
    """Something a finalizer can hold on to."""

    __slots__ = ("__weakref__",)


class NativeCpuOps:
    name = "native"
    device = torch.device("cpu")

    def __init__(self, threads: int, weights: str = "native", isa: str = ""):
        """weights: "native" keeps what the file holds; "float32" multiplies quantized weights as their float32 values;
        "float16" and "bfloat16" keep all of them in 16 bits.

        isa: one of `instruction_sets()`, the best of them when empty.
        """
        if weights not in ("native", "float32", *_NARROW):
            raise ValueError(f"weights must be 'native', 'float32', 'float16' or 'bfloat16', not {weights!r}")
        self._lib = lib = load_library()
        self._context = lib.ts_new(threads, isa.encode())
        if not self._context:
            raise ValueError(f"no kernels for {isa!r} on this machine; there are {', '.join(instruction_sets())}")
        weakref.finalize(self, lib.ts_free, self._context)
        self.isa: str = lib.ts_name(self._context).decode()
        self._weights = weights
        self._linear = lib.ts_linear
        self._attend = lib.ts_attend
        self._layers: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._batch: tuple[Batch | None, dict[int, tuple[Any, ...]]] = (None, {})

    # ---- weights -------------------------------------------------------------------------------------------------

    def pack(self, parts: Sequence[Stored], bias: Tensor | None = None) -> PackedWeight:
        inputs = parts[0].shape[1]
        if any(len(part.shape) != 2 or part.shape[1] != inputs for part in parts):
            raise ValueError(f"cannot stack matrices of shapes {[part.shape for part in parts]}")
        if self._weights == "float32":
            parts = [part if part.format in _FLOATS else from_float(dequantize(part)) for part in parts]
        elif self._weights in _NARROW:
            parts = [narrowed(part, *_NARROW[self._weights]) for part in parts]
        outputs = sum(part.shape[0] for part in parts)
        data = [np.ascontiguousarray(part.data) for part in parts]
        count = len(parts)
        formats = (ctypes.c_int32 * count)(*(_FORMATS.index(part.format) for part in parts))
        rows = (ctypes.c_int32 * count)(*(part.shape[0] for part in parts))
        pointers = (ctypes.c_void_p * count)(*(array.ctypes.data for array in data))
        shift = None if bias is None else bias.to(torch.float32).contiguous()
        if shift is not None and shift.shape != (outputs,):
            raise ValueError(f"a bias of shape {tuple(shift.shape)} does not fit {outputs} outputs")
        handle = self._lib.ts_pack(
            self._context, count, formats, rows, pointers, inputs, None if shift is None else shift.data_ptr()
        )
        if not handle:
            raise MemoryError(f"no memory to pack a matrix of {outputs} x {inputs}")
        owner = _Owner()
        weakref.finalize(owner, self._lib.ts_weight_free, handle)
        return PackedWeight(handle, outputs, inputs, owner)

    def weight_bytes(self, weight: PackedWeight) -> int:
        return int(self._lib.ts_weight_bytes(weight.handle))

    def embed(self, table: PackedWeight, tokens: Tensor, scale: float) -> Tensor:
        tokens = tokens.contiguous()
        out = torch.empty((tokens.shape[0], table.inputs))
        _check(
            self._lib.ts_embed(self._context, table.handle, tokens.data_ptr(), tokens.shape[0], scale, out.data_ptr())
        )
        return out

    # ---- rows ----------------------------------------------------------------------------------------------------

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        flat = _rows(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
        rows, cols = flat.shape
        out = torch.empty((rows, cols))
        _check(
            self._lib.ts_norm(
                self._context,
                flat.data_ptr(),
                flat.stride(0),
                rows,
                cols,
                norm.weight.data_ptr(),
                norm.eps,
                out.data_ptr(),
            )
        )
        return out.view(x.shape)

    def linear(
        self, x: Tensor, weight: PackedWeight, *, before: Norm | Gate | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        rows, width = x.shape
        kind, scales, eps = 0, None, 0.0
        if before is not None:
            if type(before) is Norm:
                kind, scales, eps = 1, before.weight.data_ptr(), before.eps
            else:
                kind = _ACTIVATIONS[before.activation]  # type: ignore[union-attr]
                width //= 2
        if width != weight.inputs or x.dtype != torch.float32:
            raise ValueError(f"a {x.dtype} input of width {x.shape[1]} does not fit a weight of {weight.inputs} inputs")
        if not x.is_contiguous():
            x = x.contiguous()
        if add_to is None:
            out = torch.empty((rows, weight.outputs))
        else:
            out = add_to
            if out.shape != (rows, weight.outputs) or not out.is_contiguous():
                raise ValueError(f"cannot add ({rows}, {weight.outputs}) into {tuple(out.shape)} in place")
        status = self._linear(
            self._context, weight.handle, x.data_ptr(), x.shape[1], rows, kind, scales, eps,
            out.data_ptr(), weight.outputs, add_to is not None,
        )  # fmt: skip
        if status:
            _check(status)
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        logits = _rows(logits)
        rows, count = logits.shape
        out = torch.empty(rows, dtype=torch.int64)
        _check(self._lib.ts_argmax(self._context, logits.data_ptr(), logits.stride(0), rows, count, out.data_ptr()))
        return out

    # ---- attention -----------------------------------------------------------------------------------------------

    def attend(self, qkv: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int) -> Tensor:
        layer = self._layer(attention, kv)
        step = self._step(batch, group)
        if not qkv.is_contiguous():
            qkv = qkv.contiguous()
        if (
            qkv.dtype != torch.float32
            or qkv.shape[1] != (attention.heads + 2 * attention.kv_heads) * attention.head_dim
        ):
            raise ValueError(f"qkv of shape {tuple(qkv.shape)} and {qkv.dtype} does not fit the layer")
        out = torch.empty((qkv.shape[0], attention.heads * attention.head_dim))
        status = self._attend(self._context, layer, step, qkv.data_ptr(), out.data_ptr())
        if status:
            _check(status)
        return out

    # ---- whole models --------------------------------------------------------------------------------------------

    def plan_layers(self, layers: Sequence[Layer], caches: Sequence[tuple[KVLayer, int]], gate: Gate) -> LayerPlan:
        calls = (LayerCall * len(layers))()
        attentions = [describe_layer(layer.attention, kv) for layer, (kv, _) in zip(layers, caches, strict=True)]
        for call, layer, attention, (_, group) in zip(calls, layers, attentions, caches, strict=True):
            for name in ("qkv", "output", "gate_up", "down"):
                setattr(call, name, getattr(layer, name).handle)
            call.attention = ctypes.addressof(attention)
            call.attention_norm, call.feed_norm = norm_reference(layer.attention_norm), norm_reference(layer.feed_norm)
            call.attention_out = norm_reference(layer.attention_out_norm)
            call.feed_out = norm_reference(layer.feed_out_norm)
            call.group, call.gate = group, _ACTIVATIONS[gate.activation]
        return LayerPlan(calls, 1 + max(group for _, group in caches), (attentions, tuple(layers), tuple(caches)))

    def run_layers(self, plan: LayerPlan, x: Tensor, batch: Batch) -> Tensor:
        """x is overwritten."""
        rows, hidden = x.shape
        if x.dtype != torch.float32 or not x.is_contiguous() or rows != batch.positions.shape[0]:
            raise ValueError(f"x of shape {tuple(x.shape)} and {x.dtype} does not fit {batch.positions.shape[0]} rows")
        groups = (ctypes.c_void_p * plan.groups)(*(self._step(batch, group) for group in range(plan.groups)))
        keep = batch.logit_rows.contiguous()
        out = torch.empty((keep.shape[0], hidden))
        status = self._lib.ts_layers(
            self._context, plan.calls, len(plan.calls), groups, x.data_ptr(), rows, hidden,
            keep.data_ptr(), keep.shape[0], out.data_ptr(),
        )  # fmt: skip
        _check(status)
        return out

    # ---- descriptions, made once and remembered ------------------------------------------------------------------

    def _layer(self, attention: Attention, kv: KVLayer) -> int:
        """The address of the layer's constants. Built once for each (attention, cache) pair."""
        key = (id(attention), kv.keys.data_ptr())
        found = self._layers.get(key)
        if found is not None and found[1] is attention and (found[2] is kv or found[3] == _signature(kv)):
            return int(found[0])
        if len(self._layers) >= _CACHED:
            self._layers.clear()
        structure = describe_layer(attention, kv)
        entry = (ctypes.addressof(structure), attention, kv, _signature(kv), structure)
        self._layers[key] = entry
        return entry[0]

    def _step(self, batch: Batch, group: int) -> int:
        """The address of the step's rows: the same for every layer of a group."""
        if self._batch[0] is not batch:
            self._batch = (batch, {})
        found = self._batch[1].get(group)
        if found is None:
            structure, kept = describe_batch(batch, group)
            found = (ctypes.addressof(structure), structure, kept)
            self._batch[1][group] = found
        return int(found[0])


def instruction_sets() -> list[str]:
    """The sets of kernels that run on this machine, best first."""
    lib = load_library()
    names: list[str] = []
    while name := lib.ts_isa(len(names)):
        names.append(name.decode())
    return names


def narrowed(part: Stored, name: str, dtype: torch.dtype) -> Stored:
    """The same matrix, rounded to a float format of 16 bits."""
    if part.format == name:
        return part
    rows, cols = part.shape
    out = torch.empty((rows, cols), dtype=dtype)
    step = max(1, (1 << 24) // cols)  # decode a little at a time: no float32 copy of the whole matrix
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        out[start:stop] = torch.from_numpy(dequantize(part.rows(start, stop)))
    return Stored(name, part.shape, out.view(torch.uint8).numpy().reshape(-1))


def describe_layer(attention: Attention, kv: KVLayer) -> AttendLayer:
    dim = attention.head_dim
    if kv.format not in _KV_FORMATS:
        raise ValueError(f"a cache in {kv.format} is not supported here; use one of {', '.join(_KV_FORMATS)}")
    if dim % 2 or not 2 <= dim <= 256 or attention.heads % attention.kv_heads:
        raise ValueError(f"heads of {dim} ({attention.heads} over {attention.kv_heads}) are not supported")
    layer = AttendLayer(
        heads=attention.heads, kv_heads=attention.kv_heads, head_dim=dim, window=attention.window,
        scale=attention.scale, softcap=attention.softcap, kv_format=_KV_FORMATS[kv.format],
    )  # fmt: skip
    if attention.rope is not None:
        cos, sin = attention.rope.cos, attention.rope.sin
        if not (cos.is_contiguous() and sin.is_contiguous()) or 2 * cos.shape[1] > dim:
            raise ValueError(f"a rotary table of shape {tuple(cos.shape)} does not fit heads of {dim}")
        layer.rope_half, layer.cos, layer.sin = cos.shape[1], cos.data_ptr(), sin.data_ptr()
    if attention.query_norm is not None:
        layer.query_norm, layer.query_eps = attention.query_norm.weight.data_ptr(), attention.query_norm.eps
    if attention.key_norm is not None:
        layer.key_norm, layer.key_eps = attention.key_norm.weight.data_ptr(), attention.key_norm.eps
    for name, codes in (("key", kv.keys), ("value", kv.values)):
        if codes.stride(3) != 1 or codes.stride(2) != codes.shape[3] or codes.shape[2] != BLOCK:
            raise ValueError(f"a block of the cache must hold adjacent tokens, not strides {codes.stride()}")
        setattr(layer, f"{name}s", codes.data_ptr())
        setattr(layer, f"{name}_block_stride", codes.stride(0) * codes.element_size())
        setattr(layer, f"{name}_head_stride", codes.stride(1) * codes.element_size())
    for name, scales in (("key", kv.key_scales), ("value", kv.value_scales)):
        if scales is not None:
            setattr(layer, f"{name}_scales", scales.data_ptr())
            setattr(layer, f"{name}_scale_block_stride", scales.stride(0))
            setattr(layer, f"{name}_scale_head_stride", scales.stride(1))
    return layer


def norm_reference(norm: Norm | None) -> NormRef:
    return NormRef() if norm is None else NormRef(norm.weight.data_ptr(), norm.eps)


def describe_batch(batch: Batch, group: int) -> tuple[AttendBatch, list[Tensor]]:
    """The structure, and the tensors it points into."""
    blocks = batch.groups[group]
    kept = [t.contiguous() for t in (batch.positions, blocks.slots, blocks.tables, batch.starts, batch.contexts)]
    positions, slots, tables, starts, contexts = kept
    for tensor, dtype in zip(kept, (torch.int64, torch.int64, torch.int32, torch.int32, torch.int32), strict=True):
        if tensor.dtype != dtype:
            raise ValueError(f"a batch holds {tensor.dtype} where {dtype} belongs")
    structure = AttendBatch(
        rows=positions.shape[0], requests=contexts.shape[0], positions=positions.data_ptr(), slots=slots.data_ptr(),
        tables=tables.data_ptr(), table_stride=tables.shape[1], starts=starts.data_ptr(), contexts=contexts.data_ptr(),
    )  # fmt: skip
    return structure, kept


def _signature(kv: KVLayer) -> tuple[Any, ...]:
    return (
        kv.format,
        kv.keys.stride(),
        kv.values.data_ptr(),
        None if kv.key_scales is None else kv.key_scales.data_ptr(),
    )


def _rows(x: Tensor) -> Tensor:
    """float32 with adjacent elements in a row."""
    x = x.to(torch.float32)
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(status: int) -> None:
    if status:
        raise (MemoryError if status == 1 else ValueError)(f"native kernel: {_STATUS[status]}")
