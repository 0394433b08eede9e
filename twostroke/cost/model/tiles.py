"""Prompt chunks on a GPU: what ops/cuda and its kernels do with them, in numbers. Tests keep the two equal.

Whole multiples of 2,048 tokens that start at a multiple of 2,048 go to the vendor's kernel, which fills the device. The
rest is cut into tiles of queries. One program takes a tile and walks over the keys before it. Few tiles leave most of
the device idle, and then the length of that walk sets the time, not the FLOPs. So several programs share a long walk;
their partial results are written, read again and merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twostroke.model.arch import Arch, GroupedArch, seen_pairs
from twostroke.run.cuda.buckets import CAPTURED_TOKENS, mixed_rows, stream_rows

UNIT = 2048  # tokens that the vendor's kernel takes at a time
DENSE_HEADS = (64, 128)
PROCESSORS = 132  # each runs two programs at once
LONE = 0.65  # time of a program that has a processor to itself, over that of two on one
SHORTEST = 1024  # keys of a walk that is worth sharing
MOST_SPLITS = 16
PARTIAL_ROWS = 16_384  # of partial results that fit


class Attended(NamedTuple):
    """Attention of the prompts in one step, over all layers."""

    dense: int  # FLOPs of the vendor's kernel
    tiled: int  # FLOPs of tiles
    walk: float  # keys that the longest program processes, summed over layers
    merged: int  # bytes of partial results, written and read


def rows_run(rows: int, prompts: bool) -> int:
    """Rows that a step computes, padding included."""
    if not prompts:
        return stream_rows(rows)
    return mixed_rows(rows) if rows <= CAPTURED_TOKENS else rows


def tile_queries(mixer: GroupedArch) -> int:
    """Queries in one tile; a tile has a row for each of them and each head that shares K and V."""
    share = mixer.heads // mixer.kv_heads
    rows = 64 if mixer.head_dim > 128 else 128
    return max(rows, 1 << (share - 1).bit_length()) // share


def takes_dense(mixer: GroupedArch) -> bool:
    return mixer.softcap == 0 and mixer.head_dim in DENSE_HEADS


def dense_tokens(start: int, count: int) -> int:
    """How many of a chunk's first tokens go to the vendor's kernel, in layers without a window."""
    return count // UNIT * UNIT if start % UNIT == 0 else 0


def attend(arch: Arch, chunks: Sequence[tuple[int, int]], rows: int, devices: int = 1) -> Attended:
    """chunks: as (start, count); rows: of the whole step."""
    dense, walk, merged = 0, 0.0, 0
    for mixer, layers in arch.mixers:
        if not isinstance(mixer, GroupedArch):  # these kernels do not serve it: what a device can reach at best
            dense += layers * sum(mixer.attention_flops(start, count) for start, count in chunks)
            continue
        width, window = mixer.width, mixer.window
        whole = window is None and takes_dense(mixer)
        first = [dense_tokens(start, count) if whole else 0 for start, count in chunks]
        pairs = sum(seen_pairs(start, done, None) for (start, _), done in zip(chunks, first, strict=True))
        dense += 4 * layers * width * pairs
        rest = [
            (start + done, count - done) for (start, count), done in zip(chunks, first, strict=True) if count > done
        ]
        if not rest:
            continue
        splits = splits_of(mixer, rest, rows, devices)
        longest = max(min(start, window or start) + count for start, count in rest)
        walk += layers * longest / splits
        merged += layers * 2 * (splits if splits > 1 else 0) * 4 * width * sum(count for _, count in rest)
    flops = sum(arch.attention_flops(start, count) for start, count in chunks)
    return Attended(dense, flops - dense, walk, merged)


def splits_of(mixer: GroupedArch, chunks: Sequence[tuple[int, int]], rows: int, devices: int = 1) -> int:
    """Programs that share the walk of one tile, a power of two: the number with the lowest estimated time."""
    tiles = sum(-(-count // tile_queries(mixer)) for _, count in chunks)
    programs, longest = tiles * max(1, mixer.kv_heads // devices), max(start + count for start, count in chunks)

    def cost(splits: int) -> float:
        rounds, rest = divmod(programs * splits, 2 * PROCESSORS)
        last = 0.0 if rest == 0 else LONE if rest <= PROCESSORS else 1.0
        return (rounds + last) / splits + splits * rows / (6 * longest)

    most = max(1, min(longest // SHORTEST, PARTIAL_ROWS // max(rows, 1), MOST_SPLITS))
    return min((1 << power for power in range(most.bit_length())), key=cost)
