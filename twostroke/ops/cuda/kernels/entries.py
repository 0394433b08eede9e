"""What compressed attention writes (ops/compressed.py): rotated heads and keys, what tokens leave, entries.

A row finds the blocks of its request by itself, so nothing of a step's division is needed. A row whose position lies
past its request's context is padding. Rotations turn neighbouring dimensions at the end of a vector, so vectors are
taken as pairs: even and odd dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.compressed_interface import Compressor
from twostroke.ops.interface import Norm, RopeTable

HEADS = 8  # that a program turns
TOKENS = 8  # of an entry, that are mixed side by side
WIDE = 1024  # numbers of a state that a program writes


class EntryPlaces(NamedTuple):
    """Where one kind of entries lies."""

    data: Tensor  # (blocks, entries of a block, width)
    tables: Tensor  # (R, columns)

    def strides(self) -> tuple[int, int, int]:
        return self.data.stride(0), self.data.stride(1), self.tables.stride(0)


class Owners(NamedTuple):
    """Whose rows a step has."""

    positions: Tensor  # (T,)
    requests: Tensor  # (T,) int32: the request of each row
    contexts: Tensor  # (R,) int32


@triton.jit
def turned_pairs(
    even, odd, cos_ptr, sin_ptr, position, pair, PAIRS: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr
):  # fmt: skip
    """(…, pairs) with the last HALF pairs rotated; BACK: the other way round."""
    turn = pair - (PAIRS - HALF)
    turning = (turn >= 0) & (turn < HALF)
    cos = tl.load(cos_ptr + position * HALF + turn, mask=turning, other=1.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + turn, mask=turning, other=0.0)[None, :]
    if BACK:
        sin = -sin
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def normed_pairs(even, odd, norm_ptr, pair, eps, PAIRS: tl.constexpr):
    """(n, pairs), each row normed. Zeros past the last pair."""
    size = tl.rsqrt((tl.sum(even * even, axis=1) + tl.sum(odd * odd, axis=1)) / (2 * PAIRS) + eps)[:, None]
    left = tl.load(norm_ptr + 2 * pair, mask=pair < PAIRS, other=0.0)[None, :]
    right = tl.load(norm_ptr + 2 * pair + 1, mask=pair < PAIRS, other=0.0)[None, :]
    return even * size * left, odd * size * right


@triton.jit
def heads_kernel(
    x_ptr, out_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, eps, x_stride, COUNT: tl.constexpr, PAIRS: tl.constexpr,
    PAIRS_2: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Heads of a row, normed where there is a norm, and rotated: out (T, COUNT, 2 PAIRS)."""
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, PAIRS_2)
    inside = (head < COUNT)[:, None] & (pair < PAIRS)[None, :]
    at = head[:, None] * (2 * PAIRS) + 2 * pair[None, :]
    x = x_ptr + row * x_stride + at
    even = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(x + 1, mask=inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        even, odd = normed_pairs(even, odd, norm_ptr, pair, eps, PAIRS)
    even, odd = turned_pairs(even, odd, cos_ptr, sin_ptr, tl.load(positions_ptr + row), pair, PAIRS, HALF, BACK)
    out = out_ptr + row * (COUNT * 2 * PAIRS) + at
    tl.store(out, even.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out + 1, odd.to(out_ptr.dtype.element_ty), mask=inside)


def turned_heads(
    x: Tensor, heads: int, rope: RopeTable, positions: Tensor, norm: Norm | None = None, *, back: bool = False
) -> Tensor:
    """x (T, heads · dim), normed and rotated; back: the other way round."""
    pairs, out = x.shape[1] // heads // 2, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads_kernel[(x.shape[0], triton.cdiv(heads, HEADS))](
        x, out, None if norm is None else norm.weight, rope.cos, rope.sin, positions, 0.0 if norm is None else norm.eps,
        x.stride(0), COUNT=heads, PAIRS=pairs, PAIRS_2=triton.next_power_of_2(pairs), HALF=rope.cos.shape[1], BACK=back,
        BLOCK_H=HEADS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def place_of(tables, number, block_stride, entry_stride, SIZE: tl.constexpr):
    """Where an entry begins, in elements, by its number in a request with this table."""
    return tl.load(tables + number // SIZE).to(tl.int64) * block_stride + number % SIZE * entry_stride


@triton.jit(do_not_specialize=["table_stride"])
def keys_kernel(
    x_ptr, data_ptr, tables_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, requests_ptr, contexts_ptr, eps, x_stride,
    block_stride, entry_stride, table_stride, SIZE: tl.constexpr, PAIRS: tl.constexpr, PAIRS_2: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """A row's key, normed and rotated, into the cache."""
    row = tl.program_id(0).to(tl.int64)
    position, request = tl.load(positions_ptr + row), tl.load(requests_ptr + row)
    if position >= tl.load(contexts_ptr + request):
        return
    pair = tl.arange(0, PAIRS_2)
    inside = (pair < PAIRS)[None, :]
    x = x_ptr + row * x_stride + 2 * pair[None, :]
    even = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(x + 1, mask=inside, other=0.0).to(tl.float32)
    even, odd = normed_pairs(even, odd, norm_ptr, pair, eps, PAIRS)
    even, odd = turned_pairs(even, odd, cos_ptr, sin_ptr, position, pair, PAIRS, HALF, False)
    tables = tables_ptr + request.to(tl.int64) * table_stride
    to = data_ptr + place_of(tables, position, block_stride, entry_stride, SIZE) + 2 * pair[None, :]
    tl.store(to, even.to(data_ptr.dtype.element_ty), mask=inside)
    tl.store(to + 1, odd.to(data_ptr.dtype.element_ty), mask=inside)


def write_keys(x: Tensor, places: EntryPlaces, norm: Norm, rope: RopeTable, owners: Owners) -> None:
    pairs = x.shape[1] // 2
    keys_kernel[(x.shape[0],)](
        x, *places, norm.weight, rope.cos, rope.sin, *owners, norm.eps, x.stride(0), *places.strides(),
        SIZE=places.data.shape[1], PAIRS=pairs, PAIRS_2=triton.next_power_of_2(pairs), HALF=rope.cos.shape[1],
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def states_kernel(
    x_ptr, biases_ptr, data_ptr, tables_ptr, positions_ptr, requests_ptr, contexts_ptr, x_stride, block_stride,
    entry_stride, table_stride, SIZE: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a row leaves, with the biases of its place (RATIO, WIDTH), into the cache."""
    row = tl.program_id(0).to(tl.int64)
    position, request = tl.load(positions_ptr + row), tl.load(requests_ptr + row)
    if position >= tl.load(contexts_ptr + request):
        return
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < WIDTH
    x = tl.load(x_ptr + row * x_stride + dims, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(biases_ptr + position % RATIO * WIDTH + dims, mask=inside, other=0.0)
    tables = tables_ptr + request.to(tl.int64) * table_stride
    tl.store(data_ptr + place_of(tables, position, block_stride, entry_stride, SIZE) + dims, x, mask=inside)


def write_states(x: Tensor, biases: Tensor, places: EntryPlaces, owners: Owners) -> None:
    ratio, width = biases.shape
    states_kernel[(x.shape[0], triton.cdiv(width, WIDE))](
        x, biases, *places, *owners, x.stride(0), *places.strides(), SIZE=places.data.shape[1], RATIO=ratio,
        WIDTH=width, BLOCK=min(WIDE, triton.next_power_of_2(width)), num_warps=4,
    )  # fmt: skip


@triton.jit
def states_of(
    data_ptr, tables, first, block_stride, entry_stride, t0, pair, SIZE: tl.constexpr, RATIO: tl.constexpr,
    BEFORE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Where the numbers of BLOCK_T tokens of an entry begin, and which of them there are. Of tokens before the entry's
    own the first vector counts, of the others the last one."""
    token = t0 + tl.arange(0, BLOCK_T)
    number = first - BEFORE + token
    there = (token < BEFORE + RATIO) & (number >= 0)
    number = tl.where(there, number, first)
    blocks = tl.load(tables + number // SIZE).to(tl.int64)
    second = (token >= BEFORE) & (BEFORE > 0)
    at = blocks * block_stride + number % SIZE * entry_stride + tl.where(second, 2 * PAIRS, 0)
    return data_ptr + at[:, None] + 2 * pair[None, :], there[:, None] & (pair < PAIRS)[None, :]


@triton.jit(do_not_specialize=["state_table_stride", "table_stride"])
def compress_kernel(
    state_ptr, state_tables_ptr, data_ptr, tables_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, requests_ptr,
    contexts_ptr, eps, state_block_stride, state_entry_stride, state_table_stride, block_stride, entry_stride,
    table_stride, OFFSET: tl.constexpr, STATE_SIZE: tl.constexpr, SIZE: tl.constexpr, RATIO: tl.constexpr,
    BEFORE: tl.constexpr, PAIRS: tl.constexpr, PAIRS_2: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The entry that a row completes, if it does: for each dimension the mean of what the tokens left, weighted by the
    softmax of their logits; normed, rotated to the place of its first token. OFFSET: of the values in a state. BEFORE:
    tokens before the entry's own."""
    row = tl.program_id(0).to(tl.int64)
    position, request = tl.load(positions_ptr + row), tl.load(requests_ptr + row)
    if ((position + 1) % RATIO != 0) | (position >= tl.load(contexts_ptr + request)):
        return
    LOGITS: tl.constexpr = 4 * PAIRS if BEFORE > 0 else 2 * PAIRS  # from a token's values to their logits
    first, pair = position + 1 - RATIO, tl.arange(0, PAIRS_2)
    states = state_tables_ptr + request.to(tl.int64) * state_table_stride
    state_ptr += OFFSET
    even_top, odd_top = tl.full((PAIRS_2,), float("-inf"), tl.float32), tl.full((PAIRS_2,), float("-inf"), tl.float32)
    for t0 in range(0, BEFORE + RATIO, BLOCK_T):
        at, there = states_of(
            state_ptr, states, first, state_block_stride, state_entry_stride, t0, pair, STATE_SIZE, RATIO, BEFORE,
            PAIRS, BLOCK_T,
        )  # fmt: skip
        even_top = tl.maximum(even_top, tl.max(tl.load(at + LOGITS, mask=there, other=float("-inf")), axis=0))
        odd_top = tl.maximum(odd_top, tl.max(tl.load(at + LOGITS + 1, mask=there, other=float("-inf")), axis=0))
    even_top, odd_top = tl.where(pair < PAIRS, even_top, 0.0), tl.where(pair < PAIRS, odd_top, 0.0)
    even, odd = tl.zeros((PAIRS_2,), tl.float32), tl.zeros((PAIRS_2,), tl.float32)
    even_total, odd_total = even, odd
    for t0 in range(0, BEFORE + RATIO, BLOCK_T):
        at, there = states_of(
            state_ptr, states, first, state_block_stride, state_entry_stride, t0, pair, STATE_SIZE, RATIO, BEFORE,
            PAIRS, BLOCK_T,
        )  # fmt: skip
        counts = tl.exp(tl.load(at + LOGITS, mask=there, other=float("-inf")) - even_top[None, :])
        even_total += tl.sum(counts, axis=0)
        even += tl.sum(counts * tl.load(at, mask=there, other=0.0), axis=0)
        counts = tl.exp(tl.load(at + LOGITS + 1, mask=there, other=float("-inf")) - odd_top[None, :])
        odd_total += tl.sum(counts, axis=0)
        odd += tl.sum(counts * tl.load(at + 1, mask=there, other=0.0), axis=0)
    even = tl.where(pair < PAIRS, even / even_total, 0.0)[None, :]
    odd = tl.where(pair < PAIRS, odd / odd_total, 0.0)[None, :]
    even, odd = normed_pairs(even, odd, norm_ptr, pair, eps, PAIRS)
    even, odd = turned_pairs(even, odd, cos_ptr, sin_ptr, first, pair, PAIRS, HALF, False)
    tables = tables_ptr + request.to(tl.int64) * table_stride
    to = data_ptr + place_of(tables, first // RATIO, block_stride, entry_stride, SIZE) + 2 * pair[None, :]
    inside = (pair < PAIRS)[None, :]
    tl.store(to, even.to(data_ptr.dtype.element_ty), mask=inside)
    tl.store(to + 1, odd.to(data_ptr.dtype.element_ty), mask=inside)


def write_entries(
    states: EntryPlaces, offset: int, places: EntryPlaces, compressor: Compressor, rope: RopeTable, owners: Owners
) -> None:
    """The entries that rows complete, from the states of their tokens. offset: where these begin in a state."""
    pairs, norm = compressor.dim // 2, compressor.norm
    compress_kernel[(len(owners.positions),)](
        *states, *places, norm.weight, rope.cos, rope.sin, *owners, norm.eps, *states.strides(), *places.strides(),
        OFFSET=offset, STATE_SIZE=states.data.shape[1], SIZE=places.data.shape[1], RATIO=compressor.ratio,
        BEFORE=compressor.ratio if compressor.overlap else 0, PAIRS=pairs, PAIRS_2=triton.next_power_of_2(pairs),
        HALF=rope.cos.shape[1], BLOCK_T=TOKENS, num_warps=8,
    )  # fmt: skip
