"""Safetensors in published formats of few bits: the tensors that make up one matrix become one `Coded` under its name.

    format               tensors of the matrix X.weight, (out, in)
    fp8                  X.weight F8, X.weight_scale_inv or X.weight_scale: of squares, of outputs, or one. DeepSeek V4:
                         X.scale in powers of two; of experts X.weight I8 (out, in/2), two 4-bit floats in a byte, and
                         X.scale (out, in/32)
    compressed-tensors   the same; or X.weight I8, X.weight_scale, X.weight_zero_point; or, packed into words,
                         X.weight_packed (out, in·bits/32), X.weight_scale (out, groups), X.weight_shape,
                         X.weight_zero_point (out·bits/32, groups), X.weight_g_idx (in)
    gptq                 X.qweight (in·bits/32, out), X.qzeros (groups, out·bits/32), X.scales (groups, out),
                         X.g_idx (in)
    awq                  X.qweight (in, out/8), X.qzeros (groups, out/8), X.scales (groups, out)

A word holds its first code in its lowest bits; AWQ's eight codes are those of outputs 0 2 4 6 1 3 5 7. A g_idx is the
group of each input: without one, inputs follow each other. Weights are not read before a matrix is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from twostroke.errors import ModelError
from twostroke.model.quantization import Scheme
from twostroke.ops.formats import FLOATS, FP8, SMALL_INTEGERS, Stored, dequantize, integers
from twostroke.record import Record
from twostroke.weights.fp8 import fp8_format, stored_fp8
from twostroke.weights.grids import BLOCK, Grid, stored_grid, unpacked
from twostroke.weights.mxfp4 import joined_mxfp4
from twostroke.weights.scales import Scales, find_scales

# Scales of activations and of the KV cache: see model/quantization.py. K and V have the format that `kv_dtype` says.
_UNUSED = re.compile(r".*\.(input_scale|output_scale|activation_scale|input_zero_point|[qkv]_scale|prob_scale)")
_AWQ_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # for each of eight outputs, its place in a word
_KEPT = {4: "Q4_Z", 8: "Q8_0"}
POWERS = "F8_E8M0"  # scales that are powers of two
GROUP = 32  # 4-bit floats that share a scale


class Coded(Record, eq=False):
    """A matrix made up of several tensors."""

    shape: tuple[int, ...]
    format: str  # what `decode` gives where nothing forbids it
    nbytes: int  # in the file
    by_output: bool  # all inputs of an output share a scale
    decode: Callable[[], Stored]


def assembled(tensors: Mapping[str, Stored], scheme: Scheme | None, where: str) -> dict[str, Stored | Coded]:
    """The tensors of a checkpoint, those of a coded matrix put together. where: for errors."""
    if scheme is None and any(tensor.format == FP8.name for tensor in tensors.values()):
        scheme = Scheme("fp8")  # a folder whose config says nothing about it
    if scheme is None or scheme.method == "mxfp4":
        return dict(tensors)
    reader = _Reader(tensors, scheme, where)
    for name, tensor in tensors.items():
        if name.endswith(".qweight"):
            (reader.awq if scheme.method == "awq" else reader.gptq)(name.removesuffix(".qweight"))
        elif name.endswith(".weight_packed"):
            reader.packed(name.removesuffix("_packed"))
        elif tensor.format == FP8.name:
            reader.fp8(name)
        elif tensor.format == SMALL_INTEGERS.name and not name.endswith("_zero_point"):
            (reader.fp4 if scheme.method == "fp8" else reader.int8)(name)
    plain = {name: one for name, one in tensors.items() if name not in reader.used and not _UNUSED.fullmatch(name)}
    return plain | reader.made


class _Reader:
    """Puts matrices together; `used` are the tensors that went into them."""

    def __init__(self, tensors: Mapping[str, Stored], scheme: Scheme, where: str):
        self.tensors, self.scheme, self.where = tensors, scheme, where
        self.used: set[str] = set()
        self.made: dict[str, Stored | Coded] = {}
        self.bytes = 0  # of the tensors taken for the next matrix

    # ---- formats ---------------------------------------------------------------------------------------------------

    def fp8(self, name: str) -> None:
        codes, scales = self.take(name, FP8.name), self.scales_of(name)
        self.put(name, codes.shape, fp8_format(codes, scales), scales.by_output, lambda: stored_fp8(codes, scales))

    def fp4(self, name: str) -> None:
        codes, at = self.take(name, SMALL_INTEGERS.name), self.scale_name(name)
        scales = self.take(at, POWERS)
        if len(codes.shape) != 2 or codes.shape[1] % (GROUP // 2):
            raise self.error(
                name, f"has shape {codes.shape}; two 4-bit floats in a byte, in groups of {GROUP}, are read"
            )
        outputs, groups = codes.shape[0], 2 * codes.shape[1] // GROUP
        self.check(at, scales, (outputs, groups))
        parts = Stored("U8", (outputs, groups, GROUP // 2), codes.data), Stored("U8", (outputs, groups), scales.data)
        self.put(name, (outputs, groups * GROUP), "MXFP4", False, lambda: joined_mxfp4(*parts))

    def int8(self, name: str) -> None:
        codes, scales = self.take(name, SMALL_INTEGERS.name), self.scales_of(name)
        zeros = self.take_if_there(f"{name}_zero_point", scales.tensor.shape, SMALL_INTEGERS.name)

        def decode() -> Stored:
            factors = scales.read()
            middle = np.full(factors.shape, 128, np.int16)
            if zeros is not None:
                middle += scales.for_outputs(zeros.data.view(np.int8))
            group_of = np.arange(codes.shape[1]) // scales.each[1]
            return stored_grid(Grid(codes.data.reshape(codes.shape) ^ np.uint8(128), middle, factors, group_of, 8))

        self.put(name, codes.shape, "Q8_0" if zeros is None else "F16", scales.by_output, decode)

    def packed(self, name: str) -> None:
        words, scales = self.take(f"{name}_packed", "I32"), self.take(f"{name}_scale", *FLOATS)
        outputs, inputs = self.shape_in(f"{name}_shape")
        bits = next((n for n in (4, 8) if words.shape == (outputs, -(-inputs * n // 32))), 0)
        if not bits:
            raise self.error(f"{name}_packed", f"has shape {words.shape}: not 4 or 8 bits for ({outputs}, {inputs})")
        groups = scales.shape[-1] if len(scales.shape) == 2 else 1
        self.check(f"{name}_scale", scales, (outputs, groups))
        zeros = self.take_if_there(f"{name}_zero_point", (-(-outputs * bits // 32), groups), "I32")
        group_of = self.groups_of(name, f"{name}_g_idx", inputs, groups)

        def decode() -> Stored:
            middle = np.full((outputs, groups), 1 << (bits - 1), np.int16)
            if zeros is not None:
                middle = unpacked(integers(zeros).T, bits).T[:outputs].astype(np.int16)
            codes = unpacked(integers(words), bits)[:, :inputs]
            return stored_grid(Grid(codes, middle, dequantize(scales), group_of(), bits))

        self.put(name, (outputs, inputs), _KEPT[bits], groups == 1, decode)

    def gptq(self, stem: str) -> None:
        bits, shift = self.scheme.bits, self.scheme.zero_shift
        words, outputs, inputs, groups = self.words_of(stem, 32 // bits, 1)
        zeros, scales = self.take(f"{stem}.qzeros", "I32"), self.take(f"{stem}.scales", *FLOATS)
        self.check(f"{stem}.scales", scales, (groups, outputs))
        self.check(f"{stem}.qzeros", zeros, (groups, -(-outputs * bits // 32)))
        group_of = self.groups_of(stem, f"{stem}.g_idx", inputs, groups)

        def decode() -> Stored:
            middle = unpacked(integers(zeros), bits)[:, :outputs].T.astype(np.int16)
            middle = (middle + shift) & ((1 << bits) - 1)
            codes = unpacked(integers(words).T, bits)
            return stored_grid(Grid(codes, middle, dequantize(scales).T, group_of(), bits))

        self.put(f"{stem}.weight", (outputs, inputs), _KEPT[bits], groups == 1, decode)

    def awq(self, stem: str) -> None:
        words, outputs, inputs, groups = self.words_of(stem, 1, 8)
        zeros, scales = self.take(f"{stem}.qzeros", "I32"), self.take(f"{stem}.scales", *FLOATS)
        self.check(f"{stem}.scales", scales, (groups, outputs))
        self.check(f"{stem}.qzeros", zeros, (groups, outputs // 8))
        group_of = self.groups_of(stem, "", inputs, groups)

        def decode() -> Stored:
            codes, middle = (by_output(integers(part)) for part in (words, zeros))
            return stored_grid(Grid(codes, middle, dequantize(scales).T, group_of(), 4))

        self.put(f"{stem}.weight", (outputs, inputs), _KEPT[4], groups == 1, decode)

    # ---- their tensors ---------------------------------------------------------------------------------------------

    def take(self, name: str, *formats: str) -> Stored:
        found = self.tensors.get(name)
        if found is None:
            raise ModelError(f"{self.where}: {name} is missing; the checkpoint is incomplete.")
        if not found.nbytes:
            raise self.error(name, f"of shape {found.shape} is empty")
        if found.format not in formats:
            raise self.error(name, f"has dtype {found.format}, not {' or '.join(formats)}")
        self.used.add(name)
        self.bytes += found.nbytes
        return found

    def take_if_there(self, name: str, shape: tuple[int, ...], *formats: str) -> Stored | None:
        if name not in self.tensors:
            return None
        found = self.take(name, *formats)
        self.check(name, found, shape)
        return found

    def scale_name(self, name: str) -> str:
        names = [f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('weight')}scale"]
        usual = names[0] if self.scheme.method == "fp8" else names[1]
        return next((one for one in names if one in self.tensors), usual)

    def scales_of(self, name: str) -> Scales:
        at = self.scale_name(name)
        scales, codes = self.take(at, *FLOATS, POWERS), self.tensors[name]
        found = find_scales(scales, codes.shape, self.scheme.square)
        if found is None:
            tall, wide = self.scheme.square
            raise self.error(
                at,
                f"has shape {scales.shape}; a matrix of {codes.shape} has one scale, one for each output, for groups "
                f"of inputs, or for squares of {tall} by {wide}",
            )
        return found

    def words_of(self, stem: str, rows: int, columns: int) -> tuple[Stored, int, int, int]:
        """qweight, outputs, inputs and groups. A word holds codes of so many inputs (rows) and outputs (columns)."""
        words = self.take(f"{stem}.qweight", "I32")
        if len(words.shape) != 2:
            raise self.error(f"{stem}.qweight", f"has shape {words.shape}; it must have two dimensions")
        inputs, outputs = words.shape[0] * rows, words.shape[1] * columns
        group = inputs if self.scheme.group == -1 else self.scheme.group
        if inputs % group:
            raise self.error(f"{stem}.qweight", f"has {inputs} inputs, which groups of {group} do not divide")
        return words, outputs, inputs, inputs // group

    def shape_in(self, name: str) -> tuple[int, int]:
        tensor = self.take(name, "I32", "I64")
        self.check(name, tensor, (2,))
        outputs, inputs = (int(size) for size in integers(tensor))
        if not (0 < outputs < 1 << 31 and 0 < inputs < 1 << 31):
            raise self.error(name, f"says ({outputs}, {inputs}), which is no size of a matrix")
        return outputs, inputs

    def groups_of(self, name: str, index: str, inputs: int, groups: int) -> Callable[[], np.ndarray]:
        """The group of each input, when it is asked for. index: the tensor that may say it."""
        tensor = self.take_if_there(index, (inputs,), "I32", "I64")
        if tensor is None and inputs % groups:
            raise self.error(name, f"has {groups} groups, which do not divide {inputs} inputs")

        def read() -> np.ndarray:
            if tensor is None or (integers(tensor) == -1).all():  # -1: written by tools that did not need it
                return np.arange(inputs) // max(1, inputs // groups)
            found = integers(tensor)
            if found.min() < 0 or found.max() >= groups:
                raise self.error(index, f"names groups outside 0 to {groups - 1}")
            return found

        return read

    def check(self, name: str, tensor: Stored, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            raise self.error(name, f"has shape {tensor.shape}, expected {shape}")

    def put(self, name: str, shape: tuple[int, ...], kept: str, by_output: bool, decode: Callable[[], Stored]) -> None:
        if len(shape) != 2:
            raise self.error(name, f"has shape {shape}; a matrix is needed")
        if kept in _KEPT.values() and shape[1] % BLOCK:
            kept = "F16"
        self.made[name] = Coded(shape, kept, self.bytes, by_output, decode)
        self.bytes = 0

    def error(self, name: str, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {name} {reason}. Fetch the model again, or use another version of it.")


def by_output(words: np.ndarray) -> np.ndarray:
    """AWQ's (rows, outputs / 8) words -> the codes, (outputs, rows)."""
    turned = np.ascontiguousarray(words.T).view(np.uint32)
    codes = np.empty((len(turned), 8, turned.shape[1]), np.uint8)
    for output, place in enumerate(_AWQ_PLACES):
        codes[:, output] = (turned >> np.uint32(4 * place)) & np.uint32(15)
    return codes.reshape(-1, turned.shape[1])
