"""KV blocks move from one engine to another: the bytes of a prefix, under names that both agree on.

The receiving request waits in FETCHING while its bytes are transferred. If they do not arrive, it computes its prompt
itself. The tokens are the same in both cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from twostroke.engine.core import Core
from twostroke.kv.addresses import Name
from twostroke.sampling import SamplingParams
from twostroke.types import Request, RequestState

if TYPE_CHECKING:
    from twostroke.kv.storage import KVStorage


NOTHING_ASKED = SamplingParams()


def storage_of(core: Core) -> KVStorage:
    storage: KVStorage = core.runner.kv  # type: ignore[attr-defined]  # a runner with a model has a cache
    return storage


def export_prefix(core: Core, tokens: Sequence[int], salt: bytes = b"") -> dict[Name, bytes]:
    """The blocks of these tokens that the engine has, as far as a continuation needs them. The draft model's are among
    them where it has computed them."""
    tables, storage = core.scheduler.tables, storage_of(core)
    asked = RequestState(Request(-1, (*tokens, 0), params=NOTHING_ASKED, salt=salt))
    hit = tables.match(asked)
    return {
        tables.name(asked, group, column): storage.export(block)
        for group, blocks in enumerate(hit.blocks)
        for column, block in enumerate(blocks)
        if block >= 0 and (group not in tables.drafting or block in tables.pool.filled)
    }


def submit_with(core: Core, request: Request, blocks: Mapping[Name, bytes], tokens: int) -> RequestState:
    """Take a request in whose first `tokens` tokens were computed elsewhere, with their blocks."""
    state, storage = core.submit(request), storage_of(core)
    wanted = core.scheduler.expect(state, tokens)
    if wanted is None:
        return state  # no room now: it waits, and computes its prompt itself
    drafting = core.scheduler.tables.drafting
    complete = all(name in blocks for name, _ in wanted if name.group not in drafting)
    filled = []
    if complete:
        for name, block in wanted:
            if name in blocks:
                storage.take_in(block, blocks[name])
                filled += [block] if name.group in drafting else []
    core.scheduler.arrived(state, complete, filled)
    return state
