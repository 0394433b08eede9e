"""Compressed attention and residual streams on the GPU against the specification: under Triton's interpreter, and on
the card with `-m gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.helpers import run_tokens
from tests.model import test_compressed_parity as parity
from tests.model.test_parity import tokens_of
from tests.ops.test_triton import DEVICE, ON_CARD, close, pytestmark  # noqa: F401
from tests.weights.test_fp8 import published_v4
from twostroke.model.arch import Rope
from twostroke.model.rope import plain_frequencies
from twostroke.model.rope_table import rope_table
from twostroke.ops.compressed_interface import CompressedAttention, CompressedRows, Compressor, Indexer
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.cuts import DeviceBatch
from twostroke.ops.cuda.exact import ExactCudaOps
from twostroke.ops.cuda.kernels import listed
from twostroke.ops.cuda.kernels.entries import EntryPlaces, Owners
from twostroke.ops.cuda.kernels.four_bits import FourBits
from twostroke.ops.formats import from_float
from twostroke.ops.interface import BLOCK, GroupBlocks, KVFormat, KVLayer, Norm
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.ops.streams import StreamMix, collapse, collapse_last, expand, pack, spread

slow_here = pytest.mark.gpu if ON_CARD else pytest.mark.slow  # the interpreter takes long
KINDS = ("window", "sparse", "heavy")
SIZES = (
    5,
    24,
    8,
    10,
    3,
    12,
    3,
    16,
)  # heads, dim, rotated, window, heads and dim of the indexer, chosen, ratio of heavy
PUBLISHED = (64, 512, 64, 128, 64, 128, 24, 128)  # but for how many entries are chosen
FORMATS: dict[torch.dtype, KVFormat] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
COLUMNS = 40  # of block tables


class Life:
    """Sequences of the same rows that grow in one cache with scattered blocks."""

    def __init__(
        self, ops: Any, kind: str, dtype: torch.dtype = torch.float32, count: int = 1, sizes: tuple[int, ...] = SIZES
    ):  # fmt: skip
        heads, dim, turned, window, index_heads, index_dim, chosen, heavy = sizes
        self.rng, self.ops, self.dtype, self.count = np.random.default_rng(7), ops, dtype, count
        ratio, sparse = {"window": 0, "sparse": 4, "heavy": heavy}[kind], kind == "sparse"
        indexer = None
        if sparse:
            indexer = Indexer(index_heads, index_dim, chosen, self.compressor(ratio, index_dim, True))
        rope = rope_table(Rope(tuple(plain_frequencies(10_000.0, turned))), COLUMNS * BLOCK, ops.device)
        self.attention = CompressedAttention(
            heads=heads, dim=dim, window=window, scale=dim**-0.5, rope=rope, query_norm=self.norm(dim),
            key_norm=self.norm(dim), sinks=self.floats(heads),
            compressor=self.compressor(ratio, dim, sparse) if ratio else None, indexer=indexer,
        )  # fmt: skip
        self.tables, self.computed = [], [0] * count
        raw = self.cached(BLOCK, 1, dim)
        if ratio:
            width = 4 * (dim + index_dim) if sparse else 2 * dim
            keys = self.cached(8 if sparse else 1, ratio, dim)
            values = self.data(8, index_dim, keys.keys.shape[0]) if sparse else None
            state = self.cached(BLOCK, 1, width, torch.float32)
            self.cache = KVLayer(FORMATS[dtype], keys.keys, values, further=((state, 2), (raw, 0)))
        else:
            self.cache, width = raw, 0
        self.main = 1 if ratio else 0  # the group of `cache`
        total = COLUMNS * BLOCK
        widths = (heads * dim, dim, width, index_heads * index_dim, index_heads)
        self.given = [torch.from_numpy(self.rng.standard_normal((total, one), np.float32)) for one in widths]

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape, np.float32)).to(self.ops.device)

    def norm(self, width: int) -> Norm:
        return Norm(1 + 0.2 * self.floats(width), 1e-6)

    def compressor(self, ratio: int, dim: int, overlap: bool) -> Compressor:
        return Compressor(ratio, dim, overlap, self.floats(ratio, dim * (1 + overlap)), self.norm(dim))

    def data(self, size: int, width: int, blocks: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = (blocks, 1, size, width)
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=self.ops.device)

    def cached(self, size: int, tokens: int, width: int, dtype: torch.dtype | None = None) -> KVLayer:
        """A cache of `size` entries a block, each of so many tokens, and a table for it."""
        columns = -(-COLUMNS * BLOCK // (size * tokens))
        order = torch.randperm(self.count * columns, generator=torch.Generator().manual_seed(size)).int()
        self.tables.append((order.view(self.count, columns), size, tokens))
        return KVLayer(FORMATS[dtype or self.dtype], self.data(size, width, self.count * columns, dtype))

    def step(self, *work: tuple[int, int], padding: int = 0) -> list[torch.Tensor]:
        """(sequence, so many more of its rows) …; results in that order. padding: rows of no request at the end."""
        positions = torch.cat([torch.arange(self.computed[s], self.computed[s] + n) for s, n in work])
        owner = torch.tensor([s for s, n in work for _ in range(n)])
        for sequence, count in work:
            self.computed[sequence] += count
        counts = [n for _, n in work]
        starts, contexts = np.cumsum([0, *counts]), [self.computed[s] for s, _ in work]
        groups = []
        for table, size, tokens in self.tables:
            blocks = table[owner, positions // (size * tokens)].long()
            slots = blocks * size + positions % (size * tokens) // tokens
            mine = torch.cat((table[[s for s, _ in work]], torch.zeros_like(table[:1])))[: len(work) + (padding > 0)]
            slots = torch.cat((slots, torch.full((padding,), -1)))
            groups.append(GroupBlocks(slots.to(self.ops.device), mine.to(self.ops.device)))
        rows = torch.cat((positions, torch.zeros(padding, dtype=torch.int64)))
        if padding:
            starts, contexts = np.append(starts, starts[-1]), [*contexts, 0]
        device = self.ops.device
        batch = DeviceBatch(
            rows.to(device), rows.to(device), torch.from_numpy(starts).to(device, torch.int32),
            torch.tensor(contexts, dtype=torch.int32, device=device), tuple(groups), rows.to(device),
        )  # fmt: skip
        wide = [one[rows].to(device, self.dtype) for one in self.given]
        q, key, state, index_q, index_weights = wide
        sparse = self.attention.indexer is not None
        parts = CompressedRows(
            q, key, state if self.attention.compressor is not None else None, index_q if sparse else None,
            index_weights if sparse else None,
        )  # fmt: skip
        out = self.ops.attend_compressed(parts, self.attention, self.cache, batch, self.main)
        return list(out[: len(positions)].float().cpu().split(counts))


def pair(kind: str, dtype: torch.dtype, count: int, sizes: tuple[int, ...] = SIZES) -> list[Life]:
    found = [Life(ops, kind, dtype, count, sizes) for ops in (ReferenceOps(), CudaOps(dtype, DEVICE))]
    if dtype != torch.float32:
        found[0].dtype = torch.float32  # the specification computes in floats over the same cache
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_the_specification(kind: str) -> None:
    """Prompts, chunks, single tokens and streams, across the borders of blocks, windows, entries and the choice."""
    expected, found = pair(kind, torch.float32, 2)
    for work in (((0, 21),), ((0, 1), (1, 34)), ((0, 12), (1, 1)), ((0, 1), (1, 1))):
        close(torch.cat(found.step(*work)), torch.cat(expected.step(*work)), 2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.gpu
def test_published_sizes(kind: str, dtype: torch.dtype) -> None:
    """In bfloat16 an indexer may choose another entry where two scores are near each other: such rows are few."""
    expected, found = pair(kind, dtype, 2, PUBLISHED)
    for work in (((0, 301),), ((0, 1), (1, 127)), ((0, 12), (1, 1)), ((0, 1), (1, 1))):
        ours, theirs = torch.cat(found.step(*work)), torch.cat(expected.step(*work))
        if kind == "sparse" and dtype == torch.bfloat16:
            errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
            assert errors.median() < 2e-2 and errors.max() < 0.5, errors
        else:
            close(ours, theirs, 2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("kind", [KINDS[1], *(pytest.param(kind, marks=slow_here) for kind in (KINDS[0], KINDS[2]))])
def test_the_same_bits_however_rows_come(kind: str) -> None:
    """Whole, in chunks, one by one, beside others, with and without padding."""
    for dtype in FORMATS if ON_CARD else (torch.float32,):
        ops = ExactCudaOps(dtype, DEVICE)
        whole = Life(ops, kind, dtype).step((0, 50))[0]
        life = Life(ops, kind, dtype, 2)
        found: list[list[torch.Tensor]] = [[], []]
        for work in (((0, 30), (1, 3)), ((0, 1), (1, 1)), ((1, 40), (0, 10)), ((0, 1), (1, 1))):
            for (sequence, _), rows in zip(work, life.step(*work, padding=work[0][1] % 5), strict=True):
                found[sequence].append(rows)
        for rows in found:
            joined = torch.cat(rows)
            assert torch.equal(joined, whole[: len(joined)]), (kind, dtype)


@pytest.mark.parametrize("most", [1 << 20, 70])
def test_the_best_entries_and_among_equals_the_lowest(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of both signs, large and small scores, rows that read all there are. most: keys sorted at a time."""
    monkeypatch.setattr(listed, "MOST_KEYS", most)
    rng, heads, dim, chosen, entries = np.random.default_rng(3), 4, 8, 5, 32
    indexer = Indexer(heads, dim, chosen, Compressor(4, dim, True, torch.zeros(4, 16), Norm(torch.zeros(dim), 1e-6)))
    keys = rng.standard_normal((4, 8, dim)).astype(np.float32)
    keys[2] = keys[1]  # every score twice
    positions = torch.tensor([127, 126, 60, 23, 19, 3, 0])
    q = rng.standard_normal((len(positions), heads, dim)).astype(np.float32)
    weights = rng.standard_normal((len(positions), heads)).astype(np.float32) * 100
    q[1] = 0
    weights[2] = -np.abs(weights[2])
    table = torch.tensor([[3, 1, 2, 0]], dtype=torch.int32)
    given = [torch.from_numpy(q).flatten(1), torch.from_numpy(weights)]
    owners = Owners(positions, torch.zeros(len(positions), dtype=torch.int32), torch.tensor([128], dtype=torch.int32))
    places = EntryPlaces(torch.from_numpy(keys).to(DEVICE), table.to(DEVICE))
    owners = Owners(*(one.to(DEVICE) for one in owners))
    found = listed.chosen_entries(*(one.to(DEVICE) for one in given), indexer, places, entries, owners).cpu().numpy()
    ordered = keys[table[0].numpy()].reshape(entries, dim)
    for row, position in enumerate(positions.tolist()):
        count = (position + 1) // 4
        scores = (weights[row][:, None] * np.maximum(q[row].astype(np.float64) @ ordered[:count].T, 0)).sum(0)
        expected = np.sort(np.argsort(-scores, kind="stable")[:chosen]) if count > chosen else np.arange(count)
        assert found[row, : min(count, chosen)].tolist() == expected.tolist(), row
    assert found[1].tolist() == [0, 1, 2, 3, 4]  # all scores are 0


