"""The transport that fits a pair of workers: shared memory on one machine, else NIXL where both have it, else TCP.

A worker listens on all that it has. Its address names them; the fetching side takes the first that it can use.
Torch-free.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from twostroke.cluster.nixl import NixlTransport
from twostroke.cluster.nixl_agent import NixlError, package
from twostroke.cluster.sockets import SharedMemoryTransport, TcpTransport
from twostroke.cluster.transport import Incoming, Source, TransferError, Transport
from twostroke.errors import ConfigError

log = logging.getLogger(__name__)
BOOT = Path("/proc/sys/kernel/random/boot_id")
CHOICES = ("auto", "tcp", "nixl")


class FittingTransport:
    """A `Transport` of several. Addresses: "MACHINE unix://… nixl://… tcp://…", without those that are not there."""

    def __init__(self, shared: SharedMemoryTransport, nixl: NixlTransport | None, tcp: TcpTransport):
        self.shared = shared
        self.nixl = nixl
        self.tcp = tcp
        self.machine = machine_id()

    async def listen(self, source: Source) -> str:
        parts = [self.machine, await self.shared.listen(source)]
        if self.nixl is not None:
            parts.append(await self.nixl.listen(source))
        return " ".join([*parts, await self.tcp.listen(source)])

    async def connect(self, address: str, ticket: bytes) -> Incoming:
        machine, *places = address.split(" ")
        by_kind = {place.partition("://")[0]: place for place in places}
        shared, nixl = by_kind.get("unix", ""), by_kind.get("nixl", "")
        if machine == self.machine and os.path.exists(shared.removeprefix("unix://")):
            return await self.shared.connect(shared, ticket)
        if nixl and self.nixl is not None and not self.nixl.avoids(nixl):
            return await self.nixl.connect(nixl, ticket)
        if "tcp" not in by_kind:
            raise TransferError(f"{address} is no address of a worker with this transport")
        return await self.tcp.connect(by_kind["tcp"], ticket)

    async def close(self) -> None:
        await self.shared.close()
        if self.nixl is not None:
            await self.nixl.close()
        await self.tcp.close()


def machine_id() -> str:
    """Equal for processes that share memory. Containers of one machine have it in common too, and see other files."""
    return BOOT.read_text().strip()


def fitting_transport(key: bytes, interface: str, choice: str = "auto") -> Transport:
    """choice: "auto", or the only one to use. ConfigError: it is not there."""
    if choice == "nixl":
        nixl = NixlTransport(key, interface)
        try:
            nixl.start()
        except NixlError as error:
            raise ConfigError(f"--transport nixl: {error} Or use --transport auto.") from None
        return nixl
    tcp = TcpTransport(key, interface)
    if choice == "tcp" or sys.platform != "linux":
        return tcp
    return FittingTransport(SharedMemoryTransport(key), usable_nixl(key, interface), tcp)


def usable_nixl(key: bytes, interface: str) -> NixlTransport | None:
    if package() is None or interface.startswith("127."):  # on one machine there is shared memory
        return None
    nixl = NixlTransport(key, interface)
    try:
        nixl.start()
    except NixlError as error:
        log.warning("NIXL is installed and not used: %s", error)
        return None
    return nixl
