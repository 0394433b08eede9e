"""Paged attention in torch calls, exact under any batching.

The rows of a step are cut into pieces (a few query tokens of one request and the key tiles they may see), and pieces of
equal shape are stacked into one batched product:

    scores  (P·kv_heads, rows, D) @ (P·kv_heads, D, keys)      rows = query tokens · query heads of one K/V head
    weights exp(score - largest score of the row)              hidden keys: exactly 0
    result  Σ over key tiles, ascending, of weights @ values   divided by the sum of the weights, summed alike

Key tiles lie at absolute positions, so one reduction tree serves prefill, chunk and decode: the largest score is the
same in any order, and a tile that is hidden altogether adds exact zeros, whether it is visited or not.

K and V are gathered token by token. A position that holds nothing of the request's own is read from one that does, so
whatever else lies in the pool, not-a-number included, never enters a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer
from twostroke.ops.kv_codec import decode_kv, encode_kv
from twostroke.ops.tiles import agreeing

TILE = 128  # keys added up in one product
_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_SCORES = 1 << 22  # scores held at a time, about: 16 MiB
_LOWEST = -80.0  # exp below this is nothing beside a weight of 1, and many times slower to compute


@dataclass(frozen=True, slots=True)
class Piece:
    """Query rows `row : row + count` of one request, at positions from `position` on; keys from tile `first` on."""

    request: int
    row: int
    count: int
    position: int
    first: int
    tiles: int
    own: tuple[int, int]  # positions whose K and V belong to the request


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Pieces of one shape: P pieces of Q query tokens (shorter ones repeat their last row), all with the same keys."""

    rows: Tensor  # (P · Q,) int64: row of the batch
    pieces: int
    size: int  # rows of the product: Q · query heads of a K/V head, padded to a count that agrees with all others
    tokens: Tensor  # (P · kv_heads · keys,) int64: row of the pool (see `token_rows`)
    keys: int
    edge: int  # keys before this one are seen by every query of the stack
    bias: Tensor  # (P, 1, Q, 1, keys - edge): 0 or, where the query must not see the key, a score below all others
    seen: Tensor  # the same as factors 1 and 0


@lru_cache(maxsize=64)
def row_counts(head_dim: int, threads: int) -> tuple[int, ...]:
    """Row counts that agree for both products, whatever the number of stacked matrices and of key tiles."""
    generator = torch.Generator().manual_seed(head_dim)
    keys, values = (torch.randn(3 * TILE, head_dim, generator=generator) for _ in range(2))
    rows = torch.randn(_SIZES[-1], head_dim, generator=generator)

    def product(q: Tensor) -> Tensor | None:
        results: list[Tensor] = []
        for stacked, tiles in ((1, 1), (2, 3), (7, 2)):
            k, v = (x[: tiles * TILE].expand(stacked, -1, -1).contiguous() for x in (keys, values))
            scores = torch.bmm(q.expand(stacked, -1, -1).contiguous(), k.transpose(1, 2))
            scores[:, :, TILE:] = 0.0  # as if hidden: further tiles must change nothing
            results += torch.cat((scores[:, :, :TILE], weighted(scores, v)), dim=2).unbind()
        return results[0] if all(torch.equal(results[0], other) for other in results) else None

    found = agreeing(product, rows, _SIZES)
    if not found:
        raise RuntimeError("This CPU's matrix library gives results that depend on the batch; exactness is impossible.")
    return found


# ---- how a step is cut: once for a batch, the same for every layer of a group ---------------------------------------