@pytest.mark.parametrize("streams", [4, 3])
def test_residual_streams(streams: int) -> None:
    """What a part reads, what it adds, and what the head reads; streams stay float32 beside narrower activations."""
    rng, hidden, rows = np.random.default_rng(streams), 40, 6

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    outputs = streams * (2 + streams)
    given = floats(outputs, streams * hidden) / 6, floats(outputs), floats(3), floats(streams * hidden)
    x, result = torch.from_numpy(floats(rows, streams * hidden)), torch.from_numpy(floats(rows, hidden))
    found = []
    for ops in (ReferenceOps(), CudaOps(torch.float32, DEVICE), ExactCudaOps(torch.float32, DEVICE)):
        mixes = []
        for count in (outputs, streams):
            weight, base = pack(ops, [from_float(given[0][:count])]), torch.from_numpy(given[1][:count])
            norm = Norm(torch.from_numpy(1 + 0.1 * given[3]).to(ops.device), 1e-6)
            scale = torch.from_numpy(given[2]).to(ops.device)
            mixes.append(StreamMix(streams, norm, weight, base.to(ops.device), scale, 1e-6, 20))
        mine, added = x.to(ops.device), result.to(ops.device)
        read, weights = collapse(ops, mine, mixes[0])
        found.append((read, weights, expand(ops, mine, added, weights, streams), collapse_last(ops, mine, mixes[1])))
    mixing = found[0][1][:, streams:].view(rows, streams, streams)
    torch.testing.assert_close(mixing.sum(1), torch.ones(rows, streams), atol=1e-4, rtol=0)
    for other in found[1:]:
        for got, expected in zip(other, found[0], strict=True):
            close(got, expected, 1e-5)
    for narrow in (CudaOps(torch.bfloat16, DEVICE), ExactCudaOps(torch.bfloat16, DEVICE)) if ON_CARD else ():
        weight = pack(narrow, [from_float(given[0])])
        read, weights = collapse(narrow, spread(mine[:, :hidden].bfloat16(), streams), StreamMix(
            streams, norm, weight, mixes[0].base[:1].repeat(outputs), scale, 1e-6, 20))  # fmt: skip
        assert (read.dtype, weights.dtype) == (torch.bfloat16, torch.float32)


