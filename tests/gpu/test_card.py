"""On the card: whole models against transformers, and paths that have no CPU counterpart. Run with `-m gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from benchmarks.random_weights import llama_shape, random_model
from tests import published, tiny
from tests.helpers import run_tokens
from tests.model import test_latent, test_parity
from tests.model.test_parity import load, tokens_of
from twostroke.kv.layout import make_layout
from twostroke.kv.storage import KVStorage
from twostroke.model.transformer import Transformer
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.cuts import DeviceBatch
from twostroke.ops.cuda.exact import ExactCudaOps
from twostroke.ops.interface import BLOCK, Attention, GroupBlocks, KVLayer
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda")
FAMILIES = [*test_parity.FAMILIES, *test_latent.FAMILIES]


def make_peer(family: str, folder: Path) -> Any:
    """The family as transformers has it, small and random; its checkpoint is in the folder."""
    return (test_parity if family in test_parity.FAMILIES else test_latent).make_peer(family, folder)


def logits_of(model: Transformer, tokens: list[int], chunks: list[int], kv_format: str) -> torch.Tensor:
    """Logits at every position of one sequence, computed in chunks; steps of one token take the fused path."""
    layout = make_layout(model.arch, kv_format)
    columns = -(-len(tokens) // BLOCK)
    kv = KVStorage(layout, columns * len(layout.groups), kv_format, CARD)  # type: ignore[arg-type]
    order = torch.randperm(columns * len(layout.groups), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    tables = order.view(len(layout.groups), 1, columns).to(CARD)
    out, start = [], 0
    for count in chunks:
        positions = torch.arange(start, start + count, device=CARD)
        slots = [t[0, positions // BLOCK].long() * BLOCK + positions % BLOCK for t in tables]
        batch = DeviceBatch(
            tokens=torch.tensor(tokens[start : start + count], device=CARD), positions=positions,
            starts=torch.tensor([0, count], dtype=torch.int32, device=CARD),
            contexts=torch.tensor([start + count], dtype=torch.int32, device=CARD),
            groups=tuple(GroupBlocks(s, t) for s, t in zip(slots, tables, strict=True)),
            logit_rows=torch.arange(count, device=CARD), counts=np.array([count]), lengths=np.array([start + count]),
            streams=count == 1,
        )  # fmt: skip
        out.append(model.logits(model.forward(batch, kv)))
        start += count
    return torch.cat(out).cpu()


def row_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the middle row: in bfloat16 a few rows of a mixture choose other experts than in float32."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    peer = make_peer(family, tmp_path)
    for dtype, limit in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        model = load(tmp_path, CudaOps(dtype, CARD))
        tokens = tokens_of(61)
        expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
        kv_format = "float32" if dtype == torch.float32 else "bfloat16"
        for chunks in ([61], [7, 51, 1, 1, 1]):
            found = logits_of(model, tokens, chunks, kv_format)
            error = row_error(found, expected)
            assert error < limit, f"{dtype} {chunks}: relative error {error:.2e}"
            if dtype == torch.float32:
                assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_exact_logits_have_the_same_bits_in_any_chunks(family: str, tmp_path: Path) -> None:
    peer = make_peer(family, tmp_path)
    for dtype, limit in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        model = load(tmp_path, ExactCudaOps(dtype, CARD))
        tokens = tokens_of(150)
        kv_format = "float32" if dtype == torch.float32 else "bfloat16"
        whole = logits_of(model, tokens, [150], kv_format)
        expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
        assert row_error(whole, expected) < limit
        for chunks in ([7, 140, 1, 1, 1], [129] + [1] * 21, [16] * 9 + [6]):
            assert torch.equal(logits_of(model, tokens, chunks, kv_format), whole), (dtype, chunks)


@pytest.mark.parametrize("bits", ["fp8", "int8", "int4", *published.FORMATS])
@torch.no_grad()
def test_exact_logits_of_few_bits_have_the_same_bits_in_any_chunks(bits: str, tmp_path: Path) -> None:
    """Of weights that are packed at the start, and of a file's codes where there are kernels for them."""
    shape = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_attention_heads": 4}
    folder = tiny.tiny_llama(tmp_path / "model", **shape)
    packed = bits if bits in ("fp8", "int8", "int4") else None
    if packed is None:
        published.rewrite(folder, bits)
    ops = ExactCudaOps(torch.bfloat16, CARD, packed, keep=packed is None)
    model, tokens = load_model(open_checkpoint(folder), ops, 512), tokens_of(400)
    whole = logits_of(model, tokens, [400], "bfloat16")
    if packed is None:
        expected, limit = run_tokens(load_model(open_checkpoint(folder), ReferenceOps(), 512), tokens), 0.1
    else:  # the same codes: packed from weights in float32 they would be others
        plain = load_model(open_checkpoint(folder), CudaOps(torch.bfloat16, CARD, packed), 512)
        expected, limit = logits_of(plain, tokens, [400], "bfloat16"), 0.03
    assert row_error(whole, expected) < limit
    for chunks in ([7, 390, 1, 1, 1], [129] + [1] * 21 + [250], [16] * 8 + [272]):
        assert torch.equal(logits_of(model, tokens, chunks, "bfloat16"), whole), chunks
    assert all(ops.narrow_products.same.values())  # no product needs a decoded copy


