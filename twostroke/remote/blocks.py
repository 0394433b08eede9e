"""KV blocks that an engine gives to other engines or gets from them: what `EngineLoop` does with such messages.

The engine sees a segment of shared memory and a checksum. How the bytes come from another machine, how long they may
take and when a lease ends is decided by the front end (twostroke.cluster).
"""

from __future__ import annotations

import logging
import zlib

from twostroke.engine.core import Core
from twostroke.engine.exchange import Expected as Waiting
from twostroke.engine.exchange import arrive, expect, export_lent
from twostroke.remote.messages import Arrive, Arrived, Expect, Expected, Export, Exported, Payload
from twostroke.remote.segment import Segment

log = logging.getLogger(__name__)


class BlockExchange:
    def __init__(self, core: Core):
        self.core = core
        self.block_bytes = core.scheduler.tables.layout.block_bytes
        self.waiting: dict[int, Waiting] = {}  # requests whose blocks are on their way, by id

    def export(self, message: Export) -> Exported:
        size = len(message.wanted) * self.block_bytes
        try:
            with Segment.open(message.path, size) as segment:
                found = export_lent(self.core, message.lent, message.wanted, segment.view)
                checksum = zlib.crc32(segment.view[: len(found) * self.block_bytes])
        except OSError as error:
            log.warning("blocks were not exported: %s", error)
            return Exported(message.question, (), 0)
        return Exported(message.question, found, checksum)

    def take_back(self, lent: tuple[int, ...]) -> None:
        for number in lent:
            self.core.scheduler.tables.lent.take_back(number)

    def expect(self, message: Expect) -> Expected:
        waiting = expect(self.core, message.request, message.tokens)
        if waiting is None:
            return Expected(message.question, None)
        if waiting.wanted:
            self.waiting[message.request.id] = waiting
        else:
            arrive(self.core, waiting, {})
        return Expected(message.question, waiting.names)

    def arrive(self, message: Arrive) -> Arrived:
        waiting = self.waiting.pop(message.request_id, None)
        if waiting is None:
            return Arrived(message.question, None)
        if message.payload is None:
            return Arrived(message.question, arrive(self.core, waiting, {}))
        return Arrived(message.question, self._take_in(waiting, message.payload))

    def drop(self, request_id: int) -> None:
        """A request has ended that may still wait for blocks."""
        waiting = self.waiting.pop(request_id, None)
        if waiting is not None:
            arrive(self.core, waiting, {})

    def _take_in(self, waiting: Waiting, payload: Payload) -> bool:
        """What does not have the announced length and checksum counts as not arrived."""
        try:
            with Segment.open(payload.path, payload.size) as segment:
                size = len(payload.found) * self.block_bytes
                names = waiting.names
                whole = size <= payload.size and all(0 <= index < len(names) for index in payload.found)
                if not whole or zlib.crc32(segment.view[:size]) != payload.checksum:
                    log.warning("blocks of request %d arrived damaged", waiting.state.id)
                    return arrive(self.core, waiting, {})
                parts = {
                    names[index]: segment.view[place * self.block_bytes : (place + 1) * self.block_bytes]
                    for place, index in enumerate(payload.found)
                }
                complete = arrive(self.core, waiting, parts)
                for part in parts.values():
                    part.release()
                return complete
        except OSError as error:
            log.warning("blocks of request %d cannot be read: %s", waiting.state.id, error)
            return arrive(self.core, waiting, {})
