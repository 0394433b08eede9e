"""Exact products with weights of few bits: bits do not depend on the number of rows, values are the decoded matrix's.

Under Triton's interpreter anywhere, and on the card with `-m gpu`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
pytest.importorskip("triton")

from tests.ops.test_kept import KINDS, random_blocks  # noqa: E402
from twostroke.ops.cuda.exact import ExactCudaOps  # noqa: E402
from twostroke.ops.cuda.kernels import exact_narrow  # noqa: E402
from twostroke.ops.cuda.kernels.decoded import ordered_rows  # noqa: E402
from twostroke.ops.cuda.kernels.narrow_tiles import INT4  # noqa: E402
from twostroke.ops.cuda.kernels.quantized import Int4, Narrow, as_float  # noqa: E402
from twostroke.ops.cuda.kernels.rows import NOTHING  # noqa: E402
from twostroke.ops.cuda.weights import FloatMatrix  # noqa: E402
from twostroke.ops.interface import Gate, Norm  # noqa: E402
from twostroke.ops.select import make_ops  # noqa: E402

DEVICE = torch.device("cuda" if ON_CARD else "cpu")
DTYPES = [torch.bfloat16, torch.float32] if ON_CARD else [torch.float32]  # the interpreter multiplies no bfloat16
slow_here = pytest.mark.gpu if ON_CARD else pytest.mark.slow  # the interpreter takes long
BITS = ("int8", *(pytest.param(name, marks=slow_here) for name in ("fp8", "int4")))
# Outputs and inputs that do not fill the last tile, and for int4 the last slice.
SHAPES = [(80, 192), (4096, 14336), (6144, 4096), (28672, 4096)] if ON_CARD else [(80, 192)]
ROWS = (1, 2, 5, 16, 17, 64, 130, *((9, 33, 65, 200, 256, 257, 500, 1024) if ON_CARD else ()))
MOST = 1300 if ON_CARD else 131
pytestmark = [pytest.mark.gpu] if ON_CARD else []


@pytest.fixture(autouse=True)
def one_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies tiles with a library whose order of additions depends on the processor and on the
    tile's shape. Here each tile is summed in float64 and rounded once."""
    if ON_CARD:
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_ops(dtype: torch.dtype, **given: Any) -> ExactCudaOps:
    """Under the interpreter fewer rows have a decoded copy."""
    ops = ExactCudaOps(dtype, DEVICE, **given)
    ops.narrow_products.most = min(ops.narrow_products.most, MOST // 2)
    return ops


def make(bits: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[ExactCudaOps, Narrow]:
    ops = exact_ops(dtype, quantize=bits)
    weight = ops.adopt((randn(*shape) * shape[1] ** -0.5).to(DEVICE, dtype), randn(shape[0], seed=1))
    assert not isinstance(weight, FloatMatrix)
    return ops, weight


def check_rows(operation: Callable[[slice], torch.Tensor], counts: tuple[int, ...] = ROWS) -> torch.Tensor:
    """Each of the numbers of rows gives the rows of the whole."""
    whole = operation(slice(0, MOST))
    for rows in counts:
        mine = slice(MOST - rows - 1, MOST - 1)
        assert torch.equal(operation(mine), whole[mine]), rows
    return whole


def check_chunks(operation: Callable[[slice], torch.Tensor], whole: torch.Tensor) -> None:
    start = 0
    for rows in (3, 64, 1, MOST - 68):
        assert torch.equal(operation(slice(start, start + rows)), whole[start : start + rows]), (start, rows)
        start += rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_no_number_of_rows_changes_a_bit(bits: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """With a norm before, and added to something."""
    ops, weight = make(bits, shape, dtype)
    x, base = randn(MOST, shape[1], seed=2).to(DEVICE, dtype), randn(MOST, shape[0], seed=3).to(DEVICE, dtype)
    norm = Norm((randn(shape[1], seed=4) * 0.2 + 1).to(DEVICE), 1e-5)

    def operation(rows: slice) -> torch.Tensor:
        return ops.linear(x[rows], weight, before=norm, add_to=base[rows].clone())

    check_chunks(operation, check_rows(operation))
    if dtype == torch.bfloat16 or not ON_CARD:  # codes are not multiplied with float32 on a card
        assert ops.narrow_products.same and all(ops.narrow_products.same.values())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("before", [None, Gate("silu")], ids=str)
def test_values(bits: str, before: Gate | None) -> None:
    """Of few rows and of many, with the bias."""
    dtype, (n, k) = DTYPES[0], SHAPES[0]
    ops, weight = make(bits, (n, k), dtype)
    x = randn(130, k if before is None else 2 * k, seed=2).to(DEVICE, dtype)
    rows = x.double() if before is None else torch.nn.functional.silu(x[:, :k].double()) * x[:, k:].double()
    assert weight.bias is not None
    expected = rows @ as_float(weight, torch.float32).double().t() + weight.bias.double()
    for found, wanted in ((ops.linear(x, weight, before=before), expected),
                          (ops.linear(x[7:12], weight, before=before), expected[7:12])):  # fmt: skip
        assert (found.double() - wanted).norm() / wanted.norm() < (1e-5 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("bits", BITS)
def test_the_copy_holds_the_weights_in_the_lanes_order(bits: str) -> None:
    _, weight = make(bits, SHAPES[0], torch.float32)
    k = SHAPES[0][1]
    numbers = torch.arange(1, k + 1, dtype=torch.float32, device=DEVICE)[None]
    order = ordered_rows(numbers, weight.codes.shape[1], weight.format, NOTHING, None, 0.0, plain=True)[0][0].long()
    assert sorted(order[order > 0].tolist()) == list(range(1, k + 1))
    copy, plain = exact_narrow.ordered_copy(weight, torch.bfloat16), as_float(weight, torch.bfloat16)
    assert not copy[:, order == 0].any()
    found, wanted = copy[:, order > 0], plain[:, order[order > 0] - 1]
    if weight.format == INT4 and ON_CARD:  # one rounding here, two there
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("bits", BITS)
def test_where_the_kernel_has_other_bits_the_copy_serves(
    bits: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = DTYPES[0]
    ops, weight = make(bits, SHAPES[0], dtype)
    x = randn(20, SHAPES[0][1], seed=2).to(DEVICE, dtype)
    expected = ops.linear(x, weight)
    right, asked = exact_narrow.narrow_product, []

    def wrong(*given: object) -> torch.Tensor:
        asked.append(given)
        return right(*given).mul_(1.01)  # type: ignore[arg-type]

    monkeypatch.setattr(exact_narrow, "narrow_product", wrong)
    other = exact_ops(dtype, quantize=bits)
    for _ in range(2):
        assert torch.equal(other.linear(x, weight), expected)
    assert len(asked) == 1  # when it was tried
    assert "decoded in each step" in caplog.text


def test_the_tensor_cores_take_the_inputs_as_they_are_given() -> None:
    """wgmma, whose lanes hold two neighbours each. Before mma.sync the compiler takes four where bytes are loaded, and
    so changes the order of additions."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_narrow"], capture_output=True, text=True, check=True, env=plain
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(16|32|64)k16 kWidth 2", line), line


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_a_file(kind: str) -> None:
    name, parts = KINDS[kind]
    dtype = DTYPES[0]
    ops = exact_ops(dtype, keep=True)
    weight = ops.pack(parts())
    assert type(weight).__name__ == name
    x = randn(MOST, 256, seed=2).to(DEVICE, dtype)
    whole = check_rows(lambda rows: ops.linear(x[rows], weight), ROWS if ON_CARD else (1, 17))
    wanted = x.double() @ as_float(weight, torch.float32).double().t()  # type: ignore[arg-type]
    assert (whole.double() - wanted).norm() / wanted.norm() < (1e-5 if dtype == torch.float32 else 6e-3)


def test_what_has_no_kernel_is_decoded() -> None:
    ops = ExactCudaOps(DTYPES[0], DEVICE, keep=True)
    for name in ("Q8_0", "F8_32", "Q5_0"):  # 8 bits with scales in groups, and others
        assert isinstance(ops.pack([random_blocks(name, 32, 256)]), FloatMatrix)
    assert isinstance(ExactCudaOps(DTYPES[0], DEVICE).pack([random_blocks("Q4_0", 32, 256)]), FloatMatrix)


def test_the_backend_is_made_with_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.ops.cuda.exact.ExactCudaOps", partial(ExactCudaOps, device=DEVICE))
    kept = make_ops("cuda", None, 1, exact=True)
    packed = make_ops("cuda", None, 1, "int4", exact=True)
    asked = make_ops("cuda", "bfloat16", 1, exact=True)
    assert isinstance(kept, ExactCudaOps) and isinstance(packed, ExactCudaOps) and isinstance(asked, ExactCudaOps)
    assert kept.keep and not packed.keep and not asked.keep
    assert packed.quantize == "int4"


def test_no_row_is_gated_early() -> None:
    """The kernel for that adds in an order of its own."""
    ops, weight = make("int4", SHAPES[0], DTYPES[0])
    x, norm = randn(1, SHAPES[0][1]).to(DEVICE, DTYPES[0]), Norm(torch.ones(SHAPES[0][1], device=DEVICE), 1e-5)
    assert isinstance(weight, Int4)
    assert ops.gated(x, weight, norm, Gate("silu")) is None