SMALL: dict[str, Any] = {"layer_types": [parity.SLIDING, parity.HEAVY, parity.SPARSE], "num_hidden_layers": 3}


@pytest.mark.parametrize("length", [9, pytest.param(70, marks=slow_here)])
@torch.no_grad()
def test_logits_equal_transformers(length: int, tmp_path: Path) -> None:
    """A model with every kind of layer, experts that a table and that scores choose; in chunks with the same bits."""
    peer = parity.make_peer(tmp_path, **SMALL, n_routed_experts=4)
    tokens = tokens_of(length)
    expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
    for kind in (CudaOps, ExactCudaOps)[length < 20 :]:
        model = parity.load(tmp_path, kind(torch.float32, DEVICE))
        whole = run_tokens(model, tokens)
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
        again = run_tokens(model, tokens, [length - 8, 7, 1])
        torch.testing.assert_close(again, expected, atol=1e-4, rtol=0)
    assert torch.equal(again, whole)


@slow_here
def test_experts_of_four_bits_as_published(tmp_path: Path) -> None:
    """They stay in four bits, as DeepSeek publishes them."""
    _, coded, _ = published_v4(tmp_path)
    tokens = tokens_of(11)
    expected = run_tokens(parity.load(coded), tokens)
    for ops in (CudaOps(torch.float32, DEVICE, keep=True), ExactCudaOps(torch.float32, DEVICE, keep=True)):
        model = parity.load(coded, ops)
        assert all(isinstance(layer.feed.experts.down[0], FourBits) for layer in model.layers)
        torch.testing.assert_close(run_tokens(model, tokens, [10, 1]), expected, atol=1e-4, rtol=0)


def test_kernels_compile_in_the_published_sizes() -> None:
    """For an H200 that need not be there; a program has at most 227 KB of shared memory."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_compressed"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain)
    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == 17
    for name, shared, products in found:
        assert int(shared) <= 227 << 10, name
        assert (int(products) > 0) == (name in ("listed_kernel", "scores_kernel")), name
