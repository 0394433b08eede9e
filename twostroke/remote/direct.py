"""Blocks straight from the pool of one engine to the pool of another, over NIXL: from GPU to GPU, or from host to host.

    holder      place: where blocks lie in its pool, with their checksums; it keeps them until they are taken back
    receiver    begin: read them into blocks of its own, which are kept until the read has ended

A thread moves reads on, and answers peers that cannot read this memory by themselves: an engine that computes a step
does neither. It sleeps while nothing is read and nothing is lent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from twostroke.engine.core import Core
from twostroke.engine.exchange import storage_of
from twostroke.errors import ConfigError
from twostroke.kv.blocks import BlockPool
from twostroke.kv.raw_access import memory_of, sums_of, use_device
from twostroke.kv.storage import KVStorage
from twostroke.remote.messages import Direct, Located
from twostroke.remote.nixl_agent import Memory, NixlAgent, NixlError, Peer, Read

log = logging.getLogger(__name__)
READ_SECONDS = 4.0  # for all blocks of a read: less than the holder's lease
EAGER_SECONDS = 0.002  # after a read began: without a pause between two looks; then
PAUSE = 0.0002
Done = Callable[[str, bool], None]  # what went wrong, and whether the blocks may be written again


class Reading:
    """Blocks that are read from a peer."""

    def __init__(self, read: Read, blocks: Sequence[int], sums: tuple[int, ...], done: Done):
        self.read = read
        self.blocks = blocks
        self.sums = sums
        self.done = done
        self.began = time.monotonic()
        self.error = ""
        self.ended = False  # nothing writes to the blocks any more


class DirectBlocks:
    """All methods are called by the thread that steps the engine."""

    def __init__(self, storage: KVStorage, pool: BlockPool, interface: str, wake: Callable[[], None]):
        """interface: see `NixlAgent`. wake: called on another thread when there is something to `finish`. NixlError:
        NIXL is missing, or cannot work here."""
        self.storage = storage
        self.pool = pool
        self._wake = wake
        self._memory = Memory(*memory_of(storage))
        self._agent = NixlAgent(interface)
        self._agent.register(self._memory)
        self._self = self._agent.as_peer()
        self._lock = threading.Lock()  # of all that follows, and of the agent
        self._readings: list[Reading] = []  # under way
        self._over: list[Reading] = []  # for `finish`
        self._stuck: list[Reading] = []  # failed, and not ended yet
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
        if lending == self._lending:
            return
        with self._lock:
            self._lending = lending
            if lending:
                self._busy.set()

    def _part(self, block: int) -> Memory:
        size = self.storage.layout.block_bytes
        return self._memory._replace(address=self._memory.address + block * size, size=size)

    # ---- the receiver ----------------------------------------------------------------------------------------------

    def begin(self, located: Located, blocks: Sequence[int], done: Done) -> None:
        """Read what was located into these blocks. `finish` calls `done`, and no other request gets the blocks before
        the read has ended. NixlError: it cannot begin."""
        size = self.storage.layout.block_bytes
        there = [Memory(address, size, located.kind, located.device) for address in located.addresses]
        with self._lock:
            peer = Peer(located.peer, located.metadata)
            read = self._agent.begin(peer, there, [self._part(block) for block in blocks])
            self._readings.append(Reading(read, blocks, located.sums, done))
            self._busy.set()
        for block in blocks:
            self.pool.hold(block)

    def finish(self) -> None:
        """For reads that are over."""
        with self._lock:
            over, self._over = self._over, []
        for reading in over:
            if reading.done is not nothing:
                self._finish(reading)
            if reading.ended:
                for block in reading.blocks:
                    self.pool.release(block)
            else:
                reading.done = nothing
                with self._lock:
                    self._stuck.append(reading)
                    self._busy.set()

    def _finish(self, reading: Reading) -> None:
        if not reading.error and sums_of(self.storage, reading.blocks) != reading.sums:
            reading.error = "blocks arrived damaged"
        reading.done(reading.error, reading.ended)

    # ---- on the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        use_device(self.storage)
        while not self._closed:
            self._busy.wait()
            with self._lock:
                began = self._turn()
            eager = time.monotonic() - began < EAGER_SECONDS
            time.sleep(0 if eager else PAUSE)

    def _turn(self) -> float:
        """Returns when the last read that is under way began."""
        self._agent.progress()
        over = [reading for reading in self._readings if self._moved_on(reading)]
        over += [reading for reading in self._stuck if self._ended(reading)]
        if over:
            self._readings = [reading for reading in self._readings if reading not in over]
            self._stuck = [reading for reading in self._stuck if reading not in over]
            self._over += over
            self._wake()
        if not (self._readings or self._stuck or self._lending or self._closed):
            self._busy.clear()
        return max((reading.began for reading in self._readings), default=0.0)

    def _moved_on(self, reading: Reading) -> bool:
        """Whether it is over."""
        try:
            if not self._agent.done(reading.read):
                if time.monotonic() - reading.began < READ_SECONDS:
                    return False
                reading.error = f"no bytes came within {READ_SECONDS:g} s"
        except NixlError as error:
            reading.error = str(error)
        self._ended(reading)
        return True

    def _ended(self, reading: Reading) -> bool:
        reading.ended = self._agent.end(reading.read)
        return reading.ended


def open_direct(core: Core, wanted: Direct | None, wake: Callable[[], None]) -> DirectBlocks | None:
    """None: blocks of this engine travel as bytes. ConfigError: they must not, and NIXL cannot be used."""
    if wanted is None:
        return None
    storage, why = storage_of(core), ""
    if storage.exchanged_bytes != storage.layout.block_bytes:
        why = "it cannot be used with parallel above 1."
    elif not wanted.always and memory_of(storage)[2] == "DRAM" and wanted.interface.startswith("127."):
        return None  # on one machine there is shared memory
    else:
        try:
            return DirectBlocks(storage, core.scheduler.tables.pool, wanted.interface, wake)
        except NixlError as error:
            why = str(error)
    if wanted.always:
        raise ConfigError(f"--transport nixl: {why} Or use --transport auto.")
    log.warning("NIXL is installed and not used: %s", why)
    return None


def nothing(error: str, ended: bool) -> None:
    """The caller knows already that the read has failed."""
