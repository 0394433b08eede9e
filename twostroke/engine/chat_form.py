"""How an answer in a conversation is read, where a model writes its reasoning first: in a channel (gpt-oss) or between
<think> and </think>."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from twostroke.text.formats import ToolFormat, has_reasoning, tool_format
from twostroke.text.parse import Content, Reasoning, StreamParser
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tools import marker_ids

Divide = Callable[[str, bool], tuple[str, str]]  # more text, and whether it ends -> what is shown, and reasoning


THINK = "<think>"
PROMPT_END = 16  # tokens that hold the mark in any vocabulary


class ChatForm(NamedTuple):
    visible: frozenset[int] = frozenset()  # special tokens that are part of the text
    channels: ToolFormat | None = None
    thinks: Tokenizer | None = None  # of a model that may begin with <think>

    def division(self, prompt: Sequence[int], constrained: bool) -> Divide | None:
        """The division of one answer; None: all text is shown. constrained: by a grammar, which covers the whole
        answer, so that a model that thinks does not. The prompt itself may have opened the reasoning."""
        if self.channels is not None:
            return partial(divided, StreamParser(self.channels, {}))
        if self.thinks is None or constrained:
            return None
        end = self.thinks.decode(prompt[-PROMPT_END:], skip_special=False)
        return partial(divided, StreamParser(reasoning=True, inside=end.rstrip().endswith(THINK)))


AS_WRITTEN = ChatForm()


def chat_form(tokenizer: Tokenizer, tools: bool) -> ChatForm:
    """The form of answers of this model. With tools the text has all channels and marks: the caller reads calls from
    it."""
    source = tokenizer.chat.source if tokenizer.chat is not None else None
    form = tool_format(source)
    channels = form if form is not None and form.channels else None
    if channels is not None:
        return ChatForm(marker_ids(tokenizer, channels), None if tools else channels)
    if not has_reasoning(source):
        return AS_WRITTEN
    return ChatForm(marker_ids(tokenizer, form if tools else None), thinks=None if tools else tokenizer)


def divided(parser: StreamParser, text: str, ends: bool) -> tuple[str, str]:
    deltas = parser.push(text) + (parser.finish() if ends else [])
    shown = [delta.text for delta in deltas if isinstance(delta, Content)]
    return "".join(shown), "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
