"""The GPU kernels against the specification: under Triton's interpreter anywhere, and on the card with `-m gpu`."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
import torch

from twostroke.record import replace

ON_CARD = torch.cuda.is_available()
if not ON_CARD and "TRITON_COMPILE_ONLY" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton: its own library is compiled by it too
pytest.importorskip("triton")

from tests import helpers  # noqa: E402
from tests.ops.cases import CASES, DECODE, MIXED, Case, make_step  # noqa: E402
from tests.ops.int4 import whole_int4  # noqa: E402
from twostroke.ops.cuda.backend import CudaOps  # noqa: E402
from twostroke.ops.cuda.cuts import DeviceBatch  # noqa: E402
from twostroke.ops.cuda.kernels.decoded import DecodedShape  # noqa: E402
from twostroke.ops.cuda.kernels.draft_decode import draft_attention, serves  # noqa: E402
from twostroke.ops.cuda.kernels.prefill import split_for  # noqa: E402
from twostroke.ops.cuda.kernels.quantized import Int4, Int8, as_float, to_fp8, to_int4  # noqa: E402
from twostroke.ops.cuda.weights import as_tensor  # noqa: E402
from twostroke.ops.formats import Stored, from_float  # noqa: E402
from twostroke.ops.interface import Batch, Gate, KVLayer, Norm  # noqa: E402
from twostroke.ops.reference.backend import ReferenceMatrix, ReferenceOps  # noqa: E402

DEVICE = torch.device("cuda" if ON_CARD else "cpu")
REFERENCE = ReferenceOps()
# Under the interpreter every token costs milliseconds: requests of all the kinds that MIXED has, but shorter. Where
# tiles are what a case is about, requests are long enough for several of them.
SHORT = ((0, 18), (20, 3), (63, 1), (0, 1), (15, 1), (16, 2), (200, 3))
SEVERAL_TILES = ("mixed", "multi-head", "groups of 3", "window")
LIMITS = {"int8": 1e-2, "bfloat16": 8e-3}  # codes on a border, and the interpreter cuts bfloat16 off
pytestmark = [pytest.mark.gpu] if ON_CARD else []


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    return CudaOps(torch.float32, DEVICE)


def moved(batch: Batch, streams: bool) -> Batch:
    there = helpers.moved(batch, DEVICE)
    counts, lengths = batch.starts.diff().numpy(), batch.contexts.numpy()
    return DeviceBatch(
        there.tokens, there.positions, there.starts, there.contexts, there.groups, there.logit_rows, counts, lengths,
        streams,
    )  # fmt: skip


def copied(kv: KVLayer, device: torch.device) -> KVLayer:
    def copy(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    values = kv.values if kv.value_scales is None else turned(kv.values)
    return KVLayer(kv.format, copy(kv.keys), copy(values), copy(kv.key_scales), copy(kv.value_scales))


def turned(values: torch.Tensor) -> torch.Tensor:
    """V of few bits as the GPU keeps it, transposed within its blocks, in a tensor like it."""
    out = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype)
    return out.copy_(values.transpose(-1, -2).reshape(values.shape))


def on_device(attention, device):
    from twostroke.ops.interface import RopeTable

    def norm(n):
        return None if n is None else Norm(n.weight.to(device), n.eps)

    rope = attention.rope and RopeTable(attention.rope.cos.to(device), attention.rope.sin.to(device))
    sinks = None if attention.sinks is None else attention.sinks.to(device)
    norms = {"query_norm": norm(attention.query_norm), "key_norm": norm(attention.key_norm)}
    return replace(attention, rope=rope, sinks=sinks, **norms)


def close(a: torch.Tensor, b: torch.Tensor, limit: float = 2e-5) -> None:
    error = (a.cpu().double() - b.double()).norm() / b.double().norm()
    assert error < limit, f"relative error {error:.2e}"


def check_attention(ops: CudaOps, case: Case, streams: bool, limit: float = 2e-5) -> None:
    if ON_CARD and case.format in ("int8", "fp8"):
        ops = type(ops)(torch.bfloat16, DEVICE)  # in float32 such a cache is refused on a card
        limit += 4e-3  # what bfloat16 rounds off
    qkv, attention, kv, batch = make_step(case)
    qkv = qkv.to(ops.dtype).float()
    mine, there = copied(kv, DEVICE), on_device(attention, DEVICE)
    expected = REFERENCE.attend(qkv, attention, kv, batch, 0)
    out = ops.attend(qkv.to(DEVICE, ops.dtype), there, mine, moved(batch, streams), 0)
    close(out, expected, limit)
    if ops.dtype == torch.float32 and kv.format not in ("int8", "fp8"):
        block, offset = batch.groups[0].slots // 16, batch.groups[0].slots % 16
        close(mine.keys[block.to(DEVICE), :, offset.to(DEVICE)].float(), kv.keys[block, :, offset].float(), 5e-3)


@pytest.mark.parametrize("change", [
    {"head_dim": 128, "heads": 2, "kv_heads": 1}, {"window": 100},
    {"head_dim": 64, "heads": 2, "kv_heads": 1, "softcap": 3.0},
], ids=str)  # fmt: skip
def test_fp8_cache(ops: CudaOps, change: dict) -> None:
    """Long contexts, because the interpreter cuts fp8 off where others round it, and new tokens should weigh little."""
    for requests, streams in ((((300, 1), (127, 1), (480, 1)), True), (((310, 1), (400, 3)), False)):
        check_attention(ops, Case(requests, format="fp8", **change), streams, limit=8e-3)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.format != "int4"])  # a CPU's
def test_attention(ops: CudaOps, name: str) -> None:
    case = CASES[name]
    if case.requests == MIXED and name not in SEVERAL_TILES and not ON_CARD:
        case = replace(case, requests=SHORT)
    check_attention(ops, case, streams=False, limit=LIMITS.get(case.format, 1e-4))


@pytest.mark.parametrize("change", [
    {}, {"window": 100}, {"qk_norm": True}, {"softcap": 3.0}, {"head_dim": 80, "rotary": 40}, {"format": "int8"},
    {"heads": 9, "kv_heads": 3}, {"format": "bfloat16"},
    *(pytest.param(change, marks=pytest.mark.slow) for change in (
        {"format": "int8", "head_dim": 80, "heads": 2, "kv_heads": 1, "softcap": 3.0},
        {"format": "int8", "head_dim": 128, "heads": 2, "kv_heads": 1, "qk_norm": True},
        {"format": "int8", "head_dim": 256, "heads": 8, "kv_heads": 1},
    )),
], ids=str)  # fmt: skip
def test_fused_decode(ops: CudaOps, change: dict) -> None:
    requests = DECODE
    case = Case(requests, **change)
    check_attention(ops, case, streams=True, limit=LIMITS.get(case.format, 1e-4))


@pytest.mark.parametrize("change", [
    {}, {"qk_norm": True}, {"softcap": 3.0}, {"head_dim": 80, "rotary": 40}, {"heads": 9, "kv_heads": 3},
    {"format": "bfloat16"},
], ids=str)  # fmt: skip
def test_attention_of_drafts(ops: CudaOps, change: dict) -> None:
    """Rows of several requests with one split, two, a full one, and nothing before them."""
    case = Case(((0, 3), (200, 5), (63, 1), (128, 8), (124, 7)), **change)
    qkv, attention, kv, batch = make_step(case)
    mine, there, step = copied(kv, DEVICE), on_device(attention, DEVICE), moved(batch, streams=False)
    expected = REFERENCE.attend(qkv, attention, kv, batch, 0)
    assert serves(there, mine, step, 0)
    out = torch.empty(expected.shape, device=DEVICE)
    draft_attention(qkv.to(DEVICE), there, mine, step, 0, out, ops.scratch, queries=8)
    close(out, expected, LIMITS.get(case.format, 1e-4))
    block, offset = batch.groups[0].slots // 16, batch.groups[0].slots % 16
    close(mine.keys[block.to(DEVICE), :, offset.to(DEVICE)].float(), kv.keys[block, :, offset].float(), 5e-3)
    close(mine.values[block.to(DEVICE), :, offset.to(DEVICE)].float(), kv.values[block, :, offset].float(), 5e-3)


@pytest.mark.skipif(not ON_CARD, reason="the interpreter cuts bfloat16 off")
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (32, 8), (8, 1)])
@pytest.mark.parametrize("context", [5, 127, 300, 900])
def test_one_stream_in_bfloat16(heads: int, kv_heads: int, context: int) -> None:
    """As compiled for one stream, where the first tile is loaded before the projection ends."""
    case = Case(((context, 1),), head_dim=128, heads=heads, kv_heads=kv_heads, qk_norm=True, format="bfloat16")
    check_attention(CudaOps(torch.bfloat16, DEVICE), case, streams=True, limit=1e-2)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("before", ["none", "norm", "silu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(ops: CudaOps, monkeypatch: pytest.MonkeyPatch, rows: int, before: str, bias: bool) -> None:
    """One row, few rows, and many, which the library multiplies."""
    monkeypatch.setattr(ops, "few_rows", 32)  # on the card; the interpreter uses the library otherwise
    generator = torch.Generator().manual_seed(rows)
    wide, out = 72, 50
    gate = before in ("silu", "gelu_tanh")
    x = torch.randn(rows, 2 * wide if gate else wide, generator=generator)
    parts = [from_float(torch.randn(n, wide, generator=generator).numpy()) for n in (20, out - 20)]
    b = torch.randn(out, generator=generator) if bias else None
    norm = Norm(torch.rand(wide, generator=generator) + 0.5, 1e-5)
    mine = Norm(norm.weight.to(DEVICE), 1e-5)
    residual = torch.randn(rows, out, generator=generator)
    kinds = {"none": None, "norm": norm, "silu": Gate("silu"), "gelu_tanh": Gate("gelu_tanh")}
    for add_to in (None, residual):
        expected = REFERENCE.linear(
            x, REFERENCE.pack(parts, b), before=kinds[before], add_to=None if add_to is None else add_to.clone()
        )
        got = ops.linear(
            x.to(DEVICE), ops.pack(parts, b), before=mine if before == "norm" else kinds[before],
            add_to=None if add_to is None else add_to.to(DEVICE),
        )  # fmt: skip
        close(got, expected)


def test_shared_tiles(ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs may share the context of one tile."""
    monkeypatch.setattr("twostroke.ops.cuda.cuts.split_for", lambda *_: 3)
    check_attention(ops, Case(((0, 9), (200, 3), (63, 1), (250, 34))), streams=False)
    check_attention(ops, Case(((200, 12), (16, 5)), window=24), streams=False)


