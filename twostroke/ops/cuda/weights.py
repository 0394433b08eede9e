"""Weights as the GPU's kernels take them: floats, codes of few bits, and the experts of a layer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twostroke.ops.cuda.kernels.experts import ExpertMatrices
from twostroke.ops.cuda.kernels.few_rows import FewExperts
from twostroke.ops.cuda.kernels.four_bits import FourBits, decoded
from twostroke.ops.cuda.kernels.quantized import Int4, Narrow, as_float
from twostroke.ops.cuda.kernels.rows import ACTIVATIONS
from twostroke.ops.formats import Stored, dequantize
from twostroke.ops.interface import ExpertSet


@dataclass(frozen=True, slots=True, eq=False)
class FloatMatrix:
    weight: Tensor  # (out, in), in the type of the activations
    bias: Tensor | None  # (out,) float32


CudaWeight = FloatMatrix | Narrow
ExpertWeight = CudaWeight | FourBits


class SharedWeights(NamedTuple):
    """The weights of an expert that every row takes."""

    gate_up: CudaWeight
    down: CudaWeight


class LaidExperts(NamedTuple):
    """A layer's experts as the kernels take them."""

    router: FloatMatrix
    gate_up: ExpertMatrices
    down: ExpertMatrices


def lay_experts(experts: ExpertSet) -> LaidExperts:
    assert isinstance(experts.router, FloatMatrix)
    dtype = experts.router.weight.dtype
    return LaidExperts(experts.router, lay_matrices(experts.gate_up, dtype), lay_matrices(experts.down, dtype))


def lay_matrices(weights: Sequence[ExpertWeight], dtype: torch.dtype) -> ExpertMatrices:
    """Matrices of several formats become floats of this type."""
    if len({0 if isinstance(weight, FloatMatrix) else weight.format for weight in weights}) > 1:
        weights = [in_floats(weight, dtype) for weight in weights]
    first, bias = weights[0], laid_biases(weights)
    assert not isinstance(first, Int4), "experts of four bits are FourBits"
    codes = distances([weight.weight if isinstance(weight, FloatMatrix) else weight.codes for weight in weights])
    if isinstance(first, FloatMatrix):
        return ExpertMatrices(*codes, *codes, bias, 0)
    scales = distances([weight.scales for weight in weights])  # type: ignore[union-attr]
    return ExpertMatrices(*codes, *scales, bias, first.format)


def in_floats(weight: ExpertWeight, dtype: torch.dtype) -> FloatMatrix:
    if isinstance(weight, FloatMatrix):
        return weight
    floats = decoded(weight, dtype) if isinstance(weight, FourBits) else as_float(weight, dtype)
    return FloatMatrix(floats, weight.bias)


def laid_biases(weights: Sequence[ExpertWeight]) -> Tensor | None:
    """(experts, outputs); None: no expert has one."""
    found = [weight.bias for weight in weights]
    if all(bias is None for bias in found):
        return None
    there = next(bias for bias in found if bias is not None)
    return torch.stack([torch.zeros_like(there) if bias is None else bias for bias in found])


def distances(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The first tensor, and the places of all of them, counted in elements from its own."""
    first = tensors[0]
    found = [(tensor.data_ptr() - first.data_ptr()) // first.element_size() for tensor in tensors]
    assert not any(distance % 16 for distance in found), "matrices must lie on borders of 16 elements"
    return first, torch.tensor(found, dtype=torch.int64, device=first.device)


def lay_few(experts: ExpertSet, shared: SharedWeights | None) -> FewExperts | None:
    """For few rows; None: the expert that every row takes cannot be cut into parts of the others' width and format."""
    assert isinstance(experts.router, FloatMatrix)
    width, wide, dtype = shape_of(experts.down[0])[1], 0, experts.router.weight.dtype
    gate_up, down = list(experts.gate_up), list(experts.down)
    if shared is not None:
        wide = shape_of(shared.down)[1]
        kinds: set[type] = {type(one) for one in (*gate_up, *down, *shared)}
        plain = all(one.bias is None for one in (*gate_up, *down, *shared))
        if wide % width or width % 16 or len(kinds) > 1 or not plain or FourBits in kinds:
            return None
        for first in range(0, wide, width):
            gate_up.append(part_of(shared.gate_up, slice(first, None), slice(None)))
            down.append(part_of(shared.down, slice(None), slice(first, None)))
    return FewExperts(
        experts.router.weight, experts.router.bias, experts.correction, experts.table, experts.routing,
        lay_matrices(gate_up, dtype), lay_matrices(down, dtype), width, wide, ACTIVATIONS[experts.gate.activation],
    )  # fmt: skip


def part_of(weight: CudaWeight, outputs: slice, inputs: slice) -> CudaWeight:
    """A view of the matrix, for its place alone."""
    if isinstance(weight, FloatMatrix):
        return FloatMatrix(weight.weight[outputs, inputs], None)
    return replace(weight, codes=weight.codes[outputs, inputs], scales=weight.scales[outputs])


def shape_of(weight: ExpertWeight) -> tuple[int, int]:
    """Outputs and inputs."""
    if isinstance(weight, FloatMatrix):
        return weight.weight.shape[0], weight.weight.shape[1]
    return weight.codes.shape[0], weight.inputs


def as_tensor(stored: Stored) -> Tensor:
    """The weight on the host, in the stored precision where torch has it."""
    if stored.format == "BF16":
        with warnings.catch_warnings():  # a mapped file is read-only, and so is what reads it here
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            bits = torch.from_numpy(np.ascontiguousarray(stored.data).view(np.int16))
        return bits.view(torch.bfloat16).view(stored.shape)
    return torch.from_numpy(dequantize(stored))
