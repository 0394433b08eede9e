"""The native CPU backend: every op against the specification, on every instruction set this machine has."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.cases import BYTES, CASES, Case, alone, copied, make_step, part_of
from twostroke.ops.cpu.library import available
from twostroke.ops.formats import FORMATS, Stored, dequantize, from_float, layout_of
from twostroke.ops.interface import Gate, KVFormat, Norm
from twostroke.ops.reference.backend import ReferenceOps, gated
from twostroke.ops.select import make_ops
from twostroke.record import replace

if not available():
    pytest.skip("the native library is not built", allow_module_level=True)

from tests.ops.tensors import TensorOps
from twostroke.ops.cpu.backend import NativeCpuOps, PackedWeight, instruction_sets
from twostroke.ops.cpu.convert import narrowed, packable

ISAS = instruction_sets()
SLOW = ReferenceOps(byte_attention=True)
FLOATS = ("F32", "F16", "BF16")
STEPS = CASES | BYTES


@cache
def ops_on(isa: str, threads: int = 2, weights: str = "native") -> TensorOps:
    return TensorOps(NativeCpuOps(threads, weights, isa))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(name: str, outputs: int, inputs: int, seed: int = 0) -> Stored:
    """A random matrix: floats as they are, blocks of random bits under sane scales (every code occurs)."""
    rng = np.random.default_rng(seed)
    if name in FLOATS:
        x = rng.standard_normal((outputs, inputs), dtype=np.float32)
        if name == "BF16":
            return Stored(name, x.shape, (x.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8))
        return from_float(x.astype(np.float16) if name == "F16" else x)
    fmt = FORMATS[name]
    blocks = rng.integers(0, 256, (outputs * inputs // fmt.block, fmt.bytes), dtype=np.uint8)
    if name == "MXFP4":  # the scale is a power of two, in one byte
        blocks[:, 0] = rng.integers(117, 123, len(blocks))
        return Stored(name, (outputs, inputs), blocks.reshape(-1))
    halves = [208] if name == "Q6_K" else [0, 2] if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]
    for place in halves:
        scales = rng.uniform(-1e-2, 1e-2, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return Stored(name, (outputs, inputs), blocks.reshape(-1))


def quantized(x: Tensor, seconds: bool = False) -> Tensor:
    """What the kernels make of a row: codes of 8 bits, one scale for 32 of them; after a norm, the input that dominates
    its group keeps its value and does not count for the scale."""
    groups = x.view(x.shape[0], -1, 32)
    peak = groups.abs().amax(dim=-1, keepdim=True)
    outlier = seconds & (1.5 * peak**2 > (groups**2).sum(dim=-1, keepdim=True)) & (groups.abs() == peak)
    others = torch.where(outlier, 0.0, groups)
    most = others.abs().amax(dim=-1, keepdim=True)
    codes = torch.round(others * torch.where(most > 0, 127 / most, 0.0)) * (most / 127)
    return torch.where(outlier, groups, codes).view(x.shape)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_linear(isa: str, name: str) -> None:
    ops = ops_on(isa)
    parts = [stored(name, n, 256, seed=n) for n in (48, 7, 33)]
    shift = randn(88, seed=5)
    mine, spec = ops.pack(parts, shift), SLOW.pack(parts, shift)
    for rows in (1, 3, 5, 25, 40):
        x = 3 * randn(rows, 256, seed=rows)
        expected = SLOW.linear(x if name in FLOATS else quantized(x), spec)
        assert error(ops.linear(x, mine), expected) < 2e-6
        assert error(ops.linear(x, mine), SLOW.linear(x, spec)) < 1e-2
        target = randn(rows, 88, seed=9)
        onto = target.clone()
        assert ops.linear(x, mine, add_to=onto) is onto
        assert torch.equal(onto, target + ops.linear(x, mine))
    assert ops.weight_bytes(mine) >= sum(part.nbytes for part in parts)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("before", [Norm(1 + 0.2 * randn(192), 1e-5), Gate("silu"), Gate("gelu_tanh")])
def test_what_comes_before(isa: str, name: str, before: Norm | Gate) -> None:
    ops = ops_on(isa)
    inputs = 96 if isinstance(before, Gate) else 192
    parts = [stored(name, 50, inputs)]
    mine, spec = ops.pack(parts), SLOW.pack(parts)
    for rows in (1, 2, 7):
        x = 2 * randn(rows, 192, seed=rows)
        x[rows // 2 :, 5] = 100  # in some rows one input dominates its group
        inner = gated(x, before) if isinstance(before, Gate) else SLOW.norm(x, before)
        expected = SLOW.linear(inner if name in FLOATS else quantized(inner, isinstance(before, Norm)), spec)
        # A code on the edge may round the other way
        assert error(ops.linear(x, mine, before=before), expected) < (2e-6 if name in FLOATS else 2e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["F16", "Q4_0"])
@pytest.mark.parametrize("before", [None, Norm(1 + 0.2 * randn(192), 1e-5), Gate("silu")])
def test_inputs_in_another_order(isa: str, name: str, before: Norm | Gate | None) -> None:
    """The same bits as with inputs that were put into that order before."""
    ops, inputs = ops_on(isa), 96 if isinstance(before, Gate) else 192
    order = np.random.default_rng(3).permutation(inputs)
    plain = [stored(name, n, inputs, seed=n) for n in (48, 7)]
    mine = ops.pack([replace(part, order=order) for part in plain])
    for rows in (1, 3, 40):
        x = randn(rows, 192, seed=rows)
        moved = x.view(rows, -1, inputs)[..., order].flatten(1)
        turned = Norm(before.weight[order], before.eps) if isinstance(before, Norm) else before
        assert torch.equal(ops.linear(x, mine, before=before), ops.linear(moved, ops.pack(plain), before=turned))
    rows_of = ops.embed(mine, torch.tensor([3, 50]), 1.0)
    assert torch.equal(rows_of[:, order], ops.embed(ops.pack(plain), torch.tensor([3, 50]), 1.0))


def test_zero_points_become_minimums() -> None:
    blocks = np.zeros(40 * 4, layout_of("Q4_Z"))
    rng = np.random.default_rng(0)
    blocks["d"], blocks["z"] = rng.uniform(1e-3, 1e-2, len(blocks)), rng.integers(0, 16, len(blocks))
    blocks["qs"] = rng.integers(0, 256, (len(blocks), 16))
    part = Stored("Q4_Z", (40, 128), blocks.view(np.uint8).reshape(-1))
    step = blocks["d"].astype(np.float32).max()
    assert np.abs(dequantize(packable(part)) - dequantize(part)).max() < step * 16 * 2.0**-11
    x = randn(3, 128)
    assert error(ops_on("").linear(x, ops_on("").pack([part])), SLOW.linear(x, SLOW.pack([part]))) < 1e-2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["F32", "F16"])
def test_odd_float_shapes(isa: str, name: str) -> None:
    ops = ops_on(isa)
    for outputs, inputs in ((1, 1), (17, 33), (5, 66), (130, 7)):
        parts = [stored(name, outputs, inputs)]
        norm = Norm(1 + 0.2 * randn(inputs), 1e-5)
        x = randn(14, inputs)
        got = ops.linear(x, ops.pack(parts), before=norm)
        torch.testing.assert_close(got, SLOW.linear(x, SLOW.pack(parts), before=norm), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ops.norm(x, norm), SLOW.norm(x, norm), atol=1e-6, rtol=1e-5)


def test_parts_of_different_formats() -> None:
    """q, k in one format and v in another, as mixed GGUF files have them."""
    names = ("Q4_K", "Q6_K", "F16", "Q4_0", "Q5_0")
    parts = [stored(name, 20, 512, seed=i) for i, name in enumerate(names)]
    x = randn(6, 512)
    for isa in ISAS:
        ops = ops_on(isa)
        mine = ops.pack(parts)
        got = ops.linear(x, mine, before=Norm(torch.ones(512), 1e-6))
        alone_ = [ops.linear(x, ops.pack([part]), before=Norm(torch.ones(512), 1e-6)) for part in parts]
        assert torch.equal(got, torch.cat(alone_, dim=1))
        tokens = torch.tensor([0, 19, 20, 45, 99])
        expected = np.concatenate([dequantize(part) for part in parts])[tokens]
        assert np.array_equal(ops.embed(mine, tokens, 1.0).numpy(), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_embed(name: str) -> None:
    part = stored(name, 40, 256)
    tokens = torch.tensor([3, 39, 0, 17, 3, 25])
    for isa in ISAS:
        packed = ops_on(isa).pack([part])
        assert np.array_equal(ops_on(isa).embed(packed, tokens, 1.0).numpy(), dequantize(part)[tokens])
        assert np.array_equal(ops_on(isa).embed(packed, tokens, 3.0).numpy(), dequantize(part)[tokens] * np.float32(3))
        for bad in (-1, 40):
            with pytest.raises(ValueError, match="token"):
                ops_on(isa).embed(packed, torch.tensor([0, bad]), 1.0)


def test_float32_weights() -> None:
    ops = ops_on(ISAS[0], weights="float32")
    parts = [stored("Q4_1", 40, 256), stored("Q6_K", 24, 256)]
    x = randn(5, 256)
    assert error(ops.linear(x, ops.pack(parts)), SLOW.linear(x, SLOW.pack(parts))) < 1e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits(dtype: str) -> None:
    """Whatever the file holds is rounded once and multiplied as float32, the same bits for any rows on any machine."""
    parts = [stored(name, 40, 256, seed=i) for i, name in enumerate(("F32", "F16", "BF16", "Q4_1", "Q6_K"))]
    rounded = [
        from_float(torch.from_numpy(dequantize(part)).to(getattr(torch, dtype)).float().numpy()) for part in parts
    ]
    x = randn(9, 256)
    expected, first = SLOW.linear(x, SLOW.pack(rounded)), None
    for isa in ISAS:
        ops = ops_on(isa, weights=dtype)
        packed = ops.pack(parts)
        got = ops.linear(x, packed)
        first = got if first is None else first
        assert error(got, expected) < 1e-6
        assert torch.equal(got, first)
        assert torch.equal(ops.linear(x[3:4], packed), first[3:4])
        assert ops.weight_bytes(packed) == 5 * 48 * 256 * 2  # whole panels of 16 outputs, part by part
        assert torch.equal(
            ops.embed(packed, torch.tensor([0, 130]), 1.0),
            torch.cat([torch.from_numpy(dequantize(part)) for part in rounded])[[0, 130]],
        )


def test_every_dtype_is_served() -> None:
    for dtype in (None, "float32", "float16", "bfloat16"):
        assert isinstance(make_ops("cpu", dtype, 2), NativeCpuOps)
    with pytest.raises(ValueError, match="weights must be"):
        NativeCpuOps(1, weights="int8")


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", STEPS)
def test_attention(isa: str, name: str) -> None:
    qkv, attention, kv, batch = make_step(STEPS[name])
    mine, other = copied(kv), copied(kv)
    expected = SLOW.attend(qkv, attention, other, batch, 0)
    got = ops_on(isa).attend(qkv, attention, mine, batch, 0)
    assert torch.isfinite(got).all()
    assert_attended(got, expected, kv.format)
    block, offset = batch.groups[0].slots // 16, batch.groups[0].slots % 16
    for one, two in ((mine.keys, other.keys), (mine.values, other.values)):
        written, wanted = one[block, :, offset].float(), two[block, :, offset].float()
        if kv.format == "int4":
            written, wanted = (x.to(torch.uint8) & 15 for x in (written, wanted))
            assert (written.int() - wanted.int()).abs().max() <= 1
        else:
            assert (written - wanted).abs().max() <= (1.0 if kv.format == "int8" else 1e-2)


def assert_attended(got: Tensor, expected: Tensor, kv_format: str) -> None:
    """Over codes, a query's code on the edge may round the other way and move its line: one line in 100 may."""
    limits = tolerance(kv_format)
    if kv_format in ("int8", "int4"):
        far = ~torch.isclose(got, expected, **limits)
        assert far.float().mean() <= 0.01
        limits = {name: 10 * limit for name, limit in limits.items()}
    torch.testing.assert_close(got, expected, **limits)


