"""The weights of an int4 matrix, as products of one row take them."""

from __future__ import annotations

import torch

from twostroke.ops.cuda.kernels.quantized import Int4


def whole_int4(weight: Int4) -> torch.Tensor:
    """code · scale + least value, not rounded to bfloat16."""
    rows, codes = weight.codes.shape[0], weight.codes.cpu().view(weight.codes.shape[0], -1, 16).int()
    words = weight.scales.cpu().transpose(0, 1).reshape(rows, -1, 1)
    scale, least = ((words << 16).view(torch.float32), (words & -65536).view(torch.float32))
    return (torch.cat([codes & 15, codes >> 4], 2) * scale + least).view(rows, -1)[:, : weight.inputs]
