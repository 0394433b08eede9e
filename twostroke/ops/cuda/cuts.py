"""How the requests of a step are divided among the attention kernels: single tokens, tiles of several, long runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from twostroke.ops.cuda.kernels.decode import split_count
from twostroke.ops.cuda.kernels.dense import UNIT
from twostroke.ops.cuda.kernels.prefill import draft_splits, make_tiles, split_for
from twostroke.ops.interface import Batch

FEW_QUERIES = 8  # of a request that verifies a short draft


class AttentionKind(NamedTuple):
    """What decides how a step is divided among attention kernels: layers of one kind share a Cut."""

    queries: int  # of a tile; 0: rows are not divided, each finds its context by itself
    dense: bool  # whether long runs of new tokens may go to the vendor's kernel
    kv_heads: int
    members: int  # requests whose heads fill a tile where they share a prefix; 0: not where layers have windows


UNDIVIDED = AttentionKind(0, False, 1, 0)  # compressed attention


class Cascade(NamedTuple):  # streams that share a prefix, as kernels/cascade.py takes them
    members: Tensor
    shared: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """How a step's requests are divided among the attention kernels."""

    singles: Tensor | None  # (n,) int32 requests with one new token; None: the first `single_count`
    single_count: int
    splits: int  # of the decode kernel: at least split_count of the longest context over `scale`
    tiles: Tensor | None  # of queries of the requests with several new tokens
    tile_splits: int
    long: tuple[int, ...] = ()  # requests whose first new tokens fill the tensor cores by themselves
    rows: tuple[tuple[int, int, int], ...] = ()  # (first row, count, context) of each of `long`
    cascade: Cascade | None = None
    scale: int = 1  # factor by which splits are longer than usual
    queries: int = 0  # the most of a tile, where they are few


class DeviceBatch(Batch, eq=False):
    """A batch on the device, and the numbers of it that the host knows: reading them does not wait for the device."""

    counts: np.ndarray | None = None  # (R,) new tokens of each request
    lengths: np.ndarray | None = None  # (R,) the same numbers as `contexts`
    streams: bool = False  # one new token each, and no request reads blocks that this step fills
    splits: int = 0  # of streams: enough for the longest context that such a step may meet
    cuts: Mapping[AttentionKind, Cut] | None = None  # by kind of attention; None: not made yet


class HostCut(NamedTuple):
    """A Cut in arrays of the host."""

    singles: np.ndarray
    splits: int
    tiles: np.ndarray  # (n, 2)
    tile_splits: int
    long: tuple[int, ...]
    rows: tuple[tuple[int, int, int], ...]


NOT_CUT = HostCut(np.zeros(0, np.int32), 1, np.zeros((0, 2), np.int32), 1, (), ())


def cut_drafts(counts: np.ndarray, lengths: np.ndarray, kind: AttentionKind) -> HostCut:
    """The same for a step that verifies drafts and reads no prompt: a few rows of each request are a tile, also where
    there is only one. Many programs share a tile's context, as those of a decode step do."""
    if not kind.queries:
        return NOT_CUT
    if int(counts.max()) <= kind.queries:  # a tile for each request: the same as below, in fewer calls
        tiles = np.zeros((len(counts), 2), np.int32)
        tiles[:, 0] = np.argsort(counts - lengths, kind="stable")
    else:
        tiles = make_tiles(counts, lengths, np.arange(len(counts)), kind.queries)
    splits = draft_splits(len(tiles), kind.kv_heads, int(lengths.max()))
    return HostCut(np.zeros(0, np.int32), 1, tiles, splits, (), ())


def cut_step(counts: np.ndarray, lengths: np.ndarray, kind: AttentionKind) -> HostCut:
    """counts: new tokens of each request; lengths: its tokens in the cache once the new ones are written."""
    if not kind.queries:
        return NOT_CUT
    singles = np.flatnonzero(counts == 1).astype(np.int32)
    whole = np.where((lengths - counts) % UNIT == 0, counts // UNIT * UNIT, 0) if kind.dense else np.zeros_like(counts)
    large = np.flatnonzero(whole)
    some = np.flatnonzero((counts > 1) & (counts > whole))
    tiles, tile_splits = np.zeros((0, 2), np.int32), 1
    if len(some):
        tiles = make_tiles(counts, lengths, some, kind.queries, whole[some])
        tile_splits = split_for(len(tiles), kind.kv_heads, int(counts.sum()), int(lengths[some].max()))
    starts = np.cumsum(counts) - counts
    return HostCut(
        singles=singles,
        splits=split_count(int(lengths[singles].max())) if len(singles) else 1,
        tiles=tiles,
        tile_splits=tile_splits,
        long=tuple(int(r) for r in large),
        rows=tuple((int(starts[r]), int(whole[r]), int(lengths[r] - counts[r] + whole[r])) for r in large),
    )
