"""The transport that fits a pair of workers: shared memory on one machine, else TCP. And whether their engines read
each other's pools over NIXL: the transport then carries messages and no blocks.

A worker listens on all that it has. Its address names them; the fetching side takes the first that it can use.
Torch-free.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from twostroke.cluster.sockets import SharedMemoryTransport, TcpTransport
from twostroke.cluster.transport import BlockSource, Incoming, TransferError, Transport
from twostroke.errors import ConfigError
from twostroke.remote.messages import Direct
from twostroke.remote.nixl_agent import INSTALL, package

BOOT = Path("/proc/sys/kernel/random/boot_id")
CHOICES = ("auto", "tcp", "nixl")


class FittingTransport:
    """A `Transport` of two. Addresses: "MACHINE unix://… tcp://…"."""

    def __init__(self, shared: SharedMemoryTransport, tcp: TcpTransport):
        self.shared = shared
        self.tcp = tcp
        self.machine = machine_id()

    async def listen(self, source: BlockSource) -> str:
        return " ".join([self.machine, await self.shared.listen(source), await self.tcp.listen(source)])

    async def connect(self, address: str, ticket: bytes) -> Incoming:
        machine, *places = address.split(" ")
        by_kind = {place.partition("://")[0]: place for place in places}
        shared = by_kind.get("unix", "")
        if machine == self.machine and os.path.exists(shared.removeprefix("unix://")):
            return await self.shared.connect(shared, ticket)
        if "tcp" not in by_kind:
            raise TransferError(f"{address} is no address of a worker with this transport")
        return await self.tcp.connect(by_kind["tcp"], ticket)

    async def close(self) -> None:
        await self.shared.close()
        await self.tcp.close()


def machine_id() -> str:
    """Equal for processes that share memory. Containers of one machine have it in common too, and see other files."""
    return BOOT.read_text().strip()


def fitting_transport(key: bytes, interface: str, choice: str = "auto") -> Transport:
    """choice: one of CHOICES. With "nixl" messages go over TCP."""
    tcp = TcpTransport(key, interface)
    if choice != "auto" or sys.platform != "linux":
        return tcp
    return FittingTransport(SharedMemoryTransport(key), tcp)


def direct_reads(interface: str, choice: str = "auto") -> Direct | None:
    """How engines of workers with this choice read each other's pools. ConfigError: it is asked for, and not there."""
    if choice == "nixl" and package() is None:
        raise ConfigError(f"--transport nixl: NIXL is not installed: {INSTALL}. Or use --transport auto.")
    return Direct(interface, choice == "nixl") if choice != "tcp" and package() is not None else None
