"""A request on its way through several workers: what each is asked, and one answer for its caller. Torch-free."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from twostroke.cluster.router import Ask
from twostroke.kv.addresses import QuickNames
from twostroke.metrics.timeline import Facts
from twostroke.ops.interface import BLOCK
from twostroke.record import replace
from twostroke.types import Event, FinishReason, Request

if TYPE_CHECKING:
    from twostroke.cluster.holder import Offer
    from twostroke.cluster.member import Member

LEAST_FETCH = 1.0  # seconds: deadlines below order requests, and are no reason to compute a prompt twice


@dataclass(slots=True, eq=False)
class Flight:
    request: Request  # as the caller made it
    number: int  # its id at the worker that has it: a new one for each that goes on after a loss
    member: Member | None = None  # that has it now; None: it is between two workers
    writer: Member | None = None  # that writes its answer, or is to write it
    offer: Offer | None = None  # the blocks of its prompt
    queued: int = 0  # tokens that its worker has to compute before it writes
    written: list[int] = field(default_factory=list)  # tokens that the caller has got
    before: Facts | None = None  # of the workers that had it before
    latest: Facts | None = None  # of the worker that has it
    lends: bool = False  # the worker that has it computes the prompt and one token, and keeps the blocks
    aborted: bool = False  # by the caller
    resumed: int = 0  # times that its worker was lost
    diverted: bool = False  # its move was cancelled, as the worker that was to take it does not answer
    moving: float = 0.0  # when its move began; 0: it does not move, or goes on after a loss
    sent_in: float | None = None  # seconds in which its blocks came to the worker that writes
    runs: float | None = None  # when that worker first ran it
    had: int = 0  # leading blocks of its prompt that its writer had
    sending: asyncio.Task[None] | None = None  # the last of its parcels that was sent to the writer
    bringing: asyncio.Task[None] | None = None  # what comes before its first worker gets it: a part of the prompt
    _named: array[int] = field(default_factory=lambda: array("q"))  # names of its first blocks

    def prompt_only(self) -> Request:
        """For a worker that computes the prompt, writes one token and keeps the blocks for another worker."""
        return replace(self.request, id=self.number, limit=len(self.request.tokens) + 1, lend=self.had)

    def rest(self) -> Request:
        """For a worker that goes on after what was written: the same tokens follow as if it had written all."""
        begun, written = self.request, tuple(self.written)
        length = begun.written + len(written)
        return replace(begun, id=self.number, tokens=begun.tokens + written, written=length)

    def names(self, hasher: QuickNames) -> array[int]:
        """The names of the full blocks of the prompt and of what is written. The last token has no K and V. Names that
        are known already stay."""
        tokens = (*self.request.tokens, *self.written[:-1])
        hasher.number(self._named, tokens, self.request.salt, len(tokens) // BLOCK)
        return self._named[:]

    def ask(self, hasher: QuickNames, ttft: float | None) -> Ask:
        """The request as the router sees it. An answer that is begun stays on one worker, and its first token is out.
        ttft: seconds within which first tokens are due, where a request does not say it."""
        if self.written:
            return Ask(self.length)
        wanted = ttft if self.request.params.deadline is None else self.request.params.deadline
        due = inf if wanted is None else self.request.arrival + wanted - time.monotonic()
        return Ask(self.length, self.names(hasher), due)

    @property
    def length(self) -> int:
        """The tokens of the prompt and of what is written."""
        return len(self.request.tokens) + len(self.written)

    @property
    def continues(self) -> bool:
        """Whether more tokens may follow those that are written."""
        return self.length < self.request.limit

    def fetch_seconds(self, token: float) -> float | None:
        """How long its blocks may be on their way: as long as its first token, and no shorter than it takes to compute
        them. token: seconds for one. None: the request has no deadline."""
        due = self.request.params.deadline
        lacking = len(self.request.tokens) - self.had * BLOCK
        return None if due is None else max(due, lacking * token, LEAST_FETCH)

    def settle(self) -> None:
        """What its worker measured counts for the whole: another one goes on."""
        self.before, self.latest = self.facts(self.latest), None
        self.lends, self.moving = False, 0.0

    def count_move(self, sent_in: float | None = None, runs: float | None = None) -> None:
        """What is new of its move: one half of its time may be known before the other. While its blocks are not on
        their way, it waits for a place, and then for its first step."""
        self.sent_in = self.sent_in if sent_in is None else sent_in
        self.runs = self.runs if runs is None else runs
        if self.before is None or not self.moving:
            return
        whole = (self.sent_in or 0.0) if self.runs is None else max(0.0, self.runs - self.moving)
        sent = whole if self.sent_in is None else min(self.sent_in, whole)
        self.before = self.before._replace(transfer=sent, decode_queue=whole - sent)

    def take(self, event: Event) -> Event:
        """An event of the worker that has it, as the caller is to see it."""
        self.written += event.token_ids
        if event.facts is None:
            return event._replace(request_id=self.request.id)
        self.latest = event.facts
        return event._replace(request_id=self.request.id, facts=self.facts(event.facts))

    def facts(self, latest: Facts | None) -> Facts | None:
        """The facts of all its workers together."""
        if self.before is None or latest is None:
            return latest or self.before
        return Facts(
            self.before.scheduled if self.before.scheduled is not None else latest.scheduled,
            latest.end,
            self.before.cached_tokens,
            *(one + other for one, other in zip(self.before[3:], latest[3:], strict=True)),  # type: ignore[arg-type]
        )

    def ended(self, reason: FinishReason, now: float, error: str | None = None) -> Event:
        """The last event of a request that no worker has."""
        facts = self.facts(self.latest) or Facts(None, None, 0, 0, 0, 0, 0, 0)
        return Event(self.request.id, (), reason, error=error, facts=facts._replace(end=now))