def tolerance(kv_format: str) -> dict[str, float]:
    if kv_format == "float32":
        return {"atol": 3e-6, "rtol": 1e-5}
    if kv_format in ("int8", "int4"):  # a code on the edge may round the other way
        return {"atol": 1e-3, "rtol": 1e-3}
    return {"atol": 5e-5, "rtol": 1e-4}


def long_case(kv_format: KVFormat, window: int = 0) -> Case:
    return Case(((700, 1), (3, 290), (511, 1), (512, 2), (255, 1)), heads=9, kv_heads=3, head_dim=64, format=kv_format,
                window=window, rotary=0)  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", ["float32", "float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("window", [0, 300])
def test_attention_over_several_splits(isa: str, kv_format: KVFormat, window: int) -> None:
    case = replace(long_case(kv_format, window), requests=((700, 1), (3, 30), (511, 1), (512, 2), (255, 1)))
    qkv, attention, kv, batch = make_step(case)
    expected = SLOW.attend(qkv, attention, copied(kv), batch, 0)
    got = ops_on(isa).attend(qkv, attention, copied(kv), batch, 0)
    assert_attended(got, expected, kv_format)


def test_requests_of_one_step_share_the_blocks_it_fills() -> None:
    qkv, attention, kv, batch = make_step(Case(((0, 32), (16, 4))))
    batch.groups[0].tables[1, 0] = batch.groups[0].tables[0, 0]
    expected = SLOW.attend(qkv, attention, copied(kv), batch, 0)
    for isa in ISAS:
        got = ops_on(isa).attend(qkv, attention, copied(kv), batch, 0)
        torch.testing.assert_close(got, expected, **tolerance("float32"))


