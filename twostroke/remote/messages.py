"""What a front end and an engine say to each other. Torch-free.

    front end ─▶ engine    Hello once, then Orders (requests to run, ids to abort) and the questions Change and Recall
    engine ─▶ front end    Stage and Ready (or Failed) while it starts, then a Report for each step, a Beat twice a
                           second, and the answers Changed and Steps, each under the number of its question

KV blocks of one engine for another, as bytes in a shared segment (segment.py) or in the pool of the engine (direct.py):

    engine ─▶ front end    Part: blocks of a request with `lend`, after each of its steps; then Opened or TakeBack
    front end ─▶ engine    Export what was lent, answered by Exported; TakeBack when it is not needed any more
                           LookUp what is cached of a prompt, answered by Found; then as after Part
                           Store blocks in the cache, answered by BlocksStored
                           Expect a request whose blocks will come, answered by Expected; Arrive, answered by Arrived

A request travels as the `Request` that the front end made, an event as the `Event` that the scheduler made. Times are
seconds of the engine's clock (client.py converts them). wire.py turns messages into bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from twostroke.config import Resolved
from twostroke.kv.addresses import Name
from twostroke.metrics.counts import Counts
from twostroke.metrics.steplog import Step
from twostroke.types import Event, Request


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What travels on the wire: an array that starts with the name of the message."""


class Direct(NamedTuple):
    """Other engines read blocks from the pool, over NIXL (direct.py)."""

    interface: str  # the address to listen on
    always: bool  # the engine does not start without it, and uses it for a pool in the host's memory too


class Hello(Message, frozen=True, tag="hello"):
    """The first message: which model to run and how."""

    model: str
    settings: dict[str, Any]
    log_level: int  # a number of the logging module
    block_key: bytes | None = None  # key of the names of KV blocks, shared by a deployment; None: the engine draws one
    direct: Direct | None = None  # how other engines read its blocks; None: as bytes in a segment
    mixed: tuple[str, ...] = ()  # how the deployment's pools compute K and V, where they differ in it


class Orders(Message, frozen=True, tag="orders"):
    """Runs of requests (see `runs_of`), and ids of requests to abort."""

    runs: tuple[tuple[Request, int], ...]
    aborts: tuple[int, ...]


class Change(Message, frozen=True, tag="change"):
    """Use these settings from the next plan on. Answered by Changed."""

    question: int
    wanted: dict[str, Any]


class Changed(Message, frozen=True, tag="changed"):
    """The settings as they are now, or why nothing was changed."""

    question: int
    settings: Resolved | None
    error: str


class Recall(Message, frozen=True, tag="recall"):
    """Asks for the newest `limit` steps after number `since`. Answered by Steps."""

    question: int
    since: int
    limit: int


class Steps(Message, frozen=True, tag="steps"):
    question: int
    steps: tuple[Step, ...]


class Stage(Message, frozen=True, tag="stage"):
    """A stage of the start began, or moved on (done of total bytes)."""

    name: str
    done: int = 0
    total: int = 0


class Ready(Message, frozen=True, tag="ready"):
    settings: Resolved
    seconds: dict[str, float]  # of each stage of the start
    longest_step: float  # what a full step may take, extrapolated from the warm-up
    warm_up: tuple[int, float]  # tokens of the warm-up's prompt, and the seconds it took
    machine: str  # the processor or the card that computes, by its own name
    clock: float  # the engine's clock when it sent this
    names: bytes = b""  # equal for engines that give equal names to equal KV blocks
    direct: bool = False  # it reads blocks from the pools of other engines
    mixed: tuple[str, ...] = ()  # how the deployment's pools compute K and V, where they differ: it is not exact


class Failed(Message, frozen=True, tag="failed"):
    """The engine could not start. `kind` is the name of the error's class."""

    kind: str
    message: str


class Beat(Message, frozen=True, tag="beat"):
    """The process runs. `steps` counts those begun; `working`: the last of them has not ended."""

    steps: int
    working: bool


class Report(Message, frozen=True, tag="report"):
    """One step: when it ended, what it brought, and the seconds that all steps took so far."""

    at: float
    events: tuple[Event, ...]
    counts: Counts
    step_seconds: float


class Export(Message, frozen=True, tag="export"):
    """Write blocks that the request `lent` has left to the segment at `path`; without one, say where they lie. Answered
    by Exported."""

    question: int
    lent: int
    wanted: tuple[Name, ...]
    path: str


