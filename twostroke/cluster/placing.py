"""What the router's process and its Ray driver (placement_main.py) say to each other. Torch-free."""

from __future__ import annotations

import msgspec

from twostroke.remote.messages import Message


class Connect(Message, frozen=True, tag="connect"):
    """Join the Ray cluster at this address, or the one of this machine ("auto": ClusterAbsent if there is none). None:
    start one with so many cores."""

    address: str | None
    cores: int


class Connected(Message, frozen=True, tag="connected"):
    """own: a Ray that was started for this deployment and ends with it."""

    own: bool
    address: str
    interface: str  # this machine's, on which workers reach the router
    cores: tuple[float, ...]  # free cores of each machine
    gpus: float  # free, of all machines


class ClusterAbsent(Message, frozen=True, tag="absent"):
    """No cluster runs on this machine."""


class PlaceWorkers(Message, frozen=True, tag="place"):
    """Run workers 0, 1, …, each with so many cores and GPUs."""

    router: str
    secret: bytes
    cores: tuple[float, ...]
    gpus: tuple[float, ...]
    transport: str  # see transports.py


class Kill(Message, frozen=True, tag="kill"):
    worker: int


class WorkerDied(Message, frozen=True, tag="died"):
    """The process of a worker has ended; another one is started. fatal: it makes no sense to wait for it."""

    worker: int
    why: str
    fatal: bool


class PlacementImpossible(Message, frozen=True, tag="impossible"):
    """There is no deployment, in one sentence."""

    why: str


ToDriver = Connect | PlaceWorkers | Kill
FromDriver = Connected | ClusterAbsent | WorkerDied | PlacementImpossible
TO_DRIVER: msgspec.msgpack.Decoder[ToDriver] = msgspec.msgpack.Decoder(ToDriver)
FROM_DRIVER: msgspec.msgpack.Decoder[FromDriver] = msgspec.msgpack.Decoder(FromDriver)
