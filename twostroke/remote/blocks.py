"""KV blocks that an engine gives to other engines or gets from them: what `EngineLoop` does with such messages.

The engine sees a segment of shared memory and a checksum, or with NIXL the place of the blocks in the pool of another
engine (direct.py). How bytes in a segment come from another machine, how long they may take and when a lease ends is
decided by the front end (twostroke.cluster).

Blocks of a prompt for another engine are copied out, or kept, after each step that has filled some, so that they travel
while the next step runs: an engine does not read messages in a step.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from twostroke.engine.core import Core
from twostroke.engine.exchange import (
    WaitingRequest,
    arrive,
    begin_store,
    cached_since,
    computed_since,
    end_store,
    expect,
    export_lent,
    find_lent,
    finish_moves,
    go_on,
    start_anew,
    storage_of,
    store,
)  # fmt: skip
from twostroke.kv.addresses import Name
from twostroke.kv.lending import copied_out
from twostroke.ops.interface import BLOCK
from twostroke.remote.direct import DAMAGED, DirectBlocks
from twostroke.remote.messages import (
    Arrive,
    Arrived,
    BlockData,
    BlockPayload,
    BlocksStored,
    Expect,
    Expected,
    Export,
    Exported,
    Found,
    Located,
    LookUp,
    Part,
    Store,
)  # fmt: skip
from twostroke.remote.segment import Segment
from twostroke.schedule.asking import Asking
from twostroke.types import FinishReason, RequestState

log = logging.getLogger(__name__)
ReadDone = Callable[[Collection[Name], str, bool], None]  # what came, what went wrong, whether the read has ended


class BlockExchange:
    def __init__(self, core: Core, direct: DirectBlocks | None = None):
        self.core = core
        self.direct = direct
        self.replies: list[BlocksStored | Arrived] = []  # about blocks that were read from another pool
        self.block_bytes = storage_of(core).exchanged_bytes
        self.waiting: dict[int, WaitingRequest] = {}  # requests whose blocks are on their way, by id
        self.asking = Asking(core.scheduler)
        self.followed: dict[int, tuple[RequestState, int]] = {}  # with `lend`: the tokens whose blocks were given
        self.segments: dict[str, Segment] = {}  # of parts that are not opened yet, by path
        # Numbers for blocks that are read from here: after a restart others than before.
        self.kept = itertools.count(-1 - secrets.randbits(60), -1)

    # ---- given away --------------------------------------------------------------------------------------------------

    def follow(self, state: RequestState) -> None:
        """Give its blocks as they are computed, if they are for another engine."""
        if copied_out(state.request):
            self.followed[state.id] = state, state.request.lend * BLOCK

    def parts(self) -> Iterator[Part]:
        """What the last step has filled."""
        for number, (state, first) in list(self.followed.items()):
            if number in self.core.scheduler.leaving:
                continue  # a step in flight still writes to it
            ended = state.finish_reason is not None
            if ended:
                del self.followed[number]
            if state.finish_reason not in (None, FinishReason.LENGTH):
                continue
            tokens, blocks = computed_since(self.core, state, first)
            if not ended:
                self.followed[number] = state, tokens
            payload = self._given(blocks) if blocks else None
            if payload is not None or ended:
                yield Part(number, tokens, tuple(name for name, _ in blocks), payload, ended)

    def look_up(self, message: LookUp) -> Found:
        tokens, blocks = cached_since(self.core, message.tokens, message.salt, message.first)
        names = tuple(name for name, _ in blocks)
        return Found(message.question, tokens, names, self._given(blocks) if blocks else None)

    def _given(self, blocks: list[tuple[Name, int]]) -> BlockData | None:
        return self._copied(blocks) if self.direct is None else self._located(blocks, self.direct)

    def _located(self, blocks: list[tuple[Name, int]], direct: DirectBlocks) -> Located:
        """The places of these blocks: they stay there until `take_back`."""
        number = next(self.kept)
        self.core.scheduler.tables.lent.keep(number, blocks)
        return direct.place([block for _, block in blocks], range(len(blocks)), number)

    def _copied(self, blocks: list[tuple[Name, int]]) -> BlockPayload | None:
        """Their bytes, in a segment that stays open until `opened`."""
        try:
            segment = Segment.create(len(blocks) * self.block_bytes)
        except OSError as error:
            log.warning("blocks were not copied out: %s", error)
            return None
        self.segments[segment.path] = segment
        storage_of(self.core).export_to([block for _, block in blocks], segment.view)
        return BlockPayload(segment.path, segment.size, tuple(range(len(blocks))), zlib.crc32(segment.view))

    def opened(self, path: str) -> None:
        segment = self.segments.pop(path, None)
        if segment is not None:
            segment.close()

    def export(self, message: Export) -> Exported:
        if not message.path and self.direct is not None:
            found, blocks = find_lent(self.core, message.lent, message.wanted)
            finish_moves(self.core)
            return Exported(message.question, located=self.direct.place(blocks, found, message.lent))
        size = len(message.wanted) * self.block_bytes
        try:
            with Segment.open(message.path, size) as segment:
                found = export_lent(self.core, message.lent, message.wanted, segment.view)
                checksum = zlib.crc32(segment.view[: len(found) * self.block_bytes])
        except OSError as error:
            log.warning("blocks were not exported: %s", error)
            return Exported(message.question, (), 0)
        return Exported(message.question, found, checksum)

    def close(self) -> None:
        if self.direct is not None:
            self.direct.close()
        for path in list(self.segments):
            self.opened(path)  # it never will be: the front end has gone

    def take_back(self, lent: tuple[int, ...]) -> None:
        for number in lent:
            self.core.scheduler.tables.lent.take_back(number)

    # ---- taken in ----------------------------------------------------------------------------------------------------

    @property
    def reading(self) -> bool:
        """Whether blocks are read from another pool."""
        return bool(self.core.scheduler.tables.lent.reading)

    def finish(self) -> list[BlocksStored | Arrived]:
        """Replies about blocks that were read from another pool."""
        if self.direct is None:
            return []
        self.direct.lend(bool(self.core.scheduler.tables.lent.by_id))
        self.direct.finish()
        replies, self.replies = self.replies, []
        return replies

    def _read(self, located: Located, names: tuple[Name, ...], wanted: list[tuple[Name, int]], done: ReadDone) -> None:
        """Bring those of the wanted blocks that were located into the pool. names: what `located.found` counts."""
        blocks, parts = dict(wanted), zip(located.found, located.addresses, located.sums, strict=False)
        some = {names[i]: part for i, *part in parts if 0 <= i < len(names) and names[i] in blocks}

        def over(error: str, ended: bool) -> None:
            if error:
                log.warning("blocks were not read: %s", error)
            done(() if error else some, error, ended)

        if not some or self.direct is None:
            over("" if self.direct is not None else "this engine reads no pools", True)
            return
        finish_moves(self.core)  # what these blocks held before goes to the host
        addresses, sums = zip(*some.values(), strict=True)
        chosen = msgspec.structs.replace(located, addresses=addresses, sums=sums, found=())
        self.direct.begin(chosen, [blocks[name] for name in some], over)

    def _read_to_store(self, message: Store, located: Located) -> None:
        storing = begin_store(self.core, message.tokens, message.salt)
        if storing is None:
            self.replies.append(BlocksStored(message.question, 0))
            return

        def done(names: Collection[Name], error: str, ended: bool) -> None:
            unread = error not in ("", DAMAGED)
            self.replies.append(BlocksStored(message.question, end_store(self.core, storing, names), unread))

        self._read(located, message.names, [(one.name, one.block) for one in storing], done)

    def _read_to_go_on(self, message: Arrive, waiting: WaitingRequest, located: Located) -> None:
        def done(names: Collection[Name], error: str, ended: bool) -> None:
            complete = go_on(self.core, waiting, names) if ended else start_anew(self.core, waiting)
            self.replies.append(Arrived(message.question, complete, error not in ("", DAMAGED)))

        self._read(located, waiting.names, [*waiting.wanted, *waiting.cut], done)

    def store(self, message: Store) -> BlocksStored | None:
        """None: the reply comes later."""
        if isinstance(message.payload, Located):
            self._read_to_store(message, message.payload)
            return None
        with self._received(message.names, message.payload) as blocks:
            return BlocksStored(message.question, store(self.core, message.tokens, message.salt, blocks))

    def expect(self, message: Expect) -> Expected:
        waiting = expect(self.core, message.request, message.tokens, self.asking)
        if waiting is None:
            return Expected(message.question, None)
        if waiting.names:
            self.waiting[message.request.id] = waiting
        else:
            arrive(self.core, waiting, {})
        return Expected(message.question, waiting.names)

    def arrive(self, message: Arrive) -> Arrived | None:
        """None: the reply comes later."""
        waiting = self.waiting.pop(message.request_id, None)
        if waiting is None:
            return Arrived(message.question, None)
        if message.payload is None:
            return Arrived(message.question, arrive(self.core, waiting, {}))
        if isinstance(message.payload, Located):
            self._read_to_go_on(message, waiting, message.payload)
            return None
        with self._received(waiting.names, message.payload) as blocks:
            return Arrived(message.question, arrive(self.core, waiting, blocks))

    def drop(self, request_id: int) -> None:
        """A request has ended that may still wait for blocks, or ask for room."""
        self.asking.forget(request_id)
        waiting = self.waiting.pop(request_id, None)
        if waiting is not None:
            arrive(self.core, waiting, {})

    @contextmanager
    def _received(self, names: tuple[Name, ...], payload: BlockPayload) -> Iterator[Mapping[Name, memoryview]]:
        """The blocks in a segment. What does not have the announced length and checksum counts as not arrived."""
        try:
            segment = Segment.open(payload.path, payload.size)
        except OSError as error:
            log.warning("blocks cannot be read: %s", error)
            yield {}
            return
        with segment:
            size = len(payload.found) * self.block_bytes
            whole = size <= payload.size and all(0 <= index < len(names) for index in payload.found)
            if not whole or zlib.crc32(segment.view[:size]) != payload.checksum:
                log.warning("blocks arrived damaged")
                yield {}
                return
            parts = {
                names[index]: segment.view[place * self.block_bytes : (place + 1) * self.block_bytes]
                for place, index in enumerate(payload.found)
            }
            yield parts
            for part in parts.values():
                part.release()
