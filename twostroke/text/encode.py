"""One text to token ids with the tokenizers library, in a way that lets other threads run."""

from __future__ import annotations

import os

import tokenizers

from twostroke.errors import InputError

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the library makes no threads of its own


class LongTextError(InputError):
    """A text has more tokens than its caller can use."""

    def __init__(self, count: int, limit: int):
        super().__init__(f"prompt: has {count} tokens, at most {limit} are read; send less text")
        self.count = count


def encode_ids(encoder: tokenizers.Tokenizer, text: str, limit: int | None = None) -> list[int]:
    """The ids of a text without begin and end tokens. limit: more ids than this are a LongTextError.

    `encode` keeps the interpreter lock for the whole text. `encode_batch_fast` gives it up, and it computes no offsets.
    """
    encoding = encoder.encode_batch_fast([text], add_special_tokens=False)[0]
    if limit is not None and len(encoding) > limit:
        raise LongTextError(len(encoding), limit)
    ids: list[int] = encoding.ids
    return ids
