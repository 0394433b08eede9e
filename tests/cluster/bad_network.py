"""A network between real workers that refuses, cuts, delays, damages and shortens what it carries.

A worker fetches blocks from the address in an offer, and offers pass through the router: here they are made to name a
port of this process, which carries the bytes from the worker that has the blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections import Counter

from twostroke.cluster.deployment import Deployment
from twostroke.cluster.holder import Offer, Parcel
from twostroke.cluster.member import Member

PIECE = 1 << 16
KINDS = ("refuse", "cut", "corrupt", "truncate", "delay")
LATEST = 6000  # bytes that the holder sends before something happens: the handshake is 200, blocks are 4,000 and more

CARRIED = 2000  # bytes that a stuck network carries


class BadNetwork:
    def __init__(self, rng: random.Random, share: float):
        """share: of the connections that something happens to."""
        self.rng = rng
        self.share = share
        self.happened: Counter[str] = Counter()
        self._ports: dict[str, tuple[int, asyncio.Future[asyncio.Server]]] = {}  # by the address they lead to

    def through(self, address: str) -> str:
        """An address that leads there, as if to another machine."""
        if address not in self._ports:
            sock = socket.create_server(("127.0.0.1", 0))
            serving = asyncio.start_server(lambda near, back: self._carry(address, near, back), sock=sock)
            self._ports[address] = sock.getsockname()[1], asyncio.ensure_future(serving)
        return f"elsewhere unix:///nowhere tcp://127.0.0.1:{self._ports[address][0]}"

    async def _carry(self, address: str, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        kind = self.rng.choice(KINDS) if self.rng.random() < self.share else ""
        if kind in ("refuse", "delay"):
            self.happened[kind] += 1
        with contextlib.suppress(OSError), contextlib.closing(back):  # OSError: a worker is gone
            if kind == "refuse":
                return
            host, _, port = address.rpartition("tcp://")[2].rpartition(":")
            far, there = await asyncio.open_connection(host, int(port))
            asking = asyncio.ensure_future(copy(near, there))
            try:
                await self._bring(far, back, kind)
            finally:
                asking.cancel()
                there.close()

    async def _bring(self, far: asyncio.StreamReader, back: asyncio.StreamWriter, kind: str) -> None:
        left = self.rng.randrange(LATEST) if kind in ("cut", "corrupt", "truncate") else 1 << 60
        while data := await far.read(PIECE):
            if kind == "delay":
                await asyncio.sleep(self.rng.random() * 0.3)
            if left < len(data):
                self.happened[kind] += 1
                if kind != "corrupt":
                    back.write(data[:left])
                    if kind == "cut":
                        back.transport.abort()
                    return
                data = data[:left] + bytes([data[left] ^ 1]) + data[left + 1 :]
                left = 1 << 60
            left -= len(data)
            back.write(data)
            await back.drain()

    async def close(self) -> None:
        for _, serving in self._ports.values():
            (await serving).close()


class StuckNetwork(BadNetwork):
    """It carries the first bytes of what a holder sends, and no more. A connection ends when one of its sides does."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), 0.0)
        self.stuck = 0  # connections

    async def _carry(self, address: str, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition("tcp://")[2].rpartition(":")
        with contextlib.suppress(OSError), contextlib.closing(back):  # OSError: a worker is gone
            far, there = await asyncio.open_connection(host, int(port))
            ways = [asyncio.ensure_future(copy(near, there)), asyncio.ensure_future(self._begin(far, back))]
            with contextlib.closing(there):
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()

    async def _begin(self, far: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        left = CARRIED
        while data := await far.read(PIECE):
            self.stuck += 0 < left <= len(data)
            back.write(data[:left])
            left = max(0, left - len(data))


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()


class Shaken(Deployment):
    """A deployment whose blocks travel over a bad network, while there is one."""

    network: BadNetwork | None = None
    offered: Member | None = None  # the worker that has offered blocks of a request last

    def on_parcel(self, member: Member, request_id: int, parcel: Parcel) -> None:
        if self.network is not None:
            offer = parcel.offer._replace(address=self.network.through(parcel.offer.address))
            parcel = parcel._replace(offer=offer)
        super().on_parcel(member, request_id, parcel)

    def on_offer(self, member: Member, request_id: int, offer: Offer) -> None:
        self.offered = member
        if self.network is not None:
            offer = offer._replace(address=self.network.through(offer.address))
        super().on_offer(member, request_id, offer)