class Exported(Message, frozen=True, tag="exported"):
    """Which of the wanted blocks are in the segment, one after the other, and the CRC-32 of their bytes; or where they
    lie."""

    question: int
    found: tuple[int, ...] = ()
    checksum: int = 0
    located: Located | None = None


class TakeBack(Message, frozen=True, tag="take back"):
    """What these requests have left, or what was located, is not needed any more."""

    lent: tuple[int, ...]


class Expect(Message, frozen=True, tag="expect"):
    """Run a request whose first `tokens` tokens another engine has computed. Answered by Expected."""

    question: int
    request: Request
    tokens: int


class Expected(Message, frozen=True, tag="expected"):
    """The blocks that the request waits for. None: there is no room for it now, and it was not taken."""

    question: int
    wanted: tuple[Name, ...] | None


class BlockPayload(Message, frozen=True, tag="segment"):
    """BlockData of blocks in a segment of another process: which of the wanted ones, one after the other."""

    path: str
    size: int
    found: tuple[int, ...]
    checksum: int


class Located(Message, frozen=True, tag="located"):
    """Blocks in the pool of an engine: which of the wanted ones, where they lie, and their checksums."""

    peer: str  # the engine, as NIXL knows it
    metadata: bytes
    kind: str  # of its memory
    device: int
    addresses: tuple[int, ...]
    sums: tuple[int, ...]
    found: tuple[int, ...]
    held: int  # the engine keeps them until TakeBack of this number


BlockData = BlockPayload | Located


class Part(Message, frozen=True, tag="part"):
    """Blocks that a request with `lend` has computed, up to so many tokens. The engine keeps the segment open until
    Opened, or the blocks until TakeBack. `last`: the request has ended with its limit, which is reported even where
    no block is left."""

    lent: int
    tokens: int
    names: tuple[Name, ...]
    payload: BlockData | None
    last: bool


class Opened(Message, frozen=True, tag="opened"):
    """The segment of a Part is not needed any more: it was opened, or could not be."""

    path: str


class LookUp(Message, frozen=True, tag="look up"):
    """Copy the cached blocks of the beginning of a prompt out, from token `first` on. Answered by Found."""

    question: int
    tokens: tuple[int, ...]
    salt: bytes
    first: int


class Found(Message, frozen=True, tag="found"):
    """Blocks up to so many tokens. The engine keeps the segment open until Opened, or the blocks until TakeBack."""

    question: int
    tokens: int
    names: tuple[Name, ...]
    payload: BlockData | None  # None: there are none


class Store(Message, frozen=True, tag="store"):
    """Put blocks of the beginning of a prompt, which ends with these tokens, into the cache. The answer is a
    BlocksStored."""

    question: int
    tokens: tuple[int, ...]
    salt: bytes
    names: tuple[Name, ...]
    payload: BlockData


class BlocksStored(Message, frozen=True, tag="stored"):
    question: int
    blocks: int  # 0: they are there, do not follow what is there, have no room, or were damaged
    unread: bool = False  # they could not be read from the pool of the other engine


class Arrive(Message, frozen=True, tag="arrive"):
    """The blocks that a request waits for have arrived; None: they will not. Answered by Arrived."""

    question: int
    request_id: int
    payload: BlockData | None


class Arrived(Message, frozen=True, tag="arrived"):
    """Whether the request goes on after these blocks; else it computes them. None: no such request waits."""

    question: int
    complete: bool | None
    unread: bool = False  # they could not be read from the pool of the other engine


EngineQuestion = Change | Recall | Export | LookUp | Store | Expect | Arrive
Reply = Changed | Steps | Exported | Found | BlocksStored | Expected | Arrived
ToEngine = Hello | Orders | TakeBack | Opened | EngineQuestion
FromEngine = Report | Beat | Stage | Ready | Failed | Part | Reply


def runs_of(requests: Iterable[Request]) -> tuple[tuple[Request, int], ...]:
    """Requests as (first, count): the samples of one prompt, which `Request.siblings` makes again, are sent once."""
    runs: list[tuple[Request, int]] = []
    for request in requests:
        if runs:
            first, count = runs[-1]
            if (
                request.tokens is first.tokens
                and request.params is first.params
                and request.id == first.id + count
                and request.sample == first.sample + count
            ):
                runs[-1] = (first, count + 1)
                continue
        runs.append((request, 1))
    return tuple(runs)
