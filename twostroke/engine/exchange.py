"""KV blocks move from one engine to another: the bytes of a prefix, under names that both agree on.

The receiving request waits in FETCHING while its bytes are transferred. If they do not arrive, it computes its prompt
itself. The tokens are the same in both cases.

    holder      cached_since: bytes of a prompt's beginning that is cached
                a request with `lend` computes its prompt ── computed_since, after each step ──▶ bytes
                it ends; its blocks stay held under its id ── export_lent ──▶ bytes ── take_back
    receiver    store: bytes of a prompt's beginning go to the cache
                expect: the names of the blocks that are not here ── bytes ──▶ arrive: the request goes on after them
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from twostroke.engine.core import Core
from twostroke.kv.addresses import Name
from twostroke.ops.interface import BLOCK
from twostroke.sampling import SamplingParams
from twostroke.schedule.asking import Asking
from twostroke.types import Request, RequestState, Status

if TYPE_CHECKING:
    from twostroke.kv.storage import KVStorage


NOTHING_ASKED = SamplingParams()
Fill = Callable[[list[tuple[Name, int]]], None]  # writes the bytes of these blocks to the pool


class WaitingRequest(NamedTuple):
    """A request in FETCHING, and the blocks that it waits for."""

    state: RequestState
    wanted: list[tuple[Name, int]]
    cut: list[tuple[Name, int]]  # the last ones, full in part: without them their few tokens are computed here

    @property
    def names(self) -> tuple[Name, ...]:
        return tuple(name for name, _ in (*self.wanted, *self.cut))


class Storing(NamedTuple):
    """A block of a prompt's beginning that is to be filled and cached."""

    name: Name
    tokens: tuple[int, ...]
    block: int


def storage_of(core: Core) -> KVStorage:
    storage: KVStorage = core.runner.kv  # type: ignore[attr-defined]  # a runner with a model has a cache
    return storage


def prompt_of(tokens: Sequence[int], salt: bytes) -> RequestState:
    """A request that has this prompt, to ask the cache for it."""
    return RequestState(Request(-1, (*tokens, 0), params=NOTHING_ASKED, salt=salt))


def finish_moves(core: Core) -> None:
    """Copy what was planned to go to the host or to come back, so that every cached block has its own bytes."""
    host, storage = core.scheduler.tables.pool.host, storage_of(core)
    storage.settle()  # the steps in flight have a stream of their own
    if host is not None:
        storage.move(host.take_moves())
        storage.settle()


# ---- the holder ------------------------------------------------------------------------------------------------------


def cached_since(core: Core, tokens: Sequence[int], salt: bytes, first: int) -> tuple[int, list[tuple[Name, int]]]:
    """Full blocks of a prompt that the engine has, from token `first` on, and the token at which they end. No blocks
    where layers have windows or states."""
    scheduler, tables = core.scheduler, core.scheduler.tables
    if tables.windowed or tables.layout.state_bytes:
        return first, []
    finish_moves(core)
    asked = prompt_of(tokens, salt)
    unready = {block for blocks in scheduler.published.values() for block in blocks}
    hit = tables.match(asked)
    blocks = [
        (tables.name(asked, group, column), block)
        for group, found in enumerate(hit.blocks)
        for column, block in enumerate(found)
        if column * tables.spans[group] >= first
    ]
    here = all(block >= 0 and block not in unready for _, block in blocks)
    return (hit.columns * BLOCK, computed_by_all(core, blocks)) if here else (first, [])


def computed_by_all(core: Core, blocks: list[tuple[Name, int]]) -> list[tuple[Name, int]]:
    """These blocks without those that the draft model has not computed."""
    drafting, filled = core.scheduler.tables.drafting, core.scheduler.tables.pool.filled
    return [(name, block) for name, block in blocks if name.group not in drafting or block in filled]


def export_lent(core: Core, number: int, wanted: Sequence[Name], out: memoryview) -> tuple[int, ...]:
    """Write the bytes of the wanted blocks that were lent under this id to `out`, one after the other. Returns which of
    `wanted` they are. What the draft model has not computed is left out."""
    storage = storage_of(core)
    found, blocks = find_lent(core, number, wanted)
    if found:
        storage.export_to(blocks, out[: len(found) * storage.exchanged_bytes])
    return found


def find_lent(core: Core, number: int, wanted: Sequence[Name]) -> tuple[tuple[int, ...], list[int]]:
    """Which of the wanted blocks were lent under this id, and where they are."""
    lent = dict(computed_by_all(core, core.scheduler.tables.lent.by_id.get(number, [])))
    found = tuple(index for index, name in enumerate(wanted) if name in lent)
    return found, [lent[wanted[index]] for index in found]