def test_argmax() -> None:
    rows = randn(6, 5003)
    rows[0, 17] = rows[0, 4000] = 9.0  # the first of equals
    rows[1, 5002] = rows[1, 5001] = 9.0
    rows[2, 333] = float("nan")
    rows[3, 5002] = float("nan")
    rows[4, 2222] = float("inf")
    rows[5] = -float("inf")
    for isa in ISAS:
        assert ops_on(isa).argmax(rows).tolist() == [17, 5001, -1, -1, 2222, 0]
        assert ops_on(isa).argmax(rows[:, :40]).tolist() == SLOW.argmax(rows[:, :40]).tolist()


# ---- the bits of a row -----------------------------------------------------------------------------------------------

SPANS = ((0, 1), (1, 3), (2, 6), (3, 8), (5, 42), (36, 37), (0, 300), (7, 260))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_do_not_know_each_other(name: str) -> None:
    """Any span of rows, any thread count, any instruction set: the same bits."""
    part, norm = stored(name, 150, 256), Norm(1 + 0.1 * randn(256), 1e-6)
    x = randn(300, 256, seed=1)
    whole: Tensor | None = None
    for isa in ISAS:
        for threads in (1, 2, 5):
            ops = ops_on(isa, threads)
            packed = ops.pack([part])
            got = ops.linear(x, packed, before=norm)
            whole = got if whole is None else whole
            assert torch.equal(got, whole), (isa, threads)
            check_spans(ops, packed, x, norm, whole)


