"""How an answer in a conversation is read, where a model writes in channels (gpt-oss)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from twostroke.text.formats import ToolFormat, tool_format
from twostroke.text.parse import Content, Reasoning, StreamParser
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tools import marker_ids

Division = Callable[[str, bool], tuple[str, str]]  # more text, and whether it ends -> what is shown, and reasoning


class ChatForm(NamedTuple):
    visible: frozenset[int] = frozenset()  # special tokens that are part of the text
    channels: ToolFormat | None = None  # None: all text is shown

    def division(self) -> Division | None:
        """For one answer."""
        return None if self.channels is None else partial(divided, StreamParser(self.channels, {}))


AS_WRITTEN = ChatForm()


def chat_form(tokenizer: Tokenizer, tools: bool) -> ChatForm:
    """With tools the text has all channels and their marks: the caller reads calls from it."""
    form = tool_format(tokenizer.chat.source) if tokenizer.chat is not None else None
    if form is None or not form.channels:
        return AS_WRITTEN
    return ChatForm(marker_ids(tokenizer, form), None if tools else form)


def divided(parser: StreamParser, text: str, ends: bool) -> tuple[str, str]:
    deltas = parser.push(text) + (parser.finish() if ends else [])
    shown = [delta.text for delta in deltas if isinstance(delta, Content)]
    return "".join(shown), "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
