"""NIXL in this process: memory that peers may read, and reads of theirs. Torch-free.

Nothing of NIXL is imported before an agent is made. NIXL's own thread would use up a core and is not started:
`progress` moves what is under way, and is called as long as something is.

UCX, which moves the bytes, asks its peers for no key: a process that reaches its ports may read and write the memory
of this one.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("nixl_cu12", "nixl_cu13")  # for a GPU: the one that has torch's version of CUDA
INSTALL = "pip install 'twostroke[nixl]'"
BACKEND = "UCX"
DEVICES = "UCX_NET_DEVICES"  # what the user has set here is kept
RDMA = Path("/sys/class/infiniband")
SIOCGIFADDR = 0x8915


class NixlError(Exception):
    """NIXL is not there, or could not move the bytes."""


def package() -> str | None:
    """The one that is installed."""
    return next((name for name in PACKAGES if find_spec(name) is not None), None)


class Peer(NamedTuple):
    """The agent of a process, as others know it."""

    name: str
    metadata: bytes


class Memory(NamedTuple):
    """One run of bytes."""

    address: int
    size: int
    kind: str = "DRAM"  # or "VRAM": of a GPU
    device: int = 0


class Read:
    """A read of a peer's memory."""

    def __init__(self, peer: Peer, handle: Any):
        self.peer = peer
        self.handle = handle
        self.begun = self.complete = False


class NixlAgent:
    """Used by one thread at a time."""

    def __init__(self, interface: str):
        """interface: the address to listen on, and no other; RDMA devices are used beside it, except on the loopback
        interface. NixlError: NIXL is missing, or cannot work here."""
        found = package()
        if found is None:
            raise NixlError(f"NIXL is not installed: {INSTALL}.")
        self.name = secrets.token_hex(8)
        try:
            api = importlib.import_module(f"{found}._api")
            logging.getLogger("nixl").setLevel(logging.WARNING)
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = api.nixl_agent(self.name, config)
            with listening_on(interface):
                self._agent.create_backend(BACKEND, {})
        except Exception as error:  # what NIXL raises has no base class of its own
            raise NixlError(f"NIXL does not work here: {describe(error)}") from None
        self._known: set[str] = set()  # names of peers
        self._open: Counter[str] = Counter()  # reads that are not ended, by the name of the peer

    def register(self, memory: Memory) -> None:
        """Peers may read it from now on, as long as this agent lives, and reads may write it."""
        try:
            self._agent.register_memory([(memory.address, memory.size, memory.device, "")], memory.kind, [BACKEND])
        except Exception as error:
            raise NixlError(f"memory cannot be registered: {describe(error)}") from None

    def as_peer(self) -> Peer:
        """What others need to read the memory that is registered now."""
        return Peer(self.name, bytes(self._agent.get_agent_metadata()))

    def progress(self) -> None:
        with contextlib.suppress(Exception):  # a peer that is gone; its reads say so themselves
            self._agent.get_new_notifs([BACKEND])

    def begin(self, peer: Peer, there: Sequence[Memory], here: Sequence[Memory]) -> Read:
        """Read runs of a peer's memory into as many of this process. `end` it when it is over."""
        try:
            self._meet(peer)
            theirs, ours = (self._descriptors(some) for some in (there, here))
            handle = self._agent.initialize_xfer("READ", ours, theirs, peer.name, b"", [BACKEND])
        except Exception as error:
            self._forget(peer)
            raise NixlError(f"the peer's memory cannot be reached: {describe(error)}") from None
        self._open[peer.name] += 1
        return Read(peer, handle)

    def _descriptors(self, some: Sequence[Memory]) -> Any:
        return self._agent.get_xfer_descs([(one.address, one.size, one.device) for one in some], some[0].kind)

    def done(self, read: Read) -> bool:
        """Moves it on. NixlError: it has failed, and writes nothing any more."""
        step = self._agent.check_xfer_state if read.begun else self._agent.transfer
        read.begun = True
        try:
            state = step(read.handle)
        except Exception as error:
            raise NixlError(f"a read failed: {describe(error)}") from None
        if state == "ERR":
            raise NixlError("a read failed")
        read.complete = state == "DONE"
        return read.complete

    def end(self, read: Read) -> None:
        """One that is complete or has failed. One that is under way cannot be ended: UCX goes on writing."""
        self._open -= Counter({read.peer.name: 1})
        with contextlib.suppress(Exception):
            read.handle.release()
        if not read.complete:
            self._forget(read.peer)

    def _meet(self, peer: Peer) -> None:
        if peer.name != self.name and peer.name not in self._known:
            if self._agent.add_remote_agent(peer.metadata) != peer.name.encode():
                raise NixlError("its metadata has another name than the peer gave")
            self._known.add(peer.name)

    def _forget(self, peer: Peer) -> None:
        """Forget a peer after a failure: the next read meets it anew. Other reads of it would fail by that, and go on
        writing."""
        if peer.name in self._known and not self._open[peer.name]:
            self._known.discard(peer.name)
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(peer.name)


def describe(error: Exception) -> str:
    return str(error) or type(error).__name__


# ---- the devices to use ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening_on(interface: str) -> Iterator[None]:
    """UCX opens ports on all devices that it may use, and reads which from the environment."""
    wanted = devices(interface)
    if DEVICES in os.environ or not wanted:
        yield
        return
    os.environ[DEVICES] = ",".join(wanted)
    try:
        yield
    finally:
        del os.environ[DEVICES]


def devices(interface: str) -> list[str]:
    """The network device that has this address, and RDMA devices beside it. Empty: none has it."""
    address = socket.getaddrinfo(interface, 0, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        found = [name for _, name in socket.if_nameindex() if address_of(sock, name) == address]
    if not found or str(address).startswith("127."):
        return found
    return found + [f"{port.parts[-3]}:{port.name}" for port in sorted(RDMA.glob("*/ports/*"))]


def address_of(sock: socket.socket, device: str) -> str | None:
    try:
        found = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", device.encode()[:15]))
    except OSError:
        return None  # it has none
    return socket.inet_ntoa(found[20:24])