def check_spans(ops: TensorOps, packed: PackedWeight, x: Tensor, norm: Norm, whole: Tensor) -> None:
    for start, stop in SPANS:
        assert torch.equal(ops.linear(x[start:stop], packed, before=norm), whole[start:stop]), (ops.isa, start, stop)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates_do_not_depend_on_place(gate: str) -> None:
    part = stored("F32", 20, 72)
    x = 4 * randn(50, 144)
    results = []
    for isa in ISAS:
        ops = ops_on(isa)
        packed = ops.pack([part])
        results.append(ops.linear(x, packed, before=Gate(gate)))  # type: ignore[arg-type]
        for i in (0, 7, 49):
            assert torch.equal(ops.linear(x[i : i + 1], packed, before=Gate(gate)), results[-1][i : i + 1])  # type: ignore[arg-type]
        assert torch.equal(results[-1], results[0])


@pytest.mark.parametrize("name", STEPS)
def test_attention_among_neighbours(name: str) -> None:
    qkv, attention, kv, batch = make_step(STEPS[name])
    together: Tensor | None = None
    for isa in ISAS:
        for threads in (1, 2):
            ops = ops_on(isa, threads)
            got = ops.attend(qkv, attention, copied(kv), batch, 0)
            together = got if together is None else together
            assert torch.equal(got, together), (isa, threads)
            for request in range(len(batch.contexts)):
                rows, only = alone(batch, request)
                assert torch.equal(ops.attend(qkv[rows], attention, copied(kv), only, 0), together[rows])


