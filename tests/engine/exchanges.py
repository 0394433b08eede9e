"""A prefix out of one engine and into another, all of it at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twostroke.engine.core import Core
from twostroke.engine.exchange import arrive, expect, finish_moves, prompt_of, storage_of
from twostroke.kv.addresses import Name
from twostroke.types import Request, RequestState


def export_prefix(core: Core, tokens: Sequence[int], salt: bytes = b"") -> dict[Name, bytes]:
    """The blocks of these tokens that the engine has, as far as a continuation needs them. The draft model's are among
    them where it has computed them."""
    tables, storage = core.scheduler.tables, storage_of(core)
    finish_moves(core)
    asked = prompt_of(tokens, salt)
    hit = tables.match(asked)
    return {
        tables.name(asked, group, column): storage.export(block)
        for group, blocks in enumerate(hit.blocks)
        for column, block in enumerate(blocks)
        if block >= 0 and (group not in tables.drafting or block in tables.pool.filled)
    }


def submit_with(core: Core, request: Request, blocks: Mapping[Name, bytes], tokens: int) -> RequestState:
    """Take a request in whose first `tokens` tokens were computed elsewhere, with their blocks."""
    expected = expect(core, request, tokens)
    if expected is None:
        return core.submit(request)  # no room now: it waits, and computes its prompt itself
    arrive(core, expected, blocks)
    return expected.state
