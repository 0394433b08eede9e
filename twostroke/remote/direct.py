"""Blocks straight from the pool of one engine to the pool of another, over NIXL: from GPU to GPU, or from host to host.

    holder      place: where blocks lie in its pool, with their checksums; it keeps them until they are taken back
    receiver    begin: read them into blocks of its own, which are kept until nothing writes to them any more

A thread moves reads on, and answers peers that cannot read this memory by themselves: an engine that computes a step
does neither. It looks up rarely while nothing is read and nothing is lent.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from twostroke.engine.core import Core
from twostroke.engine.exchange import storage_of
from twostroke.errors import ConfigError
from twostroke.kv.lending import LentBlocks
from twostroke.kv.raw_access import memory_of, sums_of, use_device
from twostroke.kv.storage import KVStorage
from twostroke.remote.messages import Direct, Located
from twostroke.remote.nixl_agent import RDMA, Memory, NixlAgent, NixlError, Peer, Read

log = logging.getLogger(__name__)
READ_SECONDS = 4.0  # for all blocks of a read
EAGER_SECONDS = 0.002  # after a read began: without a pause between two looks; then
PAUSE = 0.0002
IDLE = 0.01  # between two looks where nothing is read or lent: a peer may not have ended a read whose lease is over
QUARANTINE = 1.0  # seconds after an error of one part of a read, in which other parts may still be written
DAMAGED = "blocks arrived damaged, or their lease was over"
OnDone = Callable[[str, bool], None]  # what went wrong, and whether nothing writes to the blocks any more


class BlockReading:
    """Blocks that are read from a peer."""

    def __init__(self, number: int, located: Located, blocks: Sequence[int], done: OnDone):
        self.number = number
        self.located = located
        self.blocks = blocks
        self.done: OnDone | None = done  # None: it was called
        self.began = time.monotonic()
        self.read: Read | None = None  # None: not begun
        self.error = ""
        self.failed = 0.0  # when NIXL said so
        self.ended = False  # nothing writes to the blocks any more


class DirectBlocks:
    """All methods are called by the thread that steps the engine."""

    def __init__(self, storage: KVStorage, lent: LentBlocks, interface: str, wake: Callable[[], None]):
        """interface: see `NixlAgent`. wake: called on another thread when there is something to `finish`. NixlError:
        NIXL is missing, or cannot work here."""
        self.storage = storage
        self.lent = lent
        self._wake = wake
        self._memory = Memory(*memory_of(storage))
        self._agent = NixlAgent(interface)  # after this, of the thread alone
        self._agent.register(self._memory)
        self._self = self._agent.as_peer()
        self._numbers = itertools.count()
        self._asked: deque[BlockReading] = deque()  # to the thread
        self._over: deque[BlockReading] = deque()  # from the thread: for `finish`
        self._reading: list[BlockReading] = []  # the thread's: not over, or failed and not ended
        self._busy = threading.Event()
        self._lending = self._closed = False
        self._thread = threading.Thread(target=self._work, name="direct", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._busy.set()
        self._thread.join()

    # ---- the holder ------------------------------------------------------------------------------------------------

    def place(self, blocks: Sequence[int], found: Sequence[int], held: int) -> Located:
        """Where these blocks lie. found: which of the wanted ones they are. held: the number to take them back."""
        memory = self._memory
        addresses = tuple(self._part(block).address for block in blocks)
        sums = sums_of(self.storage, blocks)
        self.lend(True)
        return Located(*self._self, memory.kind, memory.device, addresses, sums, tuple(found), held)

    def lend(self, lending: bool) -> None:
        """Whether peers may read blocks now."""
        self._lending = lending
        if lending:
            self._busy.set()

    def _part(self, block: int) -> Memory:
        size = self.storage.layout.block_bytes
        return self._memory._replace(address=self._memory.address + block * size, size=size)

    # ---- the receiver ----------------------------------------------------------------------------------------------

    def begin(self, located: Located, blocks: Sequence[int], done: OnDone) -> None:
        """Read what was located into these blocks. `finish` calls `done`. No request gets the blocks before nothing
        writes to them any more."""
        reading = BlockReading(next(self._numbers), located, blocks, done)
        self.lent.hold_for_read(reading.number, blocks)
        self._asked.append(reading)
        self._busy.set()

    def finish(self) -> None:
        """Call `done` of reads that are over."""
        while self._over:
            reading = self._over.popleft()
            if reading.done is not None:
                if not reading.error and sums_of(self.storage, reading.blocks) != reading.located.sums:
                    reading.error = DAMAGED
                reading.done(reading.error, reading.ended)
                reading.done = None
            if reading.ended:
                self.lent.release_read(reading.number)

    # ---- on the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        use_device(self.storage)
        while not self._closed:
            if not (self._asked or self._reading or self._lending):
                self._busy.wait(IDLE)
                self._busy.clear()
            self._turn()

    def _turn(self) -> None:
        while self._asked:
            self._reading.append(self._asked.popleft())
        self._agent.progress()
        over = [reading for reading in self._reading if self._moved_on(reading)]
        if over:
            self._reading = [reading for reading in self._reading if not reading.ended]
            self._over.extend(over)
            self._wake()
        began = max((reading.began for reading in self._reading), default=0.0)
        time.sleep(0 if time.monotonic() - began < EAGER_SECONDS else PAUSE)

    def _moved_on(self, reading: BlockReading) -> bool:
        """Whether `finish` must handle this read: it is over, or has failed; and again when a failed one has ended."""
        now = time.monotonic()
        if reading.failed:
            return now - reading.failed > QUARANTINE and self._end(reading)
        try:
            if reading.read is None:
                reading.read = self._begun(reading)
            if self._agent.done(reading.read):
                return self._end(reading)
        except NixlError as error:
            reading.error, reading.failed = reading.error or str(error), now
            return self._end(reading) if reading.read is None else True
        if reading.error or now - reading.began < READ_SECONDS:
            return False
        reading.error = f"no bytes came within {READ_SECONDS:g} s"
        return True

    def _end(self, reading: BlockReading) -> bool:
        if reading.read is not None:
            self._agent.end(reading.read)
        reading.ended = True
        return True

    def _begun(self, reading: BlockReading) -> Read:
        located, size = reading.located, self.storage.layout.block_bytes
        there = [Memory(address, size, located.kind, located.device) for address in located.addresses]
        here = [self._part(block) for block in reading.blocks]
        return self._agent.begin(Peer(located.peer, located.metadata), there, here)


def open_direct(core: Core, wanted: Direct | None, wake: Callable[[], None]) -> DirectBlocks | None:
    """None: blocks of this engine travel as bytes. ConfigError: they must not, and NIXL cannot be used."""
    if wanted is None:
        return None
    storage, why = storage_of(core), ""
    on_gpu, one_machine = memory_of(storage)[2] == "VRAM", wanted.interface.startswith("127.")
    if storage.exchanged_bytes != storage.layout.block_bytes:
        why = "it cannot be used with parallel above 1."
    elif not wanted.always and not on_gpu and one_machine:
        return None  # there is shared memory
    elif on_gpu and not one_machine and not any(RDMA.glob("*/ports/*")):
        why = "between machines it needs an RDMA device to read the memory of GPUs, and this machine has none."
    else:
        try:
            return DirectBlocks(storage, core.scheduler.tables.lent, wanted.interface, wake)
        except NixlError as error:
            why = str(error)
    if wanted.always:
        raise ConfigError(f"--transport nixl: {why} Or use --transport auto.")
    log.warning("NIXL is installed and not used: %s", why)
    return None
