"""The exact GPU kernels: bits do not depend on how rows are cut, and values are the specification's.

Under Triton's interpreter anywhere, and on the card with `-m gpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from twostroke.record import replace

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
pytest.importorskip("triton")

from tests.ops.cases import DECODE, MIXED, Case, make_step, slots_of  # noqa: E402
from tests.ops.test_triton import DEVICE, LIMITS, REFERENCE, check_attention, close, copied, on_device  # noqa: E402
from twostroke.ops.cuda.cuts import DeviceBatch  # noqa: E402
from twostroke.ops.cuda.exact import ExactCudaOps  # noqa: E402
from twostroke.ops.cuda.kernels.exact_matmul import Products  # noqa: E402
from twostroke.ops.formats import from_float  # noqa: E402
from twostroke.ops.interface import GroupBlocks, Norm  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_CARD else []
DTYPES = [torch.float32, torch.bfloat16] if ON_CARD else [torch.float32]
FEW = MIXED if ON_CARD else ((0, 9), (126, 5), (40, 1))
STREAMS = DECODE if ON_CARD else ((5, 1), (130, 1))
VALUES = (
    Case(FEW, window=100),
    Case(FEW, softcap=3.0, head_dim=20, rotary=8),
    Case(FEW, format="int8", head_dim=32, window=40),
)
ORDERS = (
    Case(((0, 1300) if ON_CARD else (122, 9),), qk_norm=True),
    Case(((0, 1300) if ON_CARD else (124, 7),), window=40, heads=3, kv_heads=1, format="int8"),
)
CARD_ORDERS = (
    Case(((0, 3000),), head_dim=128, heads=32, kv_heads=8, format="bfloat16"),
    Case(((0, 1300),), head_dim=256, heads=4, kv_heads=1, window=512, qk_norm=True, format="bfloat16"),
    Case(((0, 700),), head_dim=64, heads=9, kv_heads=3, softcap=20.0, format="int8"),
) if ON_CARD else ()  # fmt: skip


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_values(case: Case) -> None:
    ops = ExactCudaOps(torch.float32, DEVICE)
    check_attention(ops, case, False, LIMITS.get(case.format, 1e-4))
    check_attention(ops, replace(case, requests=STREAMS), True, LIMITS.get(case.format, 1e-4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ORDERS + CARD_ORDERS, ids=str)
def test_no_chunking_changes_a_bit(case: Case, dtype: torch.dtype) -> None:
    """A prompt at once, in chunks, and token by token."""
    ops = ExactCudaOps(dtype, DEVICE)
    qkv, attention, cache, batch = make_step(case)
    attention, qkv = on_device(attention, DEVICE), qkv.to(DEVICE, dtype)
    if attention.rope is not None:
        rope = attention.rope
        attention = replace(attention, rope=replace(rope, cos=rope.cos.repeat(8, 1), sin=rope.sin.repeat(8, 1)))
    table, length, before = batch.groups[0].tables[0], qkv.shape[0], case.requests[0][0]

    def run(counts: list[int]) -> torch.Tensor:
        kv, out, start = copied(cache, DEVICE), [], 0
        for count in counts:
            positions, context = torch.arange(start, start + count) + before, before + start + count
            step = DeviceBatch(
                positions.to(DEVICE), positions.to(DEVICE),
                torch.tensor([0, count], dtype=torch.int32, device=DEVICE),
                torch.tensor([context], dtype=torch.int32, device=DEVICE),
                (GroupBlocks(slots_of(table, positions).to(DEVICE), table.view(1, -1).to(DEVICE)),),
                positions.to(DEVICE), np.array([count]), np.array([context]), streams=count == 1,
            )  # fmt: skip
            out.append(ops.attend(qkv[start : start + count].contiguous(), attention, kv, step, 0))
            start += count
        return torch.cat(out)

    expected = run([length])
    few = 40 if ON_CARD else 1
    for counts in ([length - few] + [1] * few, [2, length - 5, 3], [few, length - few]):
        assert torch.equal(run(counts), expected), counts[:3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(50, 72), (4096, 14336), (6144, 4096)] if ON_CARD else [(50, 72)])
def test_no_number_of_rows_changes_a_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    n, k = shape
    total = 1300 if ON_CARD else 37
    x = torch.randn(total, k, generator=generator).to(DEVICE, dtype)
    weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(DEVICE, dtype)
    base = torch.randn(total, n, generator=generator).to(DEVICE, dtype)
    products = Products()
    whole, added = products(x, weight, None), products(x, weight, base.clone())
    exact = x.double() @ weight.double().t()
    assert (whole.double() - exact).norm() / exact.norm() < (1e-5 if dtype == torch.float32 else 4e-3)
    for rows in [1, 2, 7, 9, 17, 33, 64, 65, 100, 128, 200, 256, 384, 500, 1024] if ON_CARD else [1, 2, 17, 36]:
        mine = slice(total - rows - 1, total - 1)
        assert torch.equal(products(x[mine], weight, None), whole[mine]), rows
        assert torch.equal(products(x[mine], weight, base[mine].clone()), added[mine]), rows


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("adds", [False, True])
def test_biases(rows: int, adds: bool) -> None:
    """Of q, k and v, and of the output, which is added to the residual stream."""
    ops, generator = ExactCudaOps(torch.float32, DEVICE), torch.Generator().manual_seed(rows)
    x, base = torch.randn(rows, 72, generator=generator), torch.randn(rows, 50, generator=generator)
    parts, bias = [from_float(torch.randn(50, 72, generator=generator).numpy())], torch.randn(50, generator=generator)
    expected = REFERENCE.linear(x, REFERENCE.pack(parts, bias), add_to=base.clone() if adds else None)
    got = ops.linear(x.to(DEVICE), ops.pack(parts, bias), add_to=base.clone().to(DEVICE) if adds else None)
    close(got, expected)


def test_rows_before_the_product_are_treated_alike() -> None:
    """Norms and gates: a row's bits are the same alone."""
    ops = ExactCudaOps(torch.float32, DEVICE)
    x = torch.randn(5, 72, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    norm = Norm(torch.rand(72, generator=torch.Generator().manual_seed(1)).to(DEVICE), 1e-6)
    assert torch.equal(ops.norm(x, norm)[3:4], ops.norm(x[3:4].contiguous(), norm))


def test_codes_are_multiplied_in_the_order_in_which_they_are_given() -> None:
    """On an H200 that need not be there: else a token alone and a row of a chunk would add in different orders."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_orders"]
    done = subprocess.run(command, capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert {instruction for _, instruction, *_ in found} == {"wgmma", "mma.sync"}
    assert all(widths == ["2"] for _, _, *widths in found), done.stdout
