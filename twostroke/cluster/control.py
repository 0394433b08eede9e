"""What the router's process and the process of a worker say to each other. Torch-free.

    worker ─▶ router   Joined first; then what its engine says (remote/messages.py), ParcelReady with blocks of a
                       request with `lend`, Offered before the event that ends it, Alive twice a second, Ended when its
                       engine is lost
    router ─▶ worker   Hello; then Orders, Change, Recall, Release; LookUp: blocks go to another worker; Collect: they
                       come from one; Take: a request does

Messages travel as in remote/wire.py, in sealed frames of a channel (channel.py) whose both ends have the key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Generic, TypeVar

from twostroke.cluster.channel import Channel
from twostroke.cluster.handover import Moved
from twostroke.cluster.holder import Offer, Parcel
from twostroke.cluster.transport import TransferError
from twostroke.cluster.worker import Held
from twostroke.remote import wire
from twostroke.remote.messages import (
    Change,
    Changed,
    Failed,
    Hello,
    Message,
    Orders,
    Ready,
    Recall,
    Report,
    Stage,
    Steps,
)
from twostroke.types import Request

T = TypeVar("T")
FRAME = 1 << 20
MOST_UNSENT = 64 << 20  # bytes that wait for a peer that does not read


class Joined(Message, frozen=True, tag="joined"):
    """The first message: which worker this is."""

    worker: int
    version: str  # of twostroke
    pid: int
    machine: str  # the name of its machine


class Alive(Message, frozen=True, tag="alive"):
    trouble: str | None  # what is wrong with its engine
    held: Held


class Ended(Message, frozen=True, tag="ended"):
    """The worker's engine is lost; the worker starts it again."""

    why: str


class ParcelReady(Message, frozen=True, tag="parcel"):
    """Blocks of a request that is still computed."""

    request_id: int
    parcel: Parcel


class Offered(Message, frozen=True, tag="offered"):
    request_id: int
    offer: Offer


class Release(Message, frozen=True, tag="release"):
    """The blocks of these requests or parcels are not needed any more."""

    lent: tuple[int, ...]


class LookUp(Message, frozen=True, tag="look up"):
    """Offer what is cached of the beginning of a prompt, from token `first` on. Answered by Found."""

    question: int
    tokens: tuple[int, ...]
    salt: bytes
    first: int


class Found(Message, frozen=True, tag="found"):
    question: int
    parcel: Parcel | None


class Collect(Message, frozen=True, tag="collect"):
    """Put blocks of the beginning of a prompt, which ends with these tokens, into the cache. Answered by Taken."""

    question: int
    tokens: tuple[int, ...]
    salt: bytes
    parcel: Parcel


class Take(Message, frozen=True, tag="take"):
    """Run a request whose first `tokens` tokens another worker offers. Answered by Taken."""

    question: int
    request: Request
    tokens: int
    offer: Offer


class Taken(Message, frozen=True, tag="taken"):
    question: int
    moved: Moved


class Unanswered(Message, frozen=True, tag="unanswered"):
    """The engine is gone or did not answer a question."""

    question: int
    why: str


ToWorker = Hello | Orders | Change | Recall | Release | LookUp | Collect | Take
FromWorker = (
    Joined | Alive | Ended | ParcelReady | Offered | Found | Taken | Unanswered
    | Report | Stage | Ready | Failed | Changed | Steps
)  # fmt: skip


def from_worker() -> wire.Reader[FromWorker]:
    return wire.Reader(FromWorker)


def to_worker() -> wire.Reader[ToWorker]:
    return wire.Reader(ToWorker)


class Line(Generic[T]):
    """Messages over a channel that both ends have proved their key on. `send` does not wait."""

    def __init__(self, channel: Channel, reader: wire.Reader[T]):
        self.channel = channel
        self.reader = reader
        self._unsent = bytearray()
        self._wake = asyncio.Event()
        self._sending = asyncio.get_running_loop().create_task(self._send_all())
        self.closed = False
        self._reading = False

    def send(self, message: Message) -> None:
        """Nothing, if the line is closed: `receive` says so."""
        if self.closed:
            return
        self._unsent += wire.encode(message)
        if len(self._unsent) > MOST_UNSENT:
            self.close()
        self._wake.set()

    async def _send_all(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unsent:
                    part = bytes(self._unsent[:FRAME])
                    del self._unsent[:FRAME]
                    await self.channel.send(part)
        except TransferError:
            self.close()

    async def receive(self) -> Iterator[T]:
        """The next messages. TransferError: the line is closed, or what came is no message."""
        if self.closed:
            raise TransferError("the connection is closed")
        self._reading = True
        try:
            data = await self.channel.receive()
        except TransferError:
            self.close()
            raise
        finally:
            self._reading = False
            if self.closed:
                self.channel.close()
        try:
            return iter(list(self.reader.feed(data)))
        except wire.WireError as error:
            raise TransferError(f"the peer sent no message of this protocol: {error}") from None

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._sending.cancel()
            if self._reading:
                self.channel.shut()  # the reader wakes, and closes it
            else:
                self.channel.close()
