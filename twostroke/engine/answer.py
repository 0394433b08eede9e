"""From events of the core to text: decoding, stop strings, and what a caller finally holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.metrics.timeline import Timeline
from twostroke.text.stream import StopMatcher, StreamDecoder
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import Event, FinishReason, Request, TokenLogprobs


class StreamEvent(NamedTuple):
    """A piece of one answer. The last piece of each sample carries its finish reason and timeline."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    sample: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    timeline: Timeline | None = None
    error: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether there is nothing to it but text."""
        return bool(self.text) and self.finish_reason is None and self.logprobs is None


@dataclass(slots=True)
class Sample:
    """One of the n answers to a prompt."""

    timeline: Timeline
    pieces: list[str] = field(default_factory=list)  # of its text
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Output:
    """A prompt's answers. The fields of the first sample can be read directly."""

    prompt_token_ids: list[int]
    samples: list[Sample]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first prompt token has none

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.samples[0].logprobs

    @property
    def timeline(self) -> Timeline:
        return self.samples[0].timeline


class Answer:
    """One sample in the making: turns the core's events into text that is final the moment it is shown."""

    __slots__ = ("decoder", "plain", "request", "sample", "stops")

    def __init__(self, request: Request, tokenizer: Tokenizer, visible: frozenset[int] = frozenset()):
        """visible: special tokens that are part of the text, such as the marks around a call."""
        self.request = request
        self.decoder = StreamDecoder(tokenizer, at_start=False, visible=visible)
        self.stops = StopMatcher(tuple(request.params.stop)) if request.params.stop else None
        self.plain = False  # once there is a first token: all that the next one can bring is text
        self.sample = Sample(Timeline(request.arrival, prompt_tokens=len(request.tokens) - request.written))
        if request.params.logprobs is not None:
            self.sample.logprobs = []

    @property
    def finished(self) -> bool:
        return self.sample.finish_reason is not None

    def push(self, event: Event, at: float) -> StreamEvent:
        """Take an event in; `at`: when its tokens were written. A stop string may end the answer before the core knows:
        see `finished`."""
        timeline = self.sample.timeline
        if event.facts is not None:
            timeline.update(event.facts)
        ids, text = self._decode(event)
        timeline.token_times += [at] * len(ids)
        if self.finished and timeline.end is None:
            timeline.end = at
        reason = self.sample.finish_reason
        logprobs = event.logprobs[: len(ids)]
        self.sample.pieces.append(text)
        self.sample.token_ids += ids
        self.sample.error = event.error
        if self.sample.logprobs is not None:
            self.sample.logprobs += logprobs
        self.plain = bool(self.sample.token_ids) and not (
            self.finished or self.stops or self.sample.logprobs is not None
        )
        wanted = logprobs if self.sample.logprobs is not None else None
        last = timeline if self.finished else None
        return StreamEvent(text, tuple(ids), reason, self.request.sample, wanted, last, event.error)

    def push_token(self, token: int, at: float) -> str:
        """`push` of one token with nothing else to it to an answer that is `plain`: the text it brings."""
        text = self.decoder.push_one(token)
        self.sample.pieces.append(text)
        self.sample.token_ids.append(token)
        self.sample.timeline.token_times.append(at)
        return text

    def _decode(self, event: Event) -> tuple[list[int], str]:
        ids: list[int] = []
        text = ""
        stop_token = event.token_ids[-1] if event.finish_reason is FinishReason.STOP else None
        for token in event.token_ids:
            ids.append(token)
            if token == stop_token and len(ids) == len(event.token_ids):
                break  # an end token ends the text, it is not part of it
            piece, stopped = self._match(self.decoder.push_one(token), len(self.sample.token_ids) + len(ids))
            text += piece
            if stopped:
                return ids, text
        if event.finish_reason is not None:
            piece, stopped = self._match(self.decoder.flush(), len(self.sample.token_ids) + len(ids))
            text += piece
            if not stopped:
                text += self.stops.flush() if self.stops else ""
                self.sample.finish_reason = event.finish_reason.value
        return ids, text

    def _match(self, text: str, written: int) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string ended the answer."""
        if self.stops is None or written <= self.request.params.min_tokens:
            return text, False
        shown, matched = self.stops.push(text)
        if matched is not None:
            self.sample.finish_reason = FinishReason.STOP.value
        return shown, matched is not None
