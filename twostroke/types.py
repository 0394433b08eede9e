"""The types that scheduler, runner, engine and front ends share. Torch-free.

A request is a list of known tokens and a counter `computed`. The scheduler only ever lets `computed` catch up with the
tokens: a prefix hit starts it above 0, a prefill chunk advances it by less than what remains, a decode step by one,
preemption sets it back to 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from twostroke.metrics.timeline import Facts, Timeline
from twostroke.record import replace
from twostroke.sampling import SamplingParams

EMPTY: Mapping[int, Any] = MappingProxyType({})


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    FETCHING = 3  # it has a row and blocks, and waits for their bytes from another engine


class TokenLogprobs(NamedTuple):
    """One token with its log probability, and the k best tokens at its position as (token id, log probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: the front end makes it, the wire carries it, the scheduler holds it.

    It is one sample of one prompt. The n samples of a call are n requests that share blocks.
    """

    id: int
    tokens: tuple[int, ...]  # the prompt, and what an earlier engine wrote of the answer (see `written`)
    params: SamplingParams
    seed: int = 0
    arrival: float = 0.0  # seconds of the engine's clock
    limit: int = 0  # length of prompt and answer at which the request ends with "length"
    stop_ids: frozenset[int] = frozenset()  # end-of-text tokens and the caller's stop_token_ids
    salt: bytes = b""  # prompts share KV blocks only under the same salt (one per tenant)
    sample: int = 0  # index among the samples of the call: part of the key of its randomness
    key: int = 0  # number of the caller's API key, for fairness between keys; 0: there is only one caller
    written: int = 0  # the last so many tokens belong to the answer: a request that another engine began
    lend: int = -1  # its full blocks from this one on are for another engine (kv/lending.py); -1: none are

    def siblings(self, count: int) -> list[Request]:
        """This sample and the next ones of the same prompt: their ids and indices count up."""
        return [self, *(replace(self, id=self.id + i, sample=self.sample + i) for i in range(1, count))]


class RequestState:
    """What the engine knows of a request while it has it. Fields that every step reads are copied from the request."""

    __slots__ = (
        "computed",
        "drafted",
        "facts_changed",
        "finish_reason",
        "hashes",
        "id",
        "in_flight",
        "key",
        "limit",
        "lost",
        "params",
        "prompt_length",
        "request",
        "row",
        "salt",
        "sample",
        "seed",
        "status",
        "stop_ids",
        "timeline",
        "tokens",
        "turn",
    )  # fmt: skip

    def __init__(self, request: Request):
        self.request = request
        self.id = request.id
        self.params = request.params
        self.seed = request.seed
        self.sample = request.sample
        self.salt = request.salt
        self.key = request.key
        self.turn = -1  # its place in the order of keys, given when it is first queued
        self.stop_ids = request.stop_ids
        self.limit = request.limit
        self.tokens = list(request.tokens)  # the prompt, then what was sampled
        self.prompt_length = len(request.tokens) - request.written
        self.timeline = Timeline(request.arrival, prompt_tokens=self.prompt_length)
        self.facts_changed = True  # the timeline has facts that no event has carried yet
        self.computed = 0  # tokens whose K and V are in the cache
        self.drafted = 0  # tokens whose K and V the draft model has in the cache, where there is one
        self.in_flight = 0  # tokens launched and not yet collected
        self.lost = 0  # tokens computed before a preemption or failed step and not yet computed again
        self.status = Status.WAITING
        self.row = -1  # its place in the block tables while it runs
        self.hashes: list[bytes] = []  # chained hashes of its full blocks, as far as needed so far
        self.finish_reason: FinishReason | None = None

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def scores_prompt(self) -> bool:
        """Whether the log probabilities of its prompt's tokens are still wanted."""
        return self.params.prompt_logprobs is not None and not self.output_length and not self.sample

    @property
    def start(self) -> int:
        """The first position that is neither computed nor in flight."""
        return self.computed + self.in_flight


class WorkKind(StrEnum):
    """What a work does."""

    READ = "read"  # tokens of a prompt, or of an answer that is computed again
    WRITE = "write"  # the newest token: the next one is chosen from it
    VERIFY = "verify"  # the newest token and drafts after it: as many are kept as the model itself would have chosen


UNWRITTEN = -1  # a token of a draft that the draft model writes when the step runs
MOST_DRAFTED = 16  # tokens of one draft


class Work(NamedTuple):
    """Compute `count` tokens of `request`, the first of them at position `start`."""

    request: RequestState
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    kind: WorkKind = WorkKind.READ
    draft: tuple[int, ...] = ()  # tokens after the newest one; count = 1 + len(draft), but in run/drafting.py

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the newest, so that its logits choose the next one."""
        return self.kind is not WorkKind.READ or self.start + self.count >= len(self.request.tokens)

    def undrafted(self) -> Work:
        """The same without its draft."""
        return self._replace(count=1, kind=WorkKind.WRITE, draft=()) if self.draft else self

    def choices(self) -> list[Choice]:
        """The tokens that this work chooses, one for each of its last rows."""
        request = self.request
        if not self.samples:
            return []
        if not self.draft:
            return [Choice(request, self.start + self.count, request.tokens)]
        tokens, end = request.tokens, self.start + 1
        if request.params.is_plain:
            return [Choice(request, end + i, tokens) for i in range(self.count)]
        return [Choice(request, end + i, [*tokens, *self.draft[:i]]) for i in range(self.count)]


class Choice(NamedTuple):
    """One token to be chosen. Its noise, penalties and grammar mask depend on its position and what is before it."""

    request: RequestState
    position: int  # of the token
    tokens: Sequence[int]  # before it; one fewer than `position` where the newest is still on the device. Where they
    # decide nothing (`is_plain`), drafts are left out.

    @property
    def output_length(self) -> int:
        """Tokens of the answer before it."""
        return self.position - self.request.prompt_length


class DraftWork(NamedTuple):
    """What the draft model does in a step: it computes `count` known tokens of `request`, the first at `start`, and
    then writes `writes` tokens after them."""

    request: RequestState
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    writes: int = 0

    @property
    def end(self) -> int:
        """Where its K and V end. The last token that it writes has none."""
        return self.start + self.count + max(0, self.writes - 1)


class Place(NamedTuple):
    """Where the bytes of a KV block can be, beside the pool: a slot of the host's memory, or of a peer's. Blocks of
    peers come and go by export and import (engine/exchange.py), so a plan's moves name slots of this host."""

    slot: int
    peer: str = ""  # its address; empty: this host


class Move(NamedTuple):
    """Copy the bytes of a KV block to a place, or back."""

    block: int
    place: Place
    away: bool  # from the pool to the place


class Plan(NamedTuple):
    """One step of the engine. Immutable, so the next one can be made while this one runs."""

    number: int
    works: tuple[Work, ...]
    moves: tuple[Move, ...] = ()  # to be made before the step, in this order
    drafts: tuple[DraftWork, ...] = ()  # of the draft model, before the works

    def undrafted(self) -> Plan:
        """The same without drafts of its works."""
        return self._replace(works=tuple([work.undrafted() for work in self.works]))


@dataclass(slots=True)
class Details:
    """What a runner reports of one work beside its tokens."""

    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position in the prompt
    error: str | None = None  # this request cannot go on; its neighbours can


class Result(NamedTuple):
    """tokens[i]: what works[i] chose, in order; empty for a chunk that does not reach the newest token. Of a verified
    work: the drafts that the model itself would have chosen, and the token after them."""

    tokens: tuple[tuple[int, ...], ...]
    details: Mapping[int, Details] = EMPTY  # by index of the work
    seconds: float | None = None  # the step took, where the runner knows better than the engine's clock
    passes: tuple[tuple[int, float], ...] = ()  # rows and seconds of each pass of the draft model, part of the step
    settled: bool = True  # False: another step of its shape will be faster
    verified: bool = True  # False: the runner was not ready for these drafts, and left them out


class Event(NamedTuple):
    """What is new of one request. Exactly one event of each request carries a finish reason: its last."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: Mapping[int, TokenLogprobs] | None = None  # by position in the prompt
    error: str | None = None
    facts: Facts | None = None  # of the timeline, when they changed since the last event


class Drafter(Protocol):
    """Guesses what requests write next. A wrong guess costs time and changes nothing."""

    def begin(self, streams: Sequence[RequestState]) -> bool:
        """A plan is being made in which these streams write. False: nothing is guessed in it."""
        ...

    def waits(self) -> bool:
        """Whether this plan should be made only when the results of steps in flight are known."""
        ...

    def propose(self, request: RequestState, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow `request.tokens`. UNWRITTEN: the draft model is to write them."""
        ...

    def reads(self, request: RequestState) -> bool:
        """Whether the draft model reads a prompt along with the target."""
        ...

    def catches_up(self, request: RequestState) -> bool:
        """Whether the draft model reads what it has missed of a stream, so that it can draft later."""
        ...

    def learn(self, plan: Plan, result: Result, seconds: float, elapsed: float) -> None:
        """A step was collected. seconds: of the device; elapsed: with what the host did meanwhile. Drafts that the
        runner left out (`result.verified`) are not in the plan."""

    def forget(self, request: RequestState) -> None:
        """The request ended."""


class Runner(Protocol):
    """Turns plans into results. The model, a fake for tests and a simulator on virtual time implement it."""

    depth: int  # plans that may be in flight at once: 1, or 2 where the next is planned while one runs

    def launch(self, plan: Plan) -> Any: ...

    def collect(self, handle: Any) -> Result: ...
