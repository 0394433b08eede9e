"""The counters of an engine. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class Counts(NamedTuple):
    """Totals since the start; `running` and what follows is the present state, unless it says otherwise."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_on_host: int = 0
    host_bytes: int = 0  # of these blocks
    blocks_offloaded: int = 0  # since the start
    blocks_restored: int = 0  # since the start
    accepted_at: tuple[int, ...] = ()  # since the start: accepted tokens by their place in the draft
