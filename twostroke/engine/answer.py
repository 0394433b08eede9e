"""From events of the core to text: decoding and stop strings."""

from __future__ import annotations

from twostroke.engine.chat_form import Divide
from twostroke.engine.output import Output, Sample, StreamEvent
from twostroke.metrics.timeline import Timeline
from twostroke.text.stream import StopMatcher, StreamDecoder
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import Event, FinishReason, Request

__all__ = ["Answer", "Output", "Sample", "StreamEvent"]


class Answer:
    """One sample in the making: turns the core's events into text that is final the moment it is shown."""

    __slots__ = ("decoder", "division", "request", "sample", "stops")

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        visible: frozenset[int] = frozenset(),
        division: Divide | None = None,
    ):
        """visible: special tokens that are part of the text, such as the marks around a call. division: into what is
        shown and reasoning; None: all of it is shown."""
        self.request = request
        self.division = division
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
        text, reasoning = self.division(text, self.finished) if self.division else (text, "")
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
