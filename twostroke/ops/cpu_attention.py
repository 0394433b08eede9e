"""Paged attention in torch calls, exact under any batching.

The rows of a step are cut into pieces (a few query tokens of one request and the key tiles they may see), and pieces of
equal shape are stacked into one batched product:

    scores  (P·kv_heads, rows, D) @ (P·kv_heads, D, keys)      rows = query tokens · query heads of one K/V head
    weights exp(score - largest score of the row)              masked keys: exactly 0
    result  Σ over key tiles, ascending, of weights @ values   divided by the sum of the weights, summed alike

Key tiles lie at absolute positions, so one reduction tree serves prefill, chunk and decode: the largest score is the
same in any order, and a tile that is masked altogether adds exact zeros, whether it is visited or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer
from twostroke.ops.kv_codec import decode_kv
from twostroke.ops.tiles import agreeing

TILE = 128  # keys added up in one product
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SCORES = 1 << 22  # scores held at a time, about: 16 MiB


@dataclass(frozen=True, slots=True)
class Piece:
    """Query rows `row : row + count` of one request, at positions from `position` on; keys from tile `first` on."""

    request: int
    row: int
    count: int
    position: int
    first: int
    tiles: int
    valid: tuple[int, int]  # positions whose K and V belong to the request; others may hold anything


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Pieces of one shape: P pieces of Q query tokens (shorter ones repeat their last row) and `tiles` key tiles."""

    rows: Tensor  # (P, Q) int64: row of the batch
    used: tuple[tuple[int, int, int], ...]  # (piece, row of the batch, count)
    size: int  # rows of the product: Q · query heads of a K/V head, padded to a count that agrees with all others
    blocks: Tensor  # (P, tiles · TILE / BLOCK) int64
    hidden: Tensor  # (P, 1, Q, 1, keys - edge) bool: what the query must not see
    edge: int  # keys before this one are seen by every query of the stack
    alien: Tensor  # (P, 1, keys - alien_edge, 1) bool: keys that are not the request's own
    alien_edge: int


@lru_cache(maxsize=64)
def row_counts(head_dim: int, threads: int) -> tuple[int, ...]:
    """Row counts that agree for both products, whatever the number of stacked matrices and of key tiles."""
    generator = torch.Generator().manual_seed(head_dim)
    keys = torch.randn(head_dim, 3 * TILE, generator=generator)
    values = torch.randn(3 * TILE, head_dim, generator=generator)
    rows = torch.randn(_SIZES[-1], head_dim, generator=generator)

    def product(q: Tensor) -> Tensor | None:
        results: list[Tensor] = []
        for stacked, tiles in ((1, 1), (2, 3), (7, 2)):
            k = keys[:, : tiles * TILE].expand(stacked, -1, -1).contiguous()
            v = values[: tiles * TILE].expand(stacked, -1, -1).contiguous()
            scores = torch.bmm(q.expand(stacked, -1, -1).contiguous(), k)
            scores[:, :, TILE:] = 0.0  # as if masked: further tiles must change nothing
            results += torch.cat((scores[:, :, :TILE], weighted(scores, v)), dim=2).unbind()
        return results[0] if all(torch.equal(results[0], other) for other in results) else None

    found = agreeing(product, rows, _SIZES)
    if not found:
        raise RuntimeError("This CPU's matrix library gives results that depend on the batch; exactness is impossible.")
    return found


