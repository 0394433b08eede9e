"""The transport that fits a pair of workers: shared memory on one machine, TCP between machines. Torch-free.

A worker listens on both. Its address names both; the fetching side takes shared memory if it runs on the same machine
and can see the holder's socket there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from twostroke.cluster.sockets import SharedMemoryTransport, SocketTransport, TcpTransport
from twostroke.cluster.transport import Incoming, Source, Transport

BOOT = Path("/proc/sys/kernel/random/boot_id")


class BothTransports:
    """A `Transport` of two. Addresses: "MACHINE unix://… tcp://…"."""

    def __init__(self, shared: SharedMemoryTransport, tcp: TcpTransport):
        self.shared = shared
        self.tcp = tcp
        self.machine = machine_id()

    async def listen(self, source: Source) -> str:
        return f"{self.machine} {await self.shared.listen(source)} {await self.tcp.listen(source)}"

    async def connect(self, address: str, ticket: bytes) -> Incoming:
        machine, shared, tcp = address.split(" ")
        if machine == self.machine and os.path.exists(shared.removeprefix("unix://")):
            return await self.shared.connect(shared, ticket)
        return await self.tcp.connect(tcp, ticket)

    async def close(self) -> None:
        await self.shared.close()
        await self.tcp.close()


def machine_id() -> str:
    """Equal for processes that share memory. Containers of one machine have it in common too, and see other files."""
    return BOOT.read_text().strip()


def both_transports(key: bytes, interface: str) -> Transport:
    tcp: SocketTransport = TcpTransport(key, interface)
    if sys.platform != "linux":
        return tcp
    assert isinstance(tcp, TcpTransport)
    return BothTransports(SharedMemoryTransport(key), tcp)
