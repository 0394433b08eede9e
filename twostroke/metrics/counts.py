"""How the engine as a whole stands. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class Counts(NamedTuple):
    """Totals since start, then how things stand."""

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
    host_bytes: int = 0  # that those take there
    blocks_offloaded: int = 0  # since start, as those brought back
    blocks_restored: int = 0