@pytest.mark.parametrize("kind", published.FORMATS)
@torch.no_grad()
def test_published_formats(kind: str, tmp_path: Path) -> None:
    """With the codes kept where there are kernels for them, beside the specification with the exact values."""
    shape = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_attention_heads": 4}
    folder = tiny.tiny_llama(tmp_path / "model", **shape)
    published.rewrite(folder, kind)
    tokens = tokens_of(61)
    expected = run_tokens(load(folder), tokens)
    for keep in (True, False):
        model = load(folder, CudaOps(torch.bfloat16, CARD, keep=keep))
        for chunks in ([61], [7, 51, 1, 1, 1]):
            error = row_error(logits_of(model, tokens, chunks, "bfloat16"), expected)
            assert error < 0.1, f"{kind} {keep} {chunks}: relative error {error:.2e}"


@pytest.mark.parametrize("coded", [False, True])
@torch.no_grad()
def test_gpt_oss(coded: bool, tmp_path: Path) -> None:
    """Its experts in floats and in MXFP4, beside the specification; an exact engine has the same bits in any chunks."""
    folder = tiny.tiny_gpt_oss(tmp_path / "model", hidden_size=64, intermediate_size=96)
    if coded:
        published.code_experts(folder)
    tokens = tokens_of(61)
    expected = run_tokens(load(folder), tokens)
    for dtype, limit in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        kv_format = "float32" if dtype == torch.float32 else "bfloat16"
        for ops in (CudaOps(dtype, CARD, keep=True), ExactCudaOps(dtype, CARD, keep=True)):
            model = load(folder, ops)
            found = [logits_of(model, tokens, chunks, kv_format) for chunks in ([61], [7, 51, 1, 1, 1])]
            for logits in found:
                assert row_error(logits, expected) < limit, (dtype, ops.one_order)
            assert not ops.one_order or torch.equal(*found)