def test_a_share_of_a_tile_may_hold_nothing_for_some_queries(ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 64 queries from the start of a prompt, in shares of 32 keys: half of them see nothing of the second."""
    monkeypatch.setattr("twostroke.ops.cuda.cuts.split_for", lambda *_: 2)
    check_attention(ops, Case(((0, 64),), heads=1, kv_heads=1), streams=False)


def test_a_tile_more_does_not_cost_a_round_more() -> None:
    """8 K/V heads at 64k tokens: eight tiles just fill an H200 four times over; ten would fill it five times with a
    little left over, unless they are cut finer."""
    assert split_for(8, 8, 256, 65536) == 4
    assert split_for(10, 8, 320, 65536) > 4
    assert split_for(32, 8, 1024, 65536) == 1  # enough programs by themselves
    assert split_for(1, 8, 32, 1500) == 1  # too little to be shared


@pytest.mark.parametrize("quantize", ["fp8", "int8", "int4"])
@pytest.mark.parametrize(("rows", "before"), [(1, "none"), (2, "silu"), (3, "norm"), (7, "gelu_tanh")])
def test_quantized(quantize: str, rows: int, before: str) -> None:
    """A few rows straight from the codes give what the decoded matrix gives."""
    ops = CudaOps(torch.float32, DEVICE, quantize)
    generator = torch.Generator().manual_seed(rows)
    wide, out = 1408 if before == "none" else 256, 48
    gate = before in ("silu", "gelu_tanh")
    x = torch.randn(rows, 2 * wide if gate else wide, generator=generator)
    bias, residual = torch.randn(out, generator=generator), torch.randn(rows, out, generator=generator)
    weight = ops.adopt(torch.randn(out, wide, generator=generator).to(DEVICE), bias)
    matrix = as_float(weight, torch.float32).cpu()
    multiplied = whole_int4(weight) if isinstance(weight, Int4) and rows == 1 else matrix  # one row: not rounded
    norm = Norm(torch.rand(wide, generator=generator) + 0.5, 1e-5)
    kinds = {"none": None, "norm": norm, "silu": Gate("silu"), "gelu_tanh": Gate("gelu_tanh")}
    expected = REFERENCE.linear(x, ReferenceMatrix(multiplied, bias), before=kinds[before], add_to=residual.clone())
    mine = Norm(norm.weight.to(DEVICE), 1e-5) if before == "norm" else kinds[before]
    close(ops.linear(x.to(DEVICE), weight, before=mine, add_to=residual.to(DEVICE)), expected, 1e-4)
    table = ops.embed(weight, torch.tensor([3, 7], device=DEVICE), 1.0)
    close(table, matrix[[3, 7]])


@pytest.mark.parametrize(("quantize", "wide", "rows"), [
    ("int8", 256, 40), ("int4", 256, 40), ("int8", 256, 300), ("int4", 320, 300), ("int4", 96, 5), ("fp8", 320, 40),
    ("fp8", 256, 300),
])  # fmt: skip
def test_many_rows(quantize: str, wide: int, rows: int) -> None:
    """int8 is multiplied with both parts of x, or decoded before; int4 and fp8 are decoded on the way, or before.
    Slices of int4 may end with zeros."""
    limit = 1e-4
    ops = CudaOps(torch.float32, DEVICE, quantize)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, wide, generator=generator)
    weight = ops.adopt(torch.randn(80, wide, generator=generator).to(DEVICE), torch.randn(80, generator=generator))
    expected = x @ as_float(weight, torch.float32).cpu().t() + weight.bias.cpu()
    residual = torch.randn(rows, 80, generator=generator)
    close(ops.linear(x.to(DEVICE), weight), expected, limit)
    close(ops.linear(x.to(DEVICE), weight, add_to=residual.clone().to(DEVICE)), expected + residual, limit)


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
@pytest.mark.parametrize(("rows", "shape"), [
    (3, (4, 1, 1, 3)), (20, (4, 1, 4, 2)), (70, (8, 1, 2, 4)), (40, (4, 2, 1, 3)), (16, (4, 2, 2, 3)),
])  # fmt: skip
def test_shares_of_the_inputs(
    quantize: str, rows: int, shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that share the inputs of a tile, in the precision that serving has."""
    monkeypatch.setattr("twostroke.ops.cuda.kernels.decoded.shape_for", lambda *_: DecodedShape(*shape))
    ops = CudaOps(torch.bfloat16 if ON_CARD else torch.float32, DEVICE, quantize)
    generator = torch.Generator().manual_seed(rows)
    wide = 512
    x = torch.randn(rows, wide, generator=generator).bfloat16()
    weight = ops.adopt(torch.randn(48, wide, generator=generator).to(DEVICE), torch.randn(48, generator=generator))
    expected = x.float() @ as_float(weight, torch.float32).cpu().t() + weight.bias.cpu()
    residual = torch.randn(rows, 48, generator=generator).bfloat16()
    given = [value.to(DEVICE, ops.dtype) for value in (x, residual)]
    close(ops.linear(given[0], weight).float(), expected, 4e-3 if ON_CARD else 1e-4)
    close(ops.linear(given[0], weight, add_to=given[1]).float(), expected + residual, 4e-3 if ON_CARD else 1e-4)


def test_the_head_keeps_eight_bits() -> None:
    ops, weight = CudaOps(torch.float32, DEVICE, "int4"), torch.randn(32, 64).to(DEVICE)
    assert isinstance(ops.adopt(weight), Int4) and isinstance(ops.adopt(weight, outer=True), Int8)


def test_four_bits_keep_what_has_four_bits() -> None:
    """A file whose groups of 32 have a scale and a least value loses next to nothing."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (8, 6, 32), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15
    weight = (codes * 0.013 - 0.1).flatten(1)
    close(as_float(to_int4(weight.to(DEVICE), None), torch.float32), weight, 4e-3)


def test_fp8_rows_take_the_best_scale() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    least = weight.abs().amax(dim=1, keepdim=True) / 448
    plain = (weight / least).to(torch.float8_e4m3fn).float() * least
    found = as_float(to_fp8(weight, None), torch.float32)
    assert (found - weight).norm() < 0.97 * (plain - weight).norm()


def test_read_only_weights_are_taken_without_a_warning() -> None:
    """A mapped file is read-only; torch would warn of it."""
    values = torch.randn(4, 8).bfloat16()
    data = values.view(torch.int16).numpy().view(np.uint8).reshape(-1)
    data.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(as_tensor(Stored("BF16", (4, 8), data)), values)


def test_rows(ops: CudaOps) -> None:
    generator = torch.Generator().manual_seed(0)
    table = from_float(torch.randn(30, 72, generator=generator).numpy())
    tokens = torch.tensor([3, 29, 0, 3])
    close(ops.embed(ops.pack([table]), tokens.to(DEVICE), 2.5), REFERENCE.embed(REFERENCE.pack([table]), tokens, 2.5))
    x, norm = torch.randn(5, 72, generator=generator), Norm(torch.rand(72, generator=generator), 1e-6)
    close(ops.norm(x.to(DEVICE), Norm(norm.weight.to(DEVICE), 1e-6)), REFERENCE.norm(x, norm))