@pytest.mark.parametrize("kv_format", ["float32", "float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("window", [0, 1, 24, 300])
def test_attention_in_chunks(kv_format: KVFormat, window: int) -> None:
    """One prefill, uneven chunks, token by token across the border of a split: the same rows."""
    case = Case(((3, 590),), heads=9, kv_heads=3, head_dim=64, window=window, format=kv_format, rotary=0)
    qkv, attention, kv, batch = make_step(case)
    ops = ops_on(ISAS[0])
    whole = ops.attend(qkv, attention, copied(kv), batch, 0)
    for sizes in ([240] + [1] * 20 + [330], [100, 1, 28, 130, 331], [16] * 36 + [7, 7]):
        cache_, done = copied(kv), 0
        for size in sizes:
            rows, part = part_of(batch, done, size, 3)
            assert torch.equal(ops.attend(qkv[rows], attention, cache_, part, 0), whole[rows]), (sizes[:3], done)
            done += size


# ---- bad numbers and bad arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q4_1", "Q6_K"])
def test_bad_inputs_show_and_stay_in_their_row(name: str, bad: float) -> None:
    part = stored(name, 20, 256)
    x = randn(9, 256)
    for isa in ISAS:
        packed = ops_on(isa).pack([part])
        clean = ops_on(isa).linear(x, packed)
        spoilt = x.clone()
        spoilt[4, 77] = bad
        got = ops_on(isa).linear(spoilt, packed)
        assert not torch.isfinite(got[4]).any()
        keep = torch.arange(9) != 4
        assert torch.equal(got[keep], clean[keep])


def test_empty_and_zero() -> None:
    for isa in ISAS:
        ops = ops_on(isa)
        packed = ops.pack([stored("Q4_1", 20, 64)])
        assert ops.linear(torch.empty(0, 64), packed).shape == (0, 20)
        assert torch.equal(ops.linear(torch.zeros(3, 64), packed), torch.zeros(3, 20))
        tiny = ops.linear(torch.full((1, 64), 1e-38), packed)
        assert torch.isfinite(tiny).all()


def test_refusals() -> None:
    ops = ops_on(ISAS[0])
    packed = ops.pack([stored("Q8_0", 20, 64)])
    for x in (torch.zeros(2, 32), torch.zeros(2, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match="does not fit"):
            ops.linear(x, packed)
    with pytest.raises(ValueError, match="cannot add"):
        ops.linear(torch.zeros(2, 64), packed, add_to=torch.zeros(2, 19))
    with pytest.raises(ValueError, match="bias"):
        ops.pack([stored("Q8_0", 20, 64)], torch.zeros(19))
    with pytest.raises(ValueError, match="no kernels"):
        NativeCpuOps(1, isa="abacus")
    assert torch.equal(ops.linear(torch.ones(64, 2).T, packed), ops.linear(torch.ones(2, 64), packed))


def test_rounding_to_16_bits_is_torchs() -> None:
    """Halfway cases, what is too large, what is too small, and what is no number."""
    odd = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65504.0, 65520.0, 3.3e38, 3.4e38, 1e-8, 6e-8, 1e-40]
    values = np.array([*odd, np.inf, -np.inf, np.nan, *(-x for x in odd)], np.float32).reshape(1, -1)
    for name, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        got = narrowed(from_float(values), name)
        expected = torch.from_numpy(values).to(dtype)
        numbers = ~np.isnan(values[0])
        assert np.array_equal(got.data.view(np.uint16)[numbers], expected.view(torch.uint16).numpy()[0, numbers]), name
        assert np.array_equal(np.isnan(dequantize(got)), np.isnan(values))
