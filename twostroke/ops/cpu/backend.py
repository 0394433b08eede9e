"""The CPU backend on the native library (native/, C++): a call for each op or for all layers, on raw pointers into
NumPy arrays, with the lock released. It never imports torch.

Weights are repacked at load and keep their precision; activations are float32 outside the products and 8-bit codes with
a scale for each 32 inside those with quantized weights. Every op is batch-invariant and gives the same bits for any
number of threads and on every instruction set.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from twostroke.ops.compressed import attend_compressed
from twostroke.ops.compressed_interface import CompressedAttention, CompressedRows
from twostroke.ops.cpu.arrays import NativeOwner, address, any_address, norm_reference
from twostroke.ops.cpu.convert import in_one_order, narrowed, packable
from twostroke.ops.cpu.decode import NativeDecode
from twostroke.ops.cpu.describe import describe_batch, describe_latent, describe_layer, signature
from twostroke.ops.cpu.entries import NativeCore
from twostroke.ops.cpu.experts import ACTIVATIONS, describe_experts
from twostroke.ops.cpu.library import ExpertsCall, LatentCall, LayerCall, load_library
from twostroke.ops.formats import Stored, dequantize, from_float
from twostroke.ops.interface import Attention, Batch, ExpertSet, FusedLayer, Gate, KVLayer, LatentAttention, Norm, Ops
from twostroke.record import Record

_FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
_FLOATS = ("F32", "F16", "BF16")
_NARROW = {"float16": "F16", "bfloat16": "BF16"}
_STATUS = {1: "out of memory", 2: "a token id lies outside the table", 3: "bad argument"}
_CACHED = 4096  # layers remembered by attend; a model has a few dozen
_FLOAT32 = np.dtype(np.float32)


class PackedWeight(Record, eq=False):
    handle: int
    outputs: int
    inputs: int
    owner: Any  # frees the handle when the last reference goes


class FusedLayers(Record, eq=False):
    """A stretch of layers over one cache, described once: a call runs them all."""

    ops: NativeCpuOps
    calls: ctypes.Array[LayerCall]
    groups: int
    pointers: Any  # the type of an array with one for each group
    kept: tuple[Any, ...]  # what the descriptions point into

    def __call__(self, x: np.ndarray, batch: Batch, rows: np.ndarray | None) -> np.ndarray:
        return self.ops.run_layers(self, x, batch, rows)


class NativeCpuOps(Ops):
    name = "native"
    device = None  # it takes NumPy arrays

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
        self._weights, self._threads = weights, threads
        self._linear = lib.ts_linear
        self._attend = lib.ts_attend
        self._layers: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._experts: dict[int, tuple[ExpertsCall, tuple[Any, ...]]] = {}
        self._batch: tuple[Batch | None, dict[int, tuple[Any, ...]]] = (None, {})

    # ---- weights -------------------------------------------------------------------------------------------------

    def pack(self, parts: Sequence[Stored], bias: np.ndarray | None = None) -> PackedWeight:
        inputs = parts[0].shape[1]
        if any(len(part.shape) != 2 or part.shape[1] != inputs for part in parts):
            raise ValueError(f"cannot stack matrices of shapes {[part.shape for part in parts]}")
        if self._weights == "float32":
            parts = [part if part.format in _FLOATS else from_float(dequantize(part)) for part in parts]
        elif self._weights in _NARROW:
            parts = [narrowed(part, _NARROW[self._weights]) for part in parts]
        parts, order = in_one_order([packable(part, self._threads) for part in parts])
        outputs = sum(part.shape[0] for part in parts)
        data = [np.ascontiguousarray(part.data) for part in parts]
        count = len(parts)
        formats = (ctypes.c_int32 * count)(*(_FORMATS.index(part.format) for part in parts))
        rows = (ctypes.c_int32 * count)(*(part.shape[0] for part in parts))
        pointers = (ctypes.c_void_p * count)(*(array.ctypes.data for array in data))
        shift = None if bias is None else np.ascontiguousarray(bias, np.float32)
        if shift is not None and shift.shape != (outputs,):
            raise ValueError(f"a bias of shape {shift.shape} does not fit {outputs} outputs")
        handle = self._lib.ts_pack(
            self._context, count, formats, rows, pointers, inputs, None if shift is None else shift.ctypes.data
        )
        if not handle:
            raise MemoryError(f"no memory to pack a matrix of {outputs} x {inputs}")
        if order is not None:
            places = np.ascontiguousarray(order, np.int32)
            self._lib.ts_weight_order(handle, places.ctypes.data)
        owner = NativeOwner()
        weakref.finalize(owner, self._lib.ts_weight_free, handle)
        return PackedWeight(handle, outputs, inputs, owner)

    def weight_bytes(self, weight: PackedWeight) -> int:
        return int(self._lib.ts_weight_bytes(weight.handle))

    def embed(self, table: PackedWeight, tokens: np.ndarray, scale: float) -> np.ndarray:
        tokens = np.ascontiguousarray(tokens, np.int64)
        count = tokens.shape[0]
        out = np.empty((count, table.inputs), _FLOAT32)
        _check(self._lib.ts_embed(self._context, table.handle, address(tokens), count, scale, address(out)))
        return out

    # ---- rows ----------------------------------------------------------------------------------------------------

    def norm(self, x: np.ndarray, norm: Norm) -> np.ndarray:
        flat = _rows(x.reshape(-1, x.shape[-1]))
        rows, cols = flat.shape
        out = np.empty((rows, cols), _FLOAT32)
        status = self._lib.ts_norm(
            self._context, any_address(flat), flat.strides[0] // 4, rows, cols, address(norm.weight), norm.eps,
            address(out),
        )  # fmt: skip
        _check(status)
        return out.reshape(x.shape)

    def linear(
        self,
        x: np.ndarray,
        weight: PackedWeight,
        *,
        before: Norm | Gate | None = None,
        add_to: np.ndarray | None = None,
    ) -> np.ndarray:
        rows, width = x.shape
        kind, scales, eps = 0, None, 0.0
        if before is not None:
            if type(before) is Norm:
                kind, scales, eps = 1, address(before.weight), before.eps
            else:
                kind = ACTIVATIONS[before.activation]  # type: ignore[union-attr]
                width //= 2
        if width != weight.inputs or x.dtype != _FLOAT32:
            raise ValueError(f"a {x.dtype} input of width {x.shape[1]} does not fit a weight of {weight.inputs} inputs")
        if not x.flags.c_contiguous:
            x = np.ascontiguousarray(x)
        if add_to is None:
            out = np.empty((rows, weight.outputs), _FLOAT32)
        else:
            out = add_to
            if out.shape != (rows, weight.outputs) or out.dtype != _FLOAT32 or not out.flags.c_contiguous:
                raise ValueError(f"cannot add ({rows}, {weight.outputs}) into {out.shape} of {out.dtype} in place")
        status = self._linear(
            self._context, weight.handle, address(x), x.shape[1], rows, kind, scales, eps,
            address(out), weight.outputs, add_to is not None,
        )  # fmt: skip
        if status:
            _check(status)
        return out

    def experts(self, x: np.ndarray, norm: Norm, experts: ExpertSet, tokens: np.ndarray | None = None) -> np.ndarray:
        if x.dtype != _FLOAT32 or x.shape[1] != experts.router.inputs:
            raise ValueError(f"a {x.dtype} input of width {x.shape[1]} does not fit {experts.router.inputs} inputs")
        if not x.flags.c_contiguous:
            x = np.ascontiguousarray(x)
        out = np.empty_like(x)
        call = self._experts_call(experts, norm)
        rows, hidden = x.shape
        ids = np.zeros(rows, np.int64) if tokens is None else np.ascontiguousarray(tokens, np.int64)
        if ids.shape != (rows,) or (tokens is None and experts.table is not None):
            raise ValueError(f"these experts need the tokens of {rows} rows")
        _check(self._lib.ts_experts(self._context, call, address(x), address(ids), rows, hidden, address(out)))
        return out

    def argmax(self, logits: np.ndarray) -> np.ndarray:
        logits = _rows(logits)
        rows, count = logits.shape
        out = np.empty(rows, np.int64)
        stride = logits.strides[0] // 4
        _check(self._lib.ts_argmax(self._context, any_address(logits), stride, rows, count, address(out)))
        return out

    # ---- attention -----------------------------------------------------------------------------------------------

    def attend(self, qkv: np.ndarray, attention: Attention, kv: KVLayer, batch: Batch, group: int) -> np.ndarray:
        layer = self._layer(attention, kv)
        step = self._step(batch, group)
        qkv = np.ascontiguousarray(qkv)
        if qkv.dtype != _FLOAT32 or qkv.shape[1] != (attention.heads + 2 * attention.kv_heads) * attention.head_dim:
            raise ValueError(f"qkv of shape {qkv.shape} and {qkv.dtype} does not fit the layer")
        out = np.empty((qkv.shape[0], attention.heads * attention.head_dim), _FLOAT32)
        status = self._attend(self._context, layer, step, address(qkv), address(out))
        if status:
            _check(status)
        return out

    def attend_latent(
        self, q: np.ndarray, kv: np.ndarray, attention: LatentAttention, cache: KVLayer, batch: Batch, group: int
    ) -> np.ndarray:
        q, kv = _rows(q), _rows(kv)
        widths = (attention.heads * (attention.plain_dim + attention.rope_dim), attention.latent + attention.rope_dim)
        if (q.shape[1], kv.shape[1]) != widths or len(q) != len(kv):
            raise ValueError(f"q of shape {q.shape} and kv of shape {kv.shape} do not fit the layer")
        out = np.empty((q.shape[0], attention.heads * attention.value_dim), _FLOAT32)
        status = self._lib.ts_attend_latent(
            self._context, self._layer(attention, cache), self._step(batch, group), any_address(q), q.strides[0] // 4,
            any_address(kv), kv.strides[0] // 4, address(out),
        )  # fmt: skip
        _check(status)
        return out

    def attend_compressed(
        self, parts: CompressedRows, attention: CompressedAttention, cache: KVLayer, batch: Batch, group: int
    ) -> np.ndarray:
        core = NativeCore(self._lib, self._context, _check)
        return attend_compressed(core, self.norm, parts, attention, ((cache, group), *cache.further), batch)

    # ---- whole models --------------------------------------------------------------------------------------------

    def fuse(self, layers: Sequence[FusedLayer], caches: Sequence[tuple[KVLayer, int]]) -> FusedLayers:
        calls = (LayerCall * len(layers))()
        attentions = [describe_layer(layer.attention, kv) for layer, (kv, _) in zip(layers, caches, strict=True)]
        for call, layer, attention, (_, group) in zip(calls, layers, attentions, caches, strict=True):
            for name in ("qkv", "output", "gate_up", "down"):
                if (weight := getattr(layer, name)) is not None:
                    setattr(call, name, weight.handle)
            if layer.experts is not None:
                call.experts = self._experts_call(layer.experts, layer.feed_norm)
            call.attention = ctypes.addressof(attention)
            call.attention_norm, call.feed_norm = norm_reference(layer.attention_norm), norm_reference(layer.feed_norm)
            call.attention_out = norm_reference(layer.attention_out_norm)
            call.feed_out = norm_reference(layer.feed_out_norm)
            call.queries, call.keys = norm_reference(layer.all_queries_norm), norm_reference(layer.all_keys_norm)
            call.group, call.gate = group, ACTIVATIONS[layer.gate.activation]
        groups = 1 + max(group for _, group in caches)
        return FusedLayers(self, calls, groups, ctypes.c_void_p * groups, (attentions, tuple(layers), tuple(caches)))

    def fuse_decode(
        self,
        layers: Sequence[FusedLayer],
        caches: Sequence[tuple[KVLayer, int]],
        table: PackedWeight,
        scale: float,
        norm: Norm,
        head: PackedWeight,
        tables: np.ndarray,
        spans: Sequence[int],
    ) -> NativeDecode:
        fused = self.fuse(layers, caches)
        return NativeDecode(self._lib.ts_decode, self._context, _check, fused, table, scale, norm, head, tables, spans)

    def run_layers(self, fused: FusedLayers, x: np.ndarray, batch: Batch, kept_rows: np.ndarray | None) -> np.ndarray:
        """x is overwritten."""
        rows, hidden = x.shape
        if x.dtype != _FLOAT32 or not x.flags.c_contiguous or rows != batch.positions.shape[0]:
            raise ValueError(f"x of shape {x.shape} and {x.dtype} does not fit {batch.positions.shape[0]} rows")
        groups = fused.pointers(*[self._step(batch, group) for group in range(fused.groups)])
        keep = np.arange(rows) if kept_rows is None else np.ascontiguousarray(kept_rows, np.int64)
        out = np.empty((keep.shape[0], hidden), _FLOAT32)
        status = self._lib.ts_layers(
            self._context, fused.calls, len(fused.calls), groups, address(x), rows, hidden,
            address(keep), keep.shape[0], address(out),
        )  # fmt: skip
        _check(status)
        return out

    # ---- descriptions, made once and remembered ------------------------------------------------------------------

    def _layer(self, attention: Attention | LatentAttention, kv: KVLayer) -> int:
        """The address of the layer's constants. Built once for each (attention, cache) pair."""
        key = (id(attention), kv.keys.ctypes.data)
        found = self._layers.get(key)
        if found is not None and found[1] is attention and (found[2] is kv or found[3] == signature(kv)):
            return int(found[0])
        if len(self._layers) >= _CACHED:
            self._layers.clear()
        structure = self._described(attention, kv)
        entry = (ctypes.addressof(structure), attention, kv, signature(kv), structure)
        self._layers[key] = entry
        return entry[0]

    def _described(self, attention: Attention | LatentAttention, kv: KVLayer) -> Any:
        if isinstance(attention, Attention):
            return describe_layer(attention, kv)
        layer = describe_latent(attention, kv)
        key_up, value_up = attention.key_up.handle, attention.value_up.handle
        call = LatentCall(ctypes.addressof(layer), key_up, value_up, attention.plain_dim)
        call.kept = layer
        return call

    def _experts_call(self, experts: ExpertSet, norm: Norm) -> int:
        """The address of the experts' description. It stays valid: a model's experts live as long as this object."""
        found = self._experts.get(id(experts))
        if found is None or found[1][0] is not experts or found[1][1] is not norm:
            found = self._experts[id(experts)] = describe_experts(experts, norm)
        return ctypes.addressof(found[0])

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


def _rows(x: np.ndarray) -> np.ndarray:
    """float32 with adjacent elements in a row."""
    if x.dtype == _FLOAT32 and x.strides[-1] == 4:
        return x
    return np.ascontiguousarray(x, _FLOAT32)


def _check(status: int) -> None:
    if status:
        raise (MemoryError if status == 1 else ValueError)(f"native kernel: {_STATUS[status]}")
