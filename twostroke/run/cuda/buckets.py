"""Row counts that steps on a GPU are padded to, so that many of them share a shape and one captured graph."""

from __future__ import annotations

from bisect import bisect_left

BATCHES = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    48,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
    320,
    384,
    448,
    512,
    640,
    768,
    896,
    1024,
)
MIXED_TOKENS = (16, 32, 64, 128, 192, 256)  # then multiples of TILE_ROWS
DRAFTED = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
TILE_ROWS = 128  # rows that a product takes at a time
CAPTURED_TOKENS = 2047  # of a step that may be captured; longer ones keep the device busy for longer than the host


def stream_rows(count: int) -> int:
    """Rows of a step in which `count` requests write one token each."""
    return BATCHES[bisect_left(BATCHES, count)] if count <= BATCHES[-1] else count


def mixed_rows(tokens: int) -> int:
    """Rows of a step that also reads prompts and may be captured."""
    if tokens > MIXED_TOKENS[-1]:
        return -(-tokens // TILE_ROWS) * TILE_ROWS
    return MIXED_TOKENS[bisect_left(MIXED_TOKENS, tokens)]


def draft_rows(tokens: int) -> int:
    """Rows of a step that verifies drafts."""
    return DRAFTED[bisect_left(DRAFTED, tokens)] if tokens <= DRAFTED[-1] else mixed_rows(tokens)


def all_mixed_rows(most: int) -> list[int]:
    """Every row count that such steps of up to `most` tokens have, the largest first."""
    return sorted({mixed_rows(tokens) for tokens in range(1, min(most, CAPTURED_TOKENS) + 1)}, reverse=True)