@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@torch.no_grad()
def test_every_dtype_at_every_length(dtype: str, heads: tuple[int, int]) -> None:
    """A prompt read at once gives what it gives in chunks, whichever kernels its length chooses."""
    arch = llama_shape(256, 512, 2, *heads, 64, vocab=256, max_positions=8192)
    model = random_model(arch, CudaOps(getattr(torch, dtype), CARD), 8192)
    limit = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}[dtype]
    for length in (1, 2, 17, 2047, 2048, 2049, 3000, 4096, 8192):
        tokens = [(7919 * i) % 256 for i in range(length)]
        whole = logits_of(model, tokens, [length], dtype)
        parts = logits_of(model, tokens, [500] * (length // 500) + [length % 500] * (length % 500 > 0), dtype)
        assert whole.isfinite().all(), length
        assert (whole - parts).norm() / parts.norm() < limit, length


@pytest.mark.parametrize(("before", "count"), [(0, 2048), (2048, 2048), (6144, 2100), (10240, 4096)])
@pytest.mark.parametrize("kv_format", ["bfloat16", "int8", "fp8"])
def test_dense_and_paged_attention_agree(before: int, count: int, kv_format: str) -> None:
    generator = torch.Generator(CARD).manual_seed(before)
    context, heads, kv_heads, dim = before + count, 8, 2, 128
    columns = -(-context // BLOCK)
    dtype = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kv_format]
    data = torch.zeros(2, columns, kv_heads, BLOCK, dim, device=CARD, dtype=dtype)
    scales = torch.zeros(2, columns, kv_heads, BLOCK, device=CARD) if kv_format != "bfloat16" else [None, None]
    kv = KVLayer(kv_format, data[0], data[1], scales[0], scales[1])  # type: ignore[arg-type]
    attention = Attention(heads, kv_heads, dim, dim**-0.5)
    table = torch.randperm(columns, device=CARD, generator=generator).to(torch.int32).view(1, -1)

    def batch(start: int, stop: int) -> DeviceBatch:
        positions = torch.arange(start, stop, device=CARD)
        slots = table[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
        return DeviceBatch(
            positions, positions, torch.tensor([0, stop - start], dtype=torch.int32, device=CARD),
            torch.tensor([stop], dtype=torch.int32, device=CARD), (GroupBlocks(slots, table),), positions,
            np.array([stop - start]), np.array([stop]),
        )  # fmt: skip

    qkv = torch.randn(context, (heads + 2 * kv_heads) * dim, device=CARD, generator=generator).bfloat16()
    dense, paged = CudaOps(torch.bfloat16, CARD), CudaOps(torch.bfloat16, CARD)
    paged._dense_ok = lambda attention: False  # type: ignore[method-assign]
    if before:
        paged.attend(qkv[:before], attention, kv, batch(0, before), 0)
    step = batch(before, context)
    expected = paged.attend(qkv[before:], attention, kv, step, 0).float()
    found = dense.attend(qkv[before:].contiguous(), attention, kv, batch(before, context), 0).float()
    assert ((found - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("kv_format", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("context", [1, 17, 129, 700, 3000])
def test_a_token_alone_is_a_token_of_a_chunk(kv_format: str, context: int) -> None:
    """The fused decode kernel gives what the tile kernel gives for the same position."""
    generator = torch.Generator(CARD).manual_seed(context)
    heads, kv_heads, dim, columns = 8, 2, 128, -(-context // BLOCK)
    kinds = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    attention = Attention(heads, kv_heads, dim, dim**-0.5)
    table = torch.randperm(columns, device=CARD, generator=generator).to(torch.int32).view(1, -1)
    qkv = torch.randn(context, (heads + 2 * kv_heads) * dim, device=CARD, generator=generator).bfloat16()
    ops = CudaOps(torch.bfloat16, CARD)
    ops._dense_ok = lambda attention: False  # type: ignore[method-assign]
    rows = []
    for spans in ([(0, context)], [(0, context - 1), (context - 1, context)]):
        data = torch.zeros(2, columns, kv_heads, BLOCK, dim, device=CARD, dtype=kinds[kv_format])
        scales = torch.zeros(2, columns, kv_heads, BLOCK, device=CARD) if kv_format != "bfloat16" else [None, None]
        kv = KVLayer(kv_format, data[0], data[1], scales[0], scales[1])  # type: ignore[arg-type]
        for start, stop in spans:
            if start == stop:
                continue
            positions = torch.arange(start, stop, device=CARD)
            slots = table[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
            batch = DeviceBatch(
                positions, positions, torch.tensor([0, stop - start], dtype=torch.int32, device=CARD),
                torch.tensor([stop], dtype=torch.int32, device=CARD), (GroupBlocks(slots, table),), positions,
                np.array([stop - start]), np.array([stop]), streams=stop - start == 1 and len(spans) == 2,
            )  # fmt: skip
            last = ops.attend(qkv[start:stop].contiguous(), attention, kv, batch, 0)[-1].float()
        rows.append(last)
    assert ((rows[0] - rows[1]).norm() / rows[0].norm()) < 1e-2
