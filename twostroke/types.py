"""The shared nouns, torch-free: what crosses between the scheduler, the runner and the faces of the engine.

A request is a list of known tokens and a counter `computed`. The scheduler only ever lets `computed` catch up with the
tokens: a prefix hit starts it above 0, a prefill chunk advances it by less than what remains, a decode step by one,
preemption sets it back to 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from twostroke.metrics.timeline import Timeline
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


class TokenLogprobs(NamedTuple):
    """One token with its log probability, and the k best tokens at its position as (token id, log probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Request:
    """One sample of one prompt. Siblings (the n samples of a call) are requests of their own that share blocks."""

    id: int
    tokens: list[int]  # the prompt, then what was sampled
    params: SamplingParams
    seed: int
    timeline: Timeline
    sample: int = 0  # index among siblings: part of the key of its randomness
    salt: bytes = b""  # prompts share KV blocks only under the same salt (one per tenant)
    stop_ids: frozenset[int] = frozenset()  # end-of-text tokens and the caller's stop_token_ids
    prompt_length: int = 0
    limit: int = 0  # length at which the request ends with "length"
    computed: int = 0  # tokens whose K and V are in the cache
    in_flight: int = 0  # tokens launched and not yet collected
    lost: int = 0  # tokens computed before a preemption or failed step and not yet computed again
    status: Status = Status.WAITING
    row: int = -1  # its place in the block tables while it runs
    hashes: list[bytes] = field(default_factory=list)  # chained hashes of its full blocks, as far as needed so far
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def start(self) -> int:
        """First position that nobody has computed or is computing."""
        return self.computed + self.in_flight


class Work(NamedTuple):
    """Compute `count` tokens of `request`, the first of them at position `start`."""

    request: Request
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody counts works with

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the newest, so that its logits choose the next one."""
        return self.start + self.count >= len(self.request.tokens)


class Move(NamedTuple):
    """Copy the bytes of a KV block to a slot on the host, or back."""

    block: int
    slot: int
    to_host: bool


class Plan(NamedTuple):
    """One step of the engine. Immutable, so the next one can be made while this one runs."""

    number: int
    works: tuple[Work, ...]
    moves: tuple[Move, ...] = ()  # to be made before the step, in this order


@dataclass(slots=True)
class Details:
    """What a runner has to say of one work beyond its tokens."""

    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position in the prompt
    error: str | None = None  # this request cannot go on; its neighbours can


class Result(NamedTuple):
    """tokens[i]: what works[i] sampled, in order; empty for a chunk that does not reach the newest token."""

    tokens: tuple[tuple[int, ...], ...]
    details: Mapping[int, Details] = EMPTY  # by index of the work
    seconds: float | None = None  # the step took, where the runner knows better than the engine's clock


class Event(NamedTuple):
    """News of one request. Exactly one event of each request carries a finish reason: its last."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: Mapping[int, TokenLogprobs] = EMPTY
    error: str | None = None


class Runner(Protocol):
    """Turns plans into results. The model, a fake for tests and a simulator on virtual time implement it."""

    depth: int  # plans that may be in flight at once: 1, or 2 where the next is planned while one runs

    def launch(self, plan: Plan) -> Any: ...

    def collect(self, handle: Any) -> Result: ...
