"""Texts and pairs of texts to token ids, for embedders. Torch-free.

The post-processor of `tokenizer.json` writes the special tokens: [CLS] text [SEP], [CLS] text [SEP] text [SEP], or an
end token. Special tokens that a text spells are plain text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers

from twostroke.errors import InputError, ModelError
from twostroke.text.vocabulary import errors_as_model_error

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the library makes no threads of its own
_FIX = "fetch the folder again"


class Tokens(NamedTuple):
    ids: tuple[int, ...]
    types: tuple[int, ...] = ()  # 0: the first text, 1: the second; empty: all 0


class TextTokenizer:
    """Thread-safe. encode_batch_fast gives up the interpreter lock."""

    def __init__(self, folder: Path, max_tokens: int, vocab: int):
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"tokenizer.json: {folder} has none; {_FIX}")
        with errors_as_model_error(f"{file} cannot be read", _FIX):
            self._encoder = tokenizers.Tokenizer.from_file(str(file))
            self._encoder.no_truncation()
            self._encoder.no_padding()
            self._encoder.encode_special_tokens = True  # those of the text are plain characters
        self.max_tokens, self.vocab = max_tokens, vocab

    def encode(self, text: str, cut: bool = False) -> Tokens:
        """cut: a longer text loses its end; else it is an InputError."""
        found = self._encode([text])[0]
        if len(found.ids) > self.max_tokens and cut:
            found = self._shortened(text)
        return self._checked(Tokens(tuple(found.ids)))

    def encode_pair(self, first: str, second: str) -> Tokens:
        """The second text loses its end where both do not fit."""
        found = self._encode([(first, second)])[0]
        over = len(found.ids) - self.max_tokens
        if over > 0:
            second_ids = self._plain(second)
            second = self._encoder.decode(second_ids[: max(0, len(second_ids) - over)])
            found = self._encode([(first, second)])[0]
            ids, types = list(found.ids), list(found.type_ids)
            if len(ids) > self.max_tokens:  # decoding and encoding again may give a few tokens more
                extra = len(ids) - self.max_tokens
                del ids[-1 - extra : -1], types[-1 - extra : -1]
            return self._checked(Tokens(tuple(ids), tuple(types)))
        return self._checked(Tokens(tuple(found.ids), tuple(found.type_ids)))

    def given(self, ids: Sequence[int]) -> Tokens:
        """Token ids of a caller, with the special tokens that the caller gave."""
        return self._checked(Tokens(tuple(ids)))

    def _encode(self, texts: list[str | tuple[str, str]]) -> list[tokenizers.Encoding]:
        try:
            found: list[tokenizers.Encoding] = self._encoder.encode_batch_fast(texts, add_special_tokens=True)
        except (TypeError, UnicodeError):
            raise InputError(
                "input: has half a character (a lone surrogate); send text that can be written as UTF-8."
            ) from None
        return found

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _shortened(self, text: str) -> tokenizers.Encoding:
        """The text's first tokens between the special ones."""
        encoder = tokenizers.Tokenizer.from_str(self._encoder.to_str())
        encoder.encode_special_tokens = True
        encoder.enable_truncation(self.max_tokens)
        return encoder.encode(text)

    def _checked(self, tokens: Tokens) -> Tokens:
        if not tokens.ids:
            raise InputError("input: is empty; send at least one token.")
        if len(tokens.ids) > self.max_tokens:
            raise InputError(
                f"input: has {len(tokens.ids)} tokens, but this model reads {self.max_tokens}: send shorter texts."
            )
        if min(tokens.ids) < 0 or max(tokens.ids) >= self.vocab:
            raise InputError(f"input: token ids must be from 0 to {self.vocab - 1}.")
        return tokens
