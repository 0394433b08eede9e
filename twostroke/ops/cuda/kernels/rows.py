"""Kernels that treat one row at a time: norm, gate, embedding, argmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def activated(x, SILU: tl.constexpr):
    if SILU:
        return x / (1.0 + tl.exp(-x))
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def gated_pair(gate, up, ACTIVATION: tl.constexpr):
    """ACTIVATION: as in ACTIVATIONS."""
    if ACTIVATION == 4:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    elif ACTIVATION == 5:
        gate = tl.minimum(gate, 10.0, propagate_nan=tl.PropagateNan.ALL)
        return activated(gate, True) * tl.clamp(up, -10.0, 10.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        return activated(gate, ACTIVATION == 2) * up


# What products do to x first: nothing, a norm, or one of the gates, which have these numbers everywhere.
NOTHING, NORM = 0, 1
ACTIVATIONS = {"silu": 2, "gelu_tanh": 3, "swiglu_oai": 4, "swiglu_10": 5}


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dims = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + dims, mask=dims < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / WIDTH + eps)
    out = x * scale * tl.load(weight_ptr + dims, mask=dims < WIDTH, other=0.0)
    tl.store(out_ptr + row * WIDTH + dims, out.to(out_ptr.dtype.element_ty), mask=dims < WIDTH)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (rows, width), rows contiguous in themselves."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    warps = 4 if block <= 2048 else 8
    norm_kernel[(x.shape[0],)](
        x, weight, out, eps, x.stride(0), WIDTH=width, BLOCK=block, PDL=PDL, num_warps=warps, **EARLY
    )
    return out


@triton.jit
def gate_kernel(
    x_ptr, out_ptr, stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < WIDTH
    gate = tl.load(x_ptr + row * stride + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + WIDTH + dims, mask=inside, other=0.0).to(tl.float32)
    out = gated_pair(gate, up, ACTIVATION)
    tl.store(out_ptr + row * WIDTH + dims, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated(x: Tensor, activation: int) -> Tensor:
    """activation(gate) · up of rows gate | up."""
    width = x.shape[1] // 2
    out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    block = min(2048, triton.next_power_of_2(width))
    gate_kernel[(x.shape[0], triton.cdiv(width, block))](
        x, out, x.stride(0), WIDTH=width, ACTIVATION=activation, BLOCK=block, PDL=PDL,
        num_warps=4 if block >= 1024 else 1, **EARLY,
    )  # fmt: skip
    return out


@triton.jit
def embed_kernel(
    tokens_ptr, table_ptr, out_ptr, scale, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dims = tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    x = tl.load(table_ptr + token * stride + dims, mask=dims < WIDTH, other=0.0).to(tl.float32) * scale
    tl.store(out_ptr + row * WIDTH + dims, x.to(out_ptr.dtype.element_ty), mask=dims < WIDTH)


def embed(table: Tensor, tokens: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    width = table.shape[1]
    out = torch.empty(tokens.shape[0], width, dtype=dtype, device=table.device)
    block = triton.next_power_of_2(width)
    embed_kernel[(tokens.shape[0],)](
        tokens, table, out, scale, table.stride(0), WIDTH=width, BLOCK=block, PDL=PDL, num_warps=4, **EARLY
    )
    return out