def computed_since(core: Core, state: RequestState, first: int) -> tuple[int, list[tuple[Name, int]]]:
    """Full blocks of a request with `lend` from token `first` on, and the token at which they end. What the draft model
    has not computed is left out."""
    scheduler, tables = core.scheduler, core.scheduler.tables
    if state.status is Status.FINISHED:
        before = set(state.hashes[: first // BLOCK])
        left = tables.lent.by_id.get(state.id, ())
        end, blocks = len(state.tokens), [(name, block) for name, block in left if name.digest not in before]
    elif state.status is Status.RUNNING:
        end, blocks = tables.lent.computed(state, first, scheduler.published)
    else:
        return first, []
    return end, computed_by_all(core, blocks)


# ---- the receiver ----------------------------------------------------------------------------------------------------


def expect(core: Core, request: Request, tokens: int, asking: Asking | None = None) -> WaitingRequest | None:
    """Take a request in whose first `tokens` tokens were computed elsewhere. It gets blocks and waits in FETCHING until
    `arrive` is called. None: there is no room now, and nothing was changed. asking: others that ask."""
    scheduler, asking = core.scheduler, asking or Asking(core.scheduler)
    state = asking.state_of(request)
    scheduler.add(state)
    wanted = scheduler.expect(state, tokens) if asking.goes_first(state, core.clock()) else None
    if wanted is None:
        scheduler.waiting.remove(state)
        asking.refuse(state, core.clock())
        return None
    asking.forget(request.id)
    end = state.computed + state.in_flight
    return WaitingRequest(state, wanted, scheduler.tables.cut(state, end) if state.in_flight else [])


def taken_in(core: Core, blocks: Mapping[Name, bytes | memoryview]) -> Fill:
    """A `Fill` that copies these bytes."""
    storage = storage_of(core)
    return lambda some: storage.take_in([(block, blocks[name]) for name, block in some])


def arrive(core: Core, expected: WaitingRequest, blocks: Mapping[Name, bytes | memoryview]) -> bool:
    """The bytes that came. With all full blocks the request goes on after them; else it computes all. Returns which."""
    return go_on(core, expected, blocks, taken_in(core, blocks))


def go_on(core: Core, expected: WaitingRequest, blocks: Collection[Name], fill: Fill | None = None) -> bool:
    """fill: None where the bytes are in the pool already."""
    scheduler, state = core.scheduler, expected.state
    drafting = scheduler.tables.drafting

    def all_here(some: list[tuple[Name, int]]) -> bool:
        return all(name in blocks for name, _ in some if name.group not in drafting)

    if not all_here(expected.wanted):
        scheduler.arrived(state, 0)
        return False
    cut = bool(expected.cut) and all_here(expected.cut)
    here = [(name, block) for name, block in expected.wanted if name in blocks]
    last = [(name, block) for name, block in expected.cut if cut and name in blocks]
    if fill is not None:
        finish_moves(core)  # what these blocks held before goes to the host
        fill([*here, *last])
    end = state.computed + state.in_flight
    left = 0 if cut or not expected.cut else end % BLOCK  # tokens whose bytes did not come
    scheduler.arrived(state, state.in_flight - left, [block for name, block in here if name.group in drafting])
    if state.status is Status.RUNNING:
        state.timeline.scheduled = core.clock()  # it may have nothing to read, and be a stream at once
    return True


def start_anew(core: Core, expected: WaitingRequest) -> bool:
    """The blocks did not come, and may still be written: the request gets others and computes all. Returns False."""
    if expected.state.status is not Status.FINISHED:
        core.scheduler.broken.add(expected.state.id)
    core.scheduler.arrived(expected.state, 0)
    return False


def store(core: Core, tokens: Sequence[int], salt: bytes, blocks: Mapping[Name, bytes | memoryview]) -> int:
    """Bytes of a prompt's beginning, whose last blocks end with these tokens, go to the cache. Returns how many blocks:
    0 where they do not follow what is here, there is no room, nothing is cached, or layers have windows or states."""
    storing = begin_store(core, tokens, salt)
    return 0 if storing is None else end_store(core, storing, blocks, taken_in(core, blocks))


def begin_store(core: Core, tokens: Sequence[int], salt: bytes) -> list[Storing] | None:
    """Blocks to be filled for a prompt's beginning, its first ones first. `end_store` them in any case."""
    scheduler, tables, pool = core.scheduler, core.scheduler.tables, core.scheduler.tables.pool
    asked, length = prompt_of(tokens, salt), len(tokens) // tables.unit * tables.unit
    hit = tables.match(asked)
    useful = pool.keep_cached and not tables.windowed and not tables.layout.state_bytes
    if not useful or length <= hit.columns * BLOCK or scheduler.needed(asked, hit) > pool.available:
        return None
    tables.hasher.extend(asked.hashes, asked.tokens, asked.salt, length // BLOCK)
    missing = [
        place for column in range(hit.columns, length // BLOCK) for place in tables.ends(column)
    ]  # fmt: skip
    before = [block for blocks in hit.blocks for block in blocks if block >= 0]
    for block in before:
        pool.hold(block)  # what these follow is not evicted for them
    storing = [Storing(tables.name(asked, *place), tables.tokens(asked, *place), pool.take()) for place in missing]
    for block in reversed(before):
        pool.release(block)
    return storing


def end_store(core: Core, storing: list[Storing], blocks: Collection[Name], fill: Fill | None = None) -> int:
    """Blocks for a prompt's beginning came: all go to the cache, or none. fill: as for `go_on`. Returns how many."""
    tables, pool = core.scheduler.tables, core.scheduler.tables.pool
    complete = all(one.name in blocks for one in storing if one.name.group not in tables.drafting)
    here = [one for one in storing if complete and one.name in blocks]
    if fill is not None and here:
        finish_moves(core)
        fill([(one.name, one.block) for one in here])
    for name, tokens, block in here:
        pool.publish(block, name, tokens)
        if name.group in tables.drafting:
            pool.filled.add(block)
    for one in reversed(storing):  # the first ones, which others may share, are evicted last
        pool.release(one.block)
    return len(storing) if complete else 0
