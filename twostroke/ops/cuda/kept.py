"""Matrices whose codes the GPU's kernels take as a file has them: nothing is rounded to fewer bits.

Q4_0, Q4_1, Q4_Z, Q4_K   Int4, of an expert FourBits: a group's scale and its least value become bfloat16
MXFP4                    FourBits, of an expert
F8_32                    Fp8, where all inputs of an output share a scale
Q8_0                     Int8, likewise
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twostroke.ops.cuda.kernels.four_bits import LARGEST, FourBits, from_int4, from_mxfp4
from twostroke.ops.cuda.kernels.quantized import GROUP, SLICE, Fp8, Int4, Int8, Narrow
from twostroke.ops.formats import FORMATS, FOUR_BITS, Stored, group_scales, to_nibbles

MXFP4_BYTES = FORMATS["MXFP4"].bytes  # of a group


def kept_expert(parts: Sequence[Stored], bias: Tensor | None, device: torch.device) -> Narrow | FourBits | None:
    """A matrix of an expert; None: it must be decoded."""
    if all(part.format == "MXFP4" for part in parts):
        return kept_mxfp4(parts, bias, device)
    found = kept_codes(parts, bias, device)
    return from_int4(found) if isinstance(found, Int4) else found


def kept_mxfp4(parts: Sequence[Stored], bias: Tensor | None, device: torch.device) -> FourBits | None:
    """None: a group's exponent is so large that its numbers are not decoded in bfloat16."""
    if any(int(part.blocks()["e"].max(initial=0)) > LARGEST for part in parts):
        return None
    blocks = [torch.from_numpy(np.array(part.data)).view(part.shape[0], -1, MXFP4_BYTES) for part in parts]
    return from_mxfp4(torch.cat(blocks).to(device), bias)


def kept_codes(parts: Sequence[Stored], bias: Tensor | None, device: torch.device) -> Narrow | None:
    """The parts stacked; None: they must be decoded."""
    formats = {part.format for part in parts}
    if any(part.order is not None for part in parts):
        return None
    if formats <= set(FOUR_BITS):
        return _int4(parts, bias, device)
    if len(formats) > 1 or not formats & {"F8_32", "Q8_0"}:
        return None
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if outputs % 16 or inputs % 64 or not all(shared_by_rows(part) for part in parts):
        return None
    codes = [torch.from_numpy(np.ascontiguousarray(part.blocks()["qs"]).reshape(part.shape)) for part in parts]
    scales = [torch.from_numpy(by_row(part)["d"][:, 0].astype(np.float32)) for part in parts]
    whole, factors = torch.cat(codes).to(device), torch.cat(scales).to(device)
    if whole.dtype == torch.int8:
        return Int8(whole, factors, bias)
    return Fp8(whole.view(torch.float8_e4m3fn), factors, bias)


def by_row(part: Stored) -> np.ndarray:
    return part.blocks().reshape(part.shape[0], -1)


def shared_by_rows(part: Stored) -> bool:
    scales = by_row(part)["d"]
    return bool((scales == scales[:, :1]).all())


class Groups(NamedTuple):
    """A matrix in groups of 32 inputs: value = code · scale + least."""

    codes: np.ndarray  # (outputs, groups, 16): inputs j and j + 16 in a byte
    scales: np.ndarray  # (outputs, groups)
    least: np.ndarray


def _int4(parts: Sequence[Stored], bias: Tensor | None, device: torch.device) -> Int4:
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    slices, groups = -(-inputs // SLICE), inputs // GROUP
    codes = torch.zeros(outputs, slices * SLICE // 2, dtype=torch.uint8)
    words = torch.zeros(outputs, slices * SLICE // GROUP, dtype=torch.int32)
    start = 0
    for part in parts:
        found, rows = groups_of(part), slice(start, start + part.shape[0])
        codes[rows, : inputs // 2] = torch.from_numpy(found.codes.reshape(part.shape[0], -1))
        scale, least = (brain_words(values) for values in (found.scales, found.least))
        words[rows, :groups] = scale & 0xFFFF | least << 16
        start = rows.stop
    scales = words.view(outputs, slices, -1).transpose(0, 1).contiguous()
    return Int4(codes.to(device), scales.to(device), bias, inputs)


def groups_of(part: Stored) -> Groups:
    blocks = by_row(part)
    if part.format == "Q4_K":
        pairs = blocks["qs"]  # (outputs, blocks, 4, 32): a byte's nibbles belong to two neighbouring groups
        codes = to_nibbles(np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=3))
        scales, minimums = group_scales(part.blocks())
        return Groups(codes, scales.reshape(part.shape[0], -1), -minimums.reshape(part.shape[0], -1))
    scales = blocks["d"].astype(np.float32)
    if part.format == "Q4_1":
        return Groups(blocks["qs"], scales, blocks["m"].astype(np.float32))
    zeros = blocks["z"].astype(np.float32) if part.format == "Q4_Z" else np.float32(8)
    scales = torch.from_numpy(scales).bfloat16().float().numpy()  # first, so that a code of the zero point is 0
    return Groups(blocks["qs"], scales, -zeros * scales)


def brain_words(values: np.ndarray) -> Tensor:
    """The bits of bfloat16 numbers, in int32."""
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16().view(torch.int16).int()