def cut_pieces(batch: Batch, window: int, share: int, kv_heads: int, sizes: tuple[int, ...]) -> list[Piece]:
    """Cut every request's rows so that a piece's scores fit the budget. share: query heads of one K/V head."""
    pieces = []
    starts, contexts = batch.starts.tolist(), batch.contexts.tolist()
    for request, context in enumerate(contexts):
        start, stop = starts[request], starts[request + 1]
        begin = context - (stop - start)  # position of the first row
        valid = (max(0, begin - window + 1) if window else 0, context)
        widest = max(1, _SCORES // (kv_heads * -(-context // TILE) * TILE))
        size = max((s for s in sizes if s <= widest), default=sizes[0])
        step = max(1, size // share)
        for row in range(start, stop, step):
            count = min(step, stop - row)
            position = begin + row - start
            first = max(0, position - window + 1) // TILE if window else 0
            tiles = (position + count - 1) // TILE + 1 - first
            pieces.append(Piece(request, row, count, position, first, tiles, valid))
    return pieces


def stack_pieces(
    pieces: list[Piece], tables: Tensor, window: int, share: int, kv_heads: int, sizes: tuple[int, ...]
) -> list[Stack]:
    """Pieces of one row count and similar length go together."""
    alike: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        size = min((s for s in sizes if s >= piece.count * share), default=sizes[-1])
        alike.setdefault((size, 1 << (piece.tiles - 1).bit_length()), []).append(piece)
    stacks = []
    for (size, length), members in alike.items():
        together = max(1, _SCORES // (kv_heads * size * length * TILE))
        for start in range(0, len(members), together):
            stacks.append(make_stack(members[start : start + together], tables, window, size))
    return stacks


def make_stack(pieces: list[Piece], tables: Tensor, window: int, size: int) -> Stack:
    count = max(piece.count for piece in pieces)
    keys = max(piece.tiles for piece in pieces) * TILE
    steps = torch.arange(count)
    rows = torch.stack([piece.row + steps.clamp(max=piece.count - 1) for piece in pieces])  # (P, Q)
    start = torch.tensor([piece.first * TILE for piece in pieces])  # (P,)
    position = torch.tensor([piece.position for piece in pieces])[:, None] + steps  # (P, Q)
    key = start[:, None] + torch.arange(keys)  # (P, keys)
    column = (start[:, None] // BLOCK + torch.arange(keys // BLOCK)).clamp(max=tables.shape[1] - 1)
    blocks = tables[[piece.request for piece in pieces]].long().gather(1, column)
    hidden = key[:, None, :] > position[:, :, None]  # (P, Q, keys)
    low, high = (torch.tensor([piece.valid[end] for piece in pieces])[:, None] for end in (0, 1))
    edge = alien_edge = 0
    if window:
        hidden |= key[:, None, :] <= position[:, :, None] - window
    else:
        edge = min(piece.position - piece.first * TILE for piece in pieces) // BLOCK * BLOCK
        alien_edge = min(piece.valid[1] - piece.first * TILE for piece in pieces) // BLOCK * BLOCK
    alien = (key < low) | (key >= high)
    return Stack(
        rows,
        tuple((index, piece.row, piece.count) for index, piece in enumerate(pieces)),
        size,
        blocks,
        hidden[:, None, :, None, edge:],
        edge,
        alien[:, None, alien_edge:, None],
        min(alien_edge, keys),
    )


def gather(codes: Tensor, scales: Tensor | None, blocks: Tensor, kv: KVLayer) -> Tensor:
    """The stored entries of `blocks` (P, C) as float32 (P, C, kv_heads, BLOCK, head_dim)."""
    return decode_kv(codes[blocks], None if scales is None else scales[blocks], kv.format)


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Σ over key tiles in ascending order: weights (N, rows, keys), values (N, keys, D) -> (N, rows, D)."""
    out = weights.new_zeros(weights.shape[0], weights.shape[1], values.shape[2])
    for start in range(0, weights.shape[2], TILE):
        out.baddbmm_(weights[:, :, start : start + TILE], values[:, start : start + TILE])
    return out


def attend_stack(q: Tensor, out: Tensor, attention: Attention, kv: KVLayer, stack: Stack) -> None:
    """q (T, heads, D), already multiplied by the scale; the stack's rows of out (T, heads, D) are filled."""
    pieces, count = stack.rows.shape
    kv_heads, dim = attention.kv_heads, attention.head_dim
    share = attention.heads // kv_heads
    keys = stack.blocks.shape[1] * BLOCK
    k = gather(kv.keys, kv.key_scales, stack.blocks, kv).permute(0, 2, 4, 1, 3).reshape(-1, dim, keys)
    v = gather(kv.values, kv.value_scales, stack.blocks, kv).permute(0, 2, 1, 3, 4).reshape(pieces, kv_heads, keys, dim)
    v[:, :, stack.alien_edge :].masked_fill_(stack.alien, 0.0)
    queries = q.new_zeros(pieces * kv_heads, stack.size, dim)
    mine = q[stack.rows].view(pieces, count, kv_heads, share, dim).permute(0, 2, 1, 3, 4)  # (P, kv_heads, Q, share, D)
    queries[:, : count * share] = mine.reshape(pieces * kv_heads, count * share, dim)
    scores = torch.bmm(queries, k)  # (P·kv_heads, size, keys)
    if attention.softcap:
        scores = scores.div_(attention.softcap).tanh_().mul_(attention.softcap)
    view = scores[:, : count * share].view(pieces, kv_heads, count, share, keys)
    view[..., stack.edge :].masked_fill_(stack.hidden, float("-inf"))
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    # cumsum adds in order, whatever the number of tiles; sum would not.
    total = weights.view(*weights.shape[:2], -1, TILE).sum(dim=-1).cumsum(dim=-1)[..., -1:]  # (N, size, 1)
    result = weighted(weights, v.flatten(0, 1)).div_(total)[:, : count * share]
    result = result.view(pieces, kv_heads, count, share, dim).permute(0, 2, 1, 3, 4)  # (P, Q, kv_heads, share, D)
    for piece, row, used in stack.used:
        out[row : row + used] = result[piece, :used].reshape(used, attention.heads, dim)
