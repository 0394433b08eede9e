"""From events of the core to text: decoding, stop strings, and what the caller gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.metrics.timeline import Timeline
from twostroke.text.formats import ToolFormat
from twostroke.text.parse import Content, Reasoning, StreamParser
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
    reasoning: str = ""  # of a chat with a model that writes it in a channel of its own

    @property
    def is_text(self) -> bool:
        """Whether it holds text and nothing that only some callers want."""
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
    thoughts: list[str] = field(default_factory=list)  # pieces of its reasoning

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)


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
    def reasoning(self) -> str:
        """What a model with channels (gpt-oss) wrote before its answer, in `LLM.chat`; else empty."""
        return self.samples[0].reasoning

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

    @property
    def error(self) -> str | None:
        """Why the answer failed (finish_reason "error"); None if it did not."""
        return self.samples[0].error


class Answer:
    """One sample in the making: turns the core's events into text that is final the moment it is shown."""

    __slots__ = ("decoder", "parser", "request", "sample", "stops")

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        visible: frozenset[int] = frozenset(),
        channels: ToolFormat | None = None,
    ):
        """visible: special tokens that are part of the text, such as the marks around a call. channels: the text is
        divided by this format into what is shown and reasoning; None: all of it is shown."""
        self.request = request
        self.parser = None if channels is None else StreamParser(channels, {})
        self.decoder = StreamDecoder(tokenizer, at_start=False, visible=visible)
        self.stops = StopMatcher(tuple(request.params.stop)) if request.params.stop else None
        self.sample = Sample(Timeline(request.arrival, prompt_tokens=len(request.tokens) - request.written))
        if request.params.logprobs is not None:
            self.sample.logprobs = []

    @property
    def finished(self) -> bool:
        return self.sample.finish_reason is not None

    def push(self, event: Event, at: float) -> StreamEvent:
        """Take an event in; `at`: when its tokens were written. A stop string may end the answer before the core knows:
        see `finished`."""
        sample, timeline = self.sample, self.sample.timeline
        if event.facts is not None:
            timeline.update(event.facts)
        ids, text = self._decode(event)
        text, reasoning = self._divided(text)
        sample.pieces.append(text)
        sample.thoughts.append(reasoning)
        sample.token_ids += ids
        timeline.token_times += [at] * len(ids)
        logprobs = None
        if sample.logprobs is not None:
            logprobs = event.logprobs[: len(ids)]
            sample.logprobs += logprobs
        reason = sample.finish_reason
        if reason is None:
            return StreamEvent(text, ids, None, self.request.sample, logprobs, reasoning=reasoning)
        sample.error = event.error
        if timeline.end is None:
            timeline.end = at
        return StreamEvent(text, ids, reason, self.request.sample, logprobs, timeline, event.error, reasoning)

    def _divided(self, text: str) -> tuple[str, str]:
        """Text that is shown, and reasoning."""
        if self.parser is None:
            return text, ""
        deltas = self.parser.push(text) + (self.parser.finish() if self.finished else [])
        thoughts = [delta.text for delta in deltas if isinstance(delta, Reasoning)]
        return "".join(delta.text for delta in deltas if isinstance(delta, Content)), "".join(thoughts)

    def _decode(self, event: Event) -> tuple[tuple[int, ...], str]:
        """The tokens that belong to the answer, and the text that may be shown now."""
        ids, reason = event.token_ids, event.finish_reason
        shown = ids[:-1] if reason is FinishReason.STOP else ids  # an end token has no text
        text = ""
        if self.stops is None:
            text = self.decoder.push(shown)
        else:
            for count, token in enumerate(shown, 1):
                piece, stopped = self._match(self.decoder.push((token,)), len(self.sample.token_ids) + count)
                text += piece
                if stopped:
                    return ids[:count], text
        if reason is not None:
            piece, stopped = self._match(self.decoder.flush(), len(self.sample.token_ids) + len(ids))
            text += piece
            if not stopped:
                text += self.stops.flush() if self.stops else ""
                self.sample.finish_reason = reason.value
        return ids, text

    def _match(self, text: str, written: int) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string ended the answer."""
        if self.stops is None or written <= self.request.params.min_tokens:
            return text, False
        shown, matched = self.stops.push(text)
        if matched is not None:
            self.sample.finish_reason = FinishReason.STOP.value
        return shown, matched is not None
