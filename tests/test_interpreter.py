"""Triton's interpreter as the tests use it: faster, with the same bits."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from tests import interpreter_types  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


@triton.jit
def inner(x, scale: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.where(x > 0.25, x * scale, -x) / 2 + 1.5


@triton.jit
def kernel(a, b, out, n, height: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every way in which shapes and types meet: numbers, rows, columns, joined axes, reductions, pointers, casts."""
    rows, columns = tl.arange(0, height), tl.program_id(0) * width + tl.arange(0, width)
    at = rows[:, None] * n + columns[None, :]
    keep = (columns < n)[None, :] & (rows >= 0)[:, None]
    x, bits = tl.load(a + at, keep, other=0.0).to(tl.float32), tl.load(b + at, keep, other=3)
    low, high = (bits & 0xF).to(tl.uint8), (bits // 3 >> 4).to(tl.int64) - 8
    total = tl.sum(x, axis=1)[:, None] + tl.max(inner(x, 3), axis=0) + tl.full((height, width), 0.5, tl.float32)
    product = tl.dot(x, tl.trans(x), input_precision="ieee")
    joined = tl.reshape(tl.join(low * 2, (low ^ 5) % 7), (height, 2 * width))
    total += tl.sum(product, axis=1, keep_dims=True) + tl.sum(joined.to(tl.float32), axis=1)[:, None]
    total = tl.maximum(2 - total, high.to(tl.float32)) / (1 + tl.exp(-tl.abs(x)))
    total += tl.cumsum(x, axis=1) + x.to(tl.bfloat16).to(tl.float32) + total.shape[1] + (tl.num_programs(0) - 1)
    for turn in tl.static_range(2):
        total = total * (turn + 1) - tl.sigmoid(total)
    tl.store(out + at, total.to(out.dtype.element_ty), keep)


def run(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(16, 40, generator=generator).to(dtype)
    b = torch.randint(0, 256, (16, 40), generator=generator, dtype=torch.int32)
    out = torch.zeros(16, 40)
    kernel[(2,)](a, b, out, 40, 16, 32)
    assert out.isfinite().all() and out.unique().numel() > 300
    return out


def test_the_known_version_is_replaced() -> None:
    assert bool(interpreter_types.originals) or triton.__version__ not in interpreter_types.KNOWN.values()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_same_bits(dtype: torch.dtype) -> None:
    found = run(dtype)
    ours = interpreter_types.put(interpreter_types.originals)
    try:
        expected = run(dtype)
    finally:
        interpreter_types.put(ours)
    assert torch.equal(found, expected)


@triton.jit
def product_kernel(a, b, out, height: tl.constexpr, inner_size: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, middle, columns = tl.arange(0, height), tl.arange(0, inner_size), tl.arange(0, width)
    x = tl.load(a + rows[:, None] * inner_size + middle[None, :])
    y = tl.load(b + middle[:, None] * width + columns[None, :])
    tl.store(out + rows[:, None] * width + columns[None, :], tl.dot(x, y, input_precision="ieee"))


def test_a_row_of_a_product_has_the_same_bits_wherever_it_is() -> None:
    """As on a GPU. OpenBLAS alone does not promise it (OPENBLAS_CORETYPE=Haswell)."""
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(16, 64, generator=generator), torch.randn(64, 64, generator=generator)

    def product(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(16, 64)
        product_kernel[(1,)](x.contiguous(), b, out, 16, 64, 64)
        return out

    whole = product(a)
    torch.testing.assert_close(whole, a @ b)
    for shift in range(1, 16):
        assert torch.equal(product(a.roll(shift, 0)).roll(-shift, 0), whole)


def test_shapes_and_types_are_refused_as_before() -> None:
    core = tl.core
    for shape in ([3], [0], [2.0], [True, 3], [core.constexpr(6)], [1 << 21]):
        with pytest.raises((TypeError, ValueError)):
            core.block_type(tl.float32, shape)
    with pytest.raises(AssertionError):
        core.block_type(tl.float32, (2, 4))
    with pytest.raises(TypeError, match="0d"):
        core.block_type(tl.float32, [])


def test_types_are_what_they_were() -> None:
    one, other = tl.core.block_type(tl.int8, [2, tl.core.constexpr(4)]), tl.core.block_type(tl.float32, [2, 4])
    assert one.shape is other.shape or not interpreter_types.originals
    assert one != other and one.with_element_ty(tl.float32) == other and one.with_element_ty(tl.float32).numel == 8
    assert str(other) == other.name == "<['2', '4'], fp32>"
    assert tl.float32 == tl.core.constexpr(tl.float32) and tl.float32 != tl.float16 and tl.float32 != 1
    pointers = one.with_element_ty(tl.core.pointer_type(tl.int8))
    assert pointers.element_ty == tl.core.pointer_type(tl.int8) and pointers != one
