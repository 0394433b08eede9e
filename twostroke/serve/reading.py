"""An answer's text as parts: content, reasoning, calls of tools. The whole answer is the fold of what is streamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from twostroke.engine.answer import StreamEvent
from twostroke.text.parse import Call, Content, Delta, Reasoning, StreamParser
from twostroke.text.tools import new_call_id

CONTENT, REASONING, CALL = "content", "reasoning", "call"


@dataclass(slots=True)
class Block:
    """A stretch of one kind. `text` of a call is its arguments, JSON as the model wrote it."""

    kind: str
    text: str = ""
    number: int = -1  # of a call, from 0
    id: str = ""
    name: str = ""


class Part(NamedTuple):
    """More text of a block; `opens`: it is the block's first."""

    block: Block
    text: str
    opens: bool


class Reader:
    """Reads one answer."""

    def __init__(self, parser: StreamParser | None = None):
        self.parser = parser
        self.blocks: list[Block] = []

    @property
    def plain(self) -> bool:
        """Whether all that comes is more text of the one block there is."""
        return self.parser is None and len(self.blocks) == 1

    def add(self, text: str) -> None:
        """More text, where all is plain."""
        self.blocks[0].text += text

    def push(self, event: StreamEvent) -> list[Part]:
        parts = self.push_text(event.text)
        if self.parser is not None and event.finish_reason is not None:
            parts += map(self._take, self.parser.finish())
        return parts

    def push_text(self, text: str) -> list[Part]:
        if not text:
            return []
        return [self._take(delta) for delta in (self.parser.push(text) if self.parser else [Content(text)])]

    def _take(self, delta: Delta) -> Part:
        block = self.blocks[-1] if self.blocks else None
        opens = block is None or not belongs(delta, block)
        if opens or block is None:
            block = opened(delta)
            self.blocks.append(block)
        text = delta.arguments if isinstance(delta, Call) else delta.text
        block.text += text
        return Part(block, text, opens)

    def text(self, kind: str) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == CALL]

    def reason(self, reason: str | None) -> str | None:
        """An answer that ended by itself and called tools ended for that."""
        return "tool_calls" if reason == "stop" and self.calls else reason


def belongs(delta: Delta, block: Block) -> bool:
    if isinstance(delta, Call):
        return block.kind == CALL and block.number == delta.number
    return block.kind == (REASONING if isinstance(delta, Reasoning) else CONTENT)


def opened(delta: Delta) -> Block:
    if isinstance(delta, Call):
        return Block(CALL, number=delta.number, id=f"call_{new_call_id()}", name=delta.name or "")
    return Block(REASONING if isinstance(delta, Reasoning) else CONTENT)
