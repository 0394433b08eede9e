"""Fill in the middle: models that were trained to write the text between a prefix and a suffix have tokens for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twostroke.text.tokenizer import Tokenizer

# The tokens before the prefix, the suffix and the middle, by family
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Gemma's coders
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<fim_pad>", "<file_sep>", "<repo_name>",
    "▁<EOT>",
)  # fmt: skip


class Infill(NamedTuple):
    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]  # tokens that end the middle

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The prompt whose continuation is the text between the two."""
        return [self.prefix, *before, self.suffix, *after, self.middle]


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """None: the model has no tokens for this."""
    for marks in MARKS:
        ids = [number for mark in marks if (number := tokenizer.token_id(mark)) is not None]
        if len(ids) == len(marks):
            ends = tuple(number for mark in ENDS if (number := tokenizer.token_id(mark)) is not None)
            prefix, suffix, middle = ids
            return Infill(prefix, suffix, middle, ends)
    return None
