"""An answer's text, divided into content, reasoning and tool calls while it is written.

Whole answers and streams are made from the same segments, so they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from twostroke.engine.answer import StreamEvent
from twostroke.text.parse import Call, Content, Delta, Reasoning, StreamParser
from twostroke.text.tools import new_call_id

CONTENT, REASONING, TOOL_CALL = "content", "reasoning", "tool_call"


@dataclass(slots=True)
class AnswerSegment:
    """Consecutive text of one kind. The text of a tool call is its arguments: JSON as the model wrote it."""

    kind: str
    text: str = ""
    number: int = -1  # of a tool call, from 0
    id: str = ""
    name: str = ""


class SegmentDelta(NamedTuple):
    """More text of a segment."""

    segment: AnswerSegment
    text: str
    opens: bool  # it is the segment's first


class SegmentReader:
    """Reads one answer."""

    def __init__(self, parser: StreamParser | None = None, parallel: bool = True):
        """Without a parser, all text is content. parallel: False keeps only the first call."""
        self.parser, self.parallel = parser, parallel
        self.segments: list[AnswerSegment] = []

    def push(self, event: StreamEvent) -> list[SegmentDelta]:
        deltas: list[Delta] = []
        if event.text:
            deltas += self.parser.push(event.text) if self.parser else [Content(event.text)]
        if self.parser is not None and event.finish_reason is not None:
            deltas += self.parser.finish()
        return [self._add(delta) for delta in deltas if self.parallel or not is_further_call(delta)]

    def _add(self, delta: Delta) -> SegmentDelta:
        segment = self.segments[-1] if self.segments else None
        opens = segment is None or not continues(delta, segment)
        if opens or segment is None:
            segment = opened(delta)
            self.segments.append(segment)
        text = delta.arguments if isinstance(delta, Call) else delta.text
        segment.text += text
        return SegmentDelta(segment, text, opens)

    def text(self, kind: str) -> str:
        return "".join(segment.text for segment in self.segments if segment.kind == kind)

    @property
    def calls(self) -> list[AnswerSegment]:
        return [segment for segment in self.segments if segment.kind == TOOL_CALL]

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason of an answer that stopped by itself is "tool_calls" if it called tools."""
        return "tool_calls" if reason == "stop" and self.calls else reason


def is_further_call(delta: Delta) -> bool:
    return isinstance(delta, Call) and delta.number > 0


def continues(delta: Delta, segment: AnswerSegment) -> bool:
    if isinstance(delta, Call):
        return segment.kind == TOOL_CALL and segment.number == delta.number
    return segment.kind == (REASONING if isinstance(delta, Reasoning) else CONTENT)


def opened(delta: Delta) -> AnswerSegment:
    if isinstance(delta, Call):
        return AnswerSegment(TOOL_CALL, number=delta.number, id=f"call_{new_call_id()}", name=delta.name or "")
    return AnswerSegment(REASONING if isinstance(delta, Reasoning) else CONTENT)