def cut_step(batch: Batch, group: int, attention: Attention, stride: int) -> list[Stack]:
    """stride: rows of the pool from one block to the next."""
    sizes = row_counts(attention.head_dim, torch.get_num_threads())
    share = attention.heads // attention.kv_heads
    alike: dict[tuple[int, int], list[Piece]] = {}
    for piece in cut_pieces(batch, attention, sizes):
        size = min((s for s in sizes if s >= piece.count * share), default=sizes[-1])
        alike.setdefault((size, 1 << (piece.tiles - 1).bit_length()), []).append(piece)
    stacks = []
    for (size, length), members in alike.items():
        together = max(1, _SCORES // (attention.kv_heads * size * length * TILE))
        for start in range(0, len(members), together):
            pieces = members[start : start + together]
            stacks.append(make_stack(pieces, batch.groups[group].tables, attention, size, stride))
    return stacks


def cut_pieces(batch: Batch, attention: Attention, sizes: tuple[int, ...]) -> list[Piece]:
    """Cut every request's rows so that a piece's scores fit the budget."""
    pieces = []
    starts, contexts = batch.starts.tolist(), batch.contexts.tolist()
    share, window = attention.heads // attention.kv_heads, attention.window
    for request, context in enumerate(contexts):
        start, stop = starts[request], starts[request + 1]
        begin = context - (stop - start)  # position of the first row
        own = (max(0, begin - window + 1) if window else 0, context)
        widest = max(1, _SCORES // (attention.kv_heads * -(-context // TILE) * TILE))
        step = max(1, max((s for s in sizes if s <= widest), default=sizes[0]) // share)
        for row in range(start, stop, step):
            count = min(step, stop - row)
            position = begin + row - start
            first = max(0, position - window + 1) // TILE if window else 0
            tiles = (position + count - 1) // TILE + 1 - first
            pieces.append(Piece(request, row, count, position, first, tiles, own))
    return pieces


def make_stack(pieces: list[Piece], tables: Tensor, attention: Attention, size: int, stride: int) -> Stack:
    keys = max(piece.tiles for piece in pieces) * TILE
    last = torch.tensor([piece.count - 1 for piece in pieces])[:, None]
    steps = torch.arange(int(last.max()) + 1).minimum(last)  # (P, Q)
    rows = torch.tensor([piece.row for piece in pieces])[:, None] + steps
    position = torch.tensor([piece.position for piece in pieces])[:, None] + steps
    key = torch.tensor([piece.first * TILE for piece in pieces])[:, None] + torch.arange(keys)  # (P, keys)
    low, high = (torch.tensor([piece.own[end] for piece in pieces])[:, None] for end in (0, 1))
    place = torch.where((key >= low) & (key < high), key, low)  # a position of the request's own
    block = tables[[piece.request for piece in pieces]].long().gather(1, place // BLOCK)
    heads = torch.arange(attention.kv_heads)[:, None] * BLOCK
    tokens = (block * stride + place % BLOCK)[:, None, :] + heads  # (P, kv_heads, keys)
    edge = 0 if attention.window else min(piece.position for piece in pieces) // TILE * TILE
    key, position = key[:, None, edge:], position[:, :, None]
    seen = key <= position  # (P, Q, keys - edge)
    if attention.window:
        seen &= key > position - attention.window
    seen = seen[:, None, :, None, :]
    bias = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    return Stack(rows.flatten(), len(pieces), size, tokens.flatten(), keys, edge, bias, seen.float())


# ---- the pool, seen as one row for each block, head and token -------------------------------------------------------


def token_stride(kv: KVLayer) -> int:
    """Rows of `token_rows` from one block to the next; head h and offset o add h · BLOCK + o."""
    return kv.keys.stride(0) // kv.keys.shape[3]


def token_rows(codes: Tensor) -> Tensor:
    """(blocks, kv_heads, BLOCK, width) with its block stride -> (rows, width), the same memory."""
    blocks, heads, _, width = codes.shape
    rows = (blocks - 1) * (codes.stride(0) // width) + heads * BLOCK
    return codes.as_strided((rows, width), (width, 1))


def scale_rows(scales: Tensor) -> Tensor:
    """The scales as one run, indexed as `token_rows` is."""
    return scales.as_strided(((scales.shape[0] - 1) * scales.stride(0) + scales.shape[1] * BLOCK,), (1,))


def load(codes: Tensor, scales: Tensor | None, tokens: Tensor, kv: KVLayer) -> Tensor:
    """Stored entries as float32 (tokens, head_dim)."""
    found = token_rows(codes).index_select(0, tokens)
    return decode_kv(found, None if scales is None else scale_rows(scales).index_select(0, tokens), kv.format)


def store(kv: KVLayer, tokens: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v (T, kv_heads, head_dim) to rows `tokens` (T · kv_heads,)."""
    for x, codes, scales in ((k, kv.keys, kv.key_scales), (v, kv.values, kv.value_scales)):
        new_codes, new_scales = encode_kv(x.reshape(-1, x.shape[2]), kv.format)
        token_rows(codes).index_copy_(0, tokens, new_codes)
        if scales is not None and new_scales is not None:
            scale_rows(scales).index_copy_(0, tokens, new_scales)


# ---- one stack ------------------------------------------------------------------------------------------------------


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Σ over key tiles in ascending order: weights (N, rows, keys), values (N, keys, D) -> (N, rows, D)."""
    out = weights.new_zeros(weights.shape[0], weights.shape[1], values.shape[2])
    for start in range(0, weights.shape[2], TILE):
        out.baddbmm_(weights[:, :, start : start + TILE], values[:, start : start + TILE])
    return out


def attend_stack(q: Tensor, out: Tensor, attention: Attention, kv: KVLayer, stack: Stack) -> None:
    """q (T, heads, D), already multiplied by the scale; the stack's rows of out (T, heads, D) are filled."""
    kv_heads, dim, pieces, keys = attention.kv_heads, attention.head_dim, stack.pieces, stack.keys
    share, count = attention.heads // kv_heads, len(stack.rows) // pieces
    used = count * share
    mine = q[stack.rows].view(pieces, count, kv_heads, share, dim).transpose(1, 2)  # (P, kv_heads, Q, share, D)
    queries = q.new_zeros(pieces * kv_heads, stack.size, dim)
    queries[:, :used] = mine.reshape(pieces * kv_heads, used, dim)
    k = load(kv.keys, kv.key_scales, stack.tokens, kv).view(-1, keys, dim)
    scores = torch.bmm(queries, k.transpose(1, 2))  # (P·kv_heads, size, keys)
    if attention.softcap:
        scores.div_(attention.softcap).tanh_().mul_(attention.softcap)
    edge = scores[:, :used].view(pieces, kv_heads, count, share, keys)[..., stack.edge :]
    edge += stack.bias
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).clamp_(min=_LOWEST).exp_()
    edge *= stack.seen  # the same memory, now holding weights
    # cumsum adds in order, whatever the number of tiles; sum would not.
    total = weights.view(*weights.shape[:2], -1, TILE).sum(dim=-1).cumsum(dim=-1)[..., -1:]  # (N, size, 1)
    v = load(kv.values, kv.value_scales, stack.tokens, kv).view(-1, keys, dim)
    result = weighted(weights, v).div_(total)[:, :used]
    result = result.reshape(pieces, kv_heads, count, share, dim).transpose(1, 2)  # (P, Q, kv_heads, share, D)
    out.index_copy_(0, stack.rows, result.reshape(pieces * count, attention.heads, dim))
