"""Paged attention in torch calls, exact under any batching.

The rows of a step are cut into pieces (a few query tokens of one request and the key tiles they may see), and pieces of
equal shape are stacked into one batched product:

    scores  (P·heads·tiles, rows, D) @ (…, D, TILE)             heads: of K and V; rows: query tokens · query heads
    weights exp(score - largest score of the row)               hidden keys: exactly 0
    parts   (P·heads·tiles, rows, TILE) @ (…, TILE, D)
    result  Σ of the parts over the tiles, ascending, divided by the sum of the weights, summed alike

Key tiles lie at absolute positions, so one reduction tree serves prefill, chunk and decode: the largest score is the
same in any order, and a tile that is hidden altogether adds exact zeros, whether it is visited or not. The products
have one shape but for the number of rows and of stacked matrices; those are held to counts that were tried and agree.

K and V are gathered token by token. A position that holds nothing of the request's own is read from one that does, so
whatever else lies in the pool, not-a-number included, never enters a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer
from twostroke.ops.kv_codec import decode_kv, encode_kv
from twostroke.ops.tiles import agreeing

TILE = 128  # keys added up in one product
_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
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
    """Pieces of one shape: P pieces of Q query tokens (shorter ones repeat their last row) and `tiles` key tiles."""

    rows: Tensor  # (P, Q) int64: row of the batch
    tokens: Tensor  # (P, heads, tiles · TILE) int64: row of the pool (see `token_rows`)
    size: (
        int  # rows of a product: Q · query heads that read one K/V head, padded to a count that agrees with all others
    )
    matrices: int  # stacked in a product, padded likewise
    tiles: int
    clear: int  # tiles before this one are seen whole by every query of the stack
    bias: Tensor  # (P, 1, tiles - clear, Q, 1, TILE): 0 or, where the query must not see the key, far below any score
    seen: Tensor  # the same as factors 1 and 0


@lru_cache(maxsize=64)
def agreed_shapes(head_dim: int, threads: int) -> tuple[tuple[int, ...], int]:
    """(row counts, least number of stacked matrices) within which both products agree, whatever is stacked.

    With few matrices a library may share each out among its threads, with many it gives every thread its own.
    """
    counts = sorted({1, 2, 3, 4, 5, 8, threads, threads + 1, 2 * threads, 2 * threads + 1, 4 * threads + 3})
    rows = torch.randn(_SIZES[-1], head_dim, generator=torch.Generator().manual_seed(head_dim))
    best: tuple[tuple[int, ...], int] = ((), 1)
    for least in (1, 2, threads, 2 * threads):
        found = agreeing(partial(try_products, counts=[n for n in counts if n >= least]), rows, _SIZES)
        if len(found) > len(best[0]):
            best = (found, least)
        if len(best[0]) >= len(_SIZES) - 5:
            break
    if not best[0]:
        raise RuntimeError("This CPU's matrix library gives results that depend on the batch; exactness is impossible.")
    return best


def try_products(q: Tensor, counts: list[int]) -> Tensor | None:
    """Both products of rows q (n, D) with random K and V, the same for every number of stacked matrices, or None."""
    generator = torch.Generator().manual_seed(q.shape[1])
    keys, values = (torch.randn(TILE, q.shape[1], generator=generator) for _ in range(2))
    results: list[Tensor] = []
    for n in counts:
        many, k, v = (x.expand(n, -1, -1).contiguous() for x in (q, keys, values))
        scores = torch.bmm(many, k.transpose(1, 2))
        results += torch.cat((scores, torch.bmm(scores, v)), dim=2).unbind()
    return results[0] if all(torch.equal(results[0], other) for other in results) else None


# ---- how a step is cut: once for a batch, the same for every layer of a group ---------------------------------------


def cut_step(batch: Batch, group: int, attention: Attention, stride: int) -> list[Stack]:
    """stride: rows of the pool from one block to the next."""
    sizes, least = agreed_shapes(attention.head_dim, torch.get_num_threads())
    whole = attention.heads // attention.kv_heads
    share = max(s for s in range(1, whole + 1) if whole % s == 0 and s <= sizes[-1])
    heads = torch.arange(attention.kv_heads).repeat_interleave(whole // share)
    alike: dict[tuple[int, int], list[Piece]] = {}
    for piece in cut_pieces(batch, attention.window, share, len(heads), sizes):
        size = min(s for s in sizes if s >= piece.count * share)
        alike.setdefault((size, 1 << (piece.tiles - 1).bit_length()), []).append(piece)
    stacks = []
    for (size, length), members in alike.items():
        together = max(1, _SCORES // (len(heads) * size * length * TILE))
        for start in range(0, len(members), together):
            pieces = members[start : start + together]
            rows = token_index(pieces, batch.groups[group].tables, heads, stride)
            stacks.append(make_stack(pieces, rows, attention.window, size, max(least, rows.numel() // TILE)))
    return stacks


def cut_pieces(batch: Batch, window: int, share: int, heads: int, sizes: tuple[int, ...]) -> list[Piece]:
    """Cut every request's rows so that a piece's scores fit the budget. share: query heads that read one K/V head."""
    pieces = []
    starts, contexts = batch.starts.tolist(), batch.contexts.tolist()
    for request, context in enumerate(contexts):
        start, stop = starts[request], starts[request + 1]
        begin = context - (stop - start)  # position of the first row
        own = (max(0, begin - window + 1) if window else 0, context)
        widest = max(share, _SCORES // (heads * -(-context // TILE) * TILE))
        step = max(1, max((s for s in sizes if s <= widest), default=share) // share)
        for row in range(start, stop, step):
            count = min(step, stop - row)
            position = begin + row - start
            first = max(0, position - window + 1) // TILE if window else 0
            tiles = (position + count - 1) // TILE + 1 - first
            pieces.append(Piece(request, row, count, position, first, tiles, own))
    return pieces


def token_index(pieces: list[Piece], tables: Tensor, heads: Tensor, stride: int) -> Tensor:
    """(P, heads, keys): the row of the pool where each key lies. heads: the K/V head that each matrix reads."""
    keys = torch.arange(max(piece.tiles for piece in pieces) * TILE)
    key = torch.tensor([piece.first * TILE for piece in pieces])[:, None] + keys  # (P, keys)
    low, high = (torch.tensor([piece.own[end] for piece in pieces])[:, None] for end in (0, 1))
    place = torch.where((key >= low) & (key < high), key, low)  # a position of the request's own
    block = tables[[piece.request for piece in pieces]].long().gather(1, place // BLOCK)
    return (block * stride + place % BLOCK)[:, None, :] + heads[:, None] * BLOCK


def make_stack(pieces: list[Piece], tokens: Tensor, window: int, size: int, matrices: int) -> Stack:
    tiles = max(piece.tiles for piece in pieces)
    last = torch.tensor([piece.count - 1 for piece in pieces])[:, None]
    steps = torch.arange(int(last.max()) + 1).minimum(last)  # (P, Q)
    rows = torch.tensor([piece.row for piece in pieces])[:, None] + steps
    position = (torch.tensor([piece.position for piece in pieces])[:, None] + steps)[:, None, None, :, None, None]
    clear = 0 if window else min(piece.position + 1 for piece in pieces) // TILE
    key = torch.tensor([piece.first * TILE for piece in pieces])[:, None] + torch.arange(clear * TILE, tiles * TILE)
    key = key.view(len(pieces), 1, tiles - clear, 1, 1, TILE)
    seen = key <= position  # (P, 1, tiles - clear, Q, 1, TILE)
    if window:
        seen &= key > position - window
    bias = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    return Stack(rows, tokens, size, matrices, tiles, clear, bias, seen.float())


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


def stacked_product(left: Tensor, right: Tensor, matrices: int) -> Tensor:
    """left (N, rows, inner) @ right (N, inner, columns), with empty matrices up to the number that agrees."""
    count = left.shape[0]
    if count < matrices:
        left, right = (torch.cat((x, x.new_zeros(matrices - count, *x.shape[1:]))) for x in (left, right))
    return torch.bmm(left, right)[:count]


def attend_stack(q: Tensor, out: Tensor, attention: Attention, kv: KVLayer, stack: Stack) -> None:
    """q (T, heads, D), already multiplied by the scale; the stack's rows of out (T, heads, D) are filled."""
    (pieces, count), heads, tiles, dim = stack.rows.shape, stack.tokens.shape[1], stack.tiles, attention.head_dim
    rows, tokens, share = stack.rows.flatten(), stack.tokens.flatten(), attention.heads // heads
    used = count * share
    mine = q[rows].view(pieces, count, heads, share, dim).transpose(1, 2)  # (P, heads, Q, share, D)
    queries = q.new_zeros(pieces * heads, tiles, stack.size, dim)
    queries[:, :, :used] = mine.reshape(pieces * heads, 1, used, dim)
    k = load(kv.keys, kv.key_scales, tokens, kv).view(-1, TILE, dim)  # (P·heads·tiles, TILE, D)
    flat = stacked_product(queries.flatten(0, 1), k.transpose(1, 2), stack.matrices)  # (P·heads·tiles, size, TILE)
    if attention.softcap:
        flat.div_(attention.softcap).tanh_().mul_(attention.softcap)
    scores = flat.view(pieces * heads, tiles, stack.size, TILE)
    edge = scores[:, stack.clear :, :used].view(pieces, heads, tiles - stack.clear, count, share, TILE)
    edge += stack.bias
    scores.sub_(scores.amax(dim=(1, 3), keepdim=True)).clamp_(min=_LOWEST).exp_()
    edge *= stack.seen  # the same memory, now holding weights
    v = load(kv.values, kv.value_scales, tokens, kv).view(-1, TILE, dim)
    parts = stacked_product(flat, v, stack.matrices).view(pieces * heads, tiles, stack.size, dim)
    sums = flat.sum(dim=-1).view(pieces * heads, tiles, stack.size, 1)
    result, total = parts[:, 0], sums[:, 0]
    for tile in range(1, tiles):  # in order, whatever their number: a sum over the axis would not be
        result += parts[:, tile]
        total += sums[:, tile]
    result = result.div_(total)[:, :used].reshape(pieces, heads, count, share, dim).transpose(1, 2)
    out.index_copy_(0, rows, result.reshape(pieces * count, attention.heads, dim))
