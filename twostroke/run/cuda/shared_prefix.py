"""Which streams of a step hold the same leading blocks, so that attention can read those once for all of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twostroke.ops.cuda.kernels.decode import split_count
from twostroke.ops.interface import BLOCK

LEAST = 512  # tokens that streams must share, a multiple of BLOCK
WORTHWHILE = 32_768  # tokens that need not be read: less does not pay for two more kernels in every layer


class Sharing(NamedTuple):
    tiles: np.ndarray  # (n, members) int32: streams with a common prefix, -1 for an empty place
    splits: np.ndarray  # (streams,) int32: how many of its leading splits each shares


def find_sharing(tables: np.ndarray, contexts: np.ndarray, members: int, most_tiles: int) -> Sharing | None:
    """tables (streams, columns); contexts (streams,). None where sharing would not pay."""
    column = LEAST // BLOCK - 1
    long = np.flatnonzero(contexts > LEAST)
    if len(long) < 2 or (len(long) - 1) * int(contexts.max()) < WORTHWHILE:
        return None
    _, group, counts = np.unique(tables[long, column], return_inverse=True, return_counts=True)
    if counts.max() < 2:
        return None
    tiles: list[np.ndarray] = []
    splits, saved = np.zeros(len(tables), np.int32), 0
    for name in np.argsort(-counts, kind="stable"):
        if counts[name] < 2:
            break
        mine = long[group == name]
        shared = whole_splits(common_columns(tables[mine], contexts[mine]) * BLOCK)
        needed = -(-len(mine) // members)
        if not shared or len(tiles) + needed > most_tiles:
            continue
        splits[mine] = shared
        saved += (len(mine) - needed) * split_end(shared)
        padded = np.full(needed * members, -1, np.int32)
        padded[: len(mine)] = mine
        tiles.extend(padded.reshape(needed, members))
    return Sharing(np.stack(tiles), splits) if saved >= WORTHWHILE else None


def common_columns(tables: np.ndarray, contexts: np.ndarray) -> int:
    """Leading columns that are the same in all rows, all of them full of tokens known before this step."""
    full = (int(contexts.min()) - 1) // BLOCK
    differ = (tables[1:, :full] != tables[0, :full]).any(axis=0)
    return int(differ.argmax()) if differ.any() else full


def whole_splits(tokens: int) -> int:
    """Splits that end within the first `tokens`."""
    count = split_count(tokens) if tokens else 0
    return count if count and split_end(count) <= tokens else max(0, count - 1)


def split_end(count: int) -> int:
    """Tokens in the first `count` splits."""
    if count <= 8:
        return 128 * count
    return 1024 + 512 * (count - 8) if count <= 38 else 16384 + 2048 * (count - 38)
