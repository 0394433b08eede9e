"""What the caller of an engine gets: pieces of an answer, and whole answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.metrics.timeline import Timeline
from twostroke.types import TokenLogprobs


class StreamEvent(NamedTuple):
    """A piece of one answer. The last piece of each sample carries its finish reason and timeline."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    sample: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    timeline: Timeline | None = None
    error: str | None = None
    reasoning: str = ""  # of a chat with a model that writes it first

    @property
    def is_text(self) -> bool:
        """Whether it holds text and nothing that only some callers want."""
        return bool(self.text) and self.finish_reason is None and self.logprobs is None and not self.reasoning

    @property
    def parts(self) -> tuple[StreamEvent, ...]:
        """A last piece as its text and its end; any other as it is."""
        text = self._replace(finish_reason=None, timeline=None, error=None)
        if self.finish_reason is None or not text.is_text:
            return (self,)
        return text, self._replace(text="", token_ids=())


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
