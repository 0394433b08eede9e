"""A request on its way through several engines: what each is asked, and one answer for its caller. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from twostroke.metrics.timeline import Facts
from twostroke.ops.interface import BLOCK
from twostroke.types import Event, FinishReason, Request


@dataclass(slots=True, eq=False)
class Flight:
    request: Request  # as the caller made it
    engine: object = None  # that has it now; None: it is between two engines
    written: list[int] = field(default_factory=list)  # tokens that the caller has got
    before: Facts | None = None  # of the engines that had it before
    latest: Facts | None = None  # of the engine that has it
    lends: bool = False  # the engine that has it computes the prompt and one token, and keeps the blocks
    aborted: bool = False  # by the caller

    def prompt_only(self) -> Request:
        """For an engine that computes the prompt, writes one token and keeps the blocks for another engine."""
        return replace(self.request, limit=len(self.request.tokens) + 1, lend=True)

    def rest(self) -> Request:
        """For an engine that goes on after what was written: the same tokens follow as if it had written all."""
        begun, written = self.request, tuple(self.written)
        return replace(begun, tokens=begun.tokens + written, written=begun.written + len(written))

    @property
    def continues(self) -> bool:
        """Whether more tokens may follow those that are written."""
        return len(self.request.tokens) + len(self.written) < self.request.limit

    def leave(self) -> None:
        """Its engine has it no longer; what that one measured counts for the whole."""
        self.before, self.latest = self.facts(self.latest), None
        self.engine, self.lends = None, False

    def take(self, event: Event) -> Event:
        """An event of the engine that has it, as the caller is to see it."""
        self.written += event.token_ids
        if event.facts is None:
            return event
        self.latest = event.facts
        return event._replace(facts=self.facts(event.facts))

    def facts(self, latest: Facts | None) -> Facts | None:
        """Of all its engines."""
        if self.before is None or latest is None:
            return latest or self.before
        return Facts(
            self.before.scheduled if self.before.scheduled is not None else latest.scheduled,
            latest.end,
            self.before.cached_tokens,
            *(one + other for one, other in zip(self.before[3:], latest[3:], strict=True)),
        )

    def ended(self, reason: FinishReason, now: float, error: str | None = None) -> Event:
        """The last event of a request that no engine has."""
        facts = self.facts(self.latest) or Facts(None, None, 0, 0, 0, 0, 0, 0)
        return Event(self.request.id, (), reason, error=error, facts=facts._replace(end=now))


def has_full_block(request: Request) -> bool:
    """Whether its prompt leaves a block that can be sent."""
    return len(request.tokens) >= BLOCK
