"""Strings to tokens and back, for vocabularies from any file."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from twostroke.errors import InputError
from twostroke.text.chat import ChatTemplate
from twostroke.text.folder_vocabulary import read_folder
from twostroke.text.gguf_vocabulary import read_gguf
from twostroke.text.vocabulary import Vocabulary


class Tokenizer:
    """Encodes with the tokenizers library; decodes by joining token bytes (token_bytes.py says why). Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size: int = vocabulary.size
        self.eos_ids: frozenset[int] = vocabulary.eos_ids
        self.bos_id: int | None = vocabulary.bos_id
        self.special_ids: frozenset[int] = vocabulary.special_ids
        self.leading_space: bool = vocabulary.leading_space
        self.chat: ChatTemplate | None = (
            ChatTemplate(vocabulary.template, vocabulary.names) if vocabulary.template else None
        )
        self._vocabulary = vocabulary
        self._bytes: list[bytes | None] = [None] * vocabulary.size
        self._literal: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Text to ids.

        add_special: add the model's begin and end tokens, if it has any. A rendered chat template contains its own:
        encode that with add_special=False.
        parse_special: read "<|im_end|>" in the text as that token. With False it is plain characters: use that for text
        that must not contain control tokens.
        """
        if not isinstance(text, str):
            raise InputError(f"prompt: must be a string, got {type(text).__name__}; pass text or a list of token ids")
        encoder = self._vocabulary.encoder if parse_special else self._literal_encoder()
        try:
            ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError):  # which of the two depends on the library's version
            place = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
            raise InputError(
                f"prompt: has half a character (a lone surrogate) at position {place}; "
                "send text that can be written as UTF-8"
            ) from None
        return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix] if add_special else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """Ids to text; bytes that are not UTF-8 become U+FFFD.

        at_start=False: the ids continue a text, so SentencePiece's first space is kept.
        """
        skip = self.special_ids if skip_special else frozenset()
        text = b"".join([self.token_bytes(number) for number in ids if number not in skip]).decode("utf-8", "replace")
        return text[1:] if at_start and self.leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token. Rows that pad the embedding past the vocabulary have none."""
        if not 0 <= token_id < self.vocab_size:
            if token_id < 0:
                raise InputError(f"token id: {token_id} is negative; ids count from 0")
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._vocabulary.token_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The text of one token for logprobs and dashboards. An incomplete character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, such as "<|im_end|>"."""
        number: int | None = self._vocabulary.encoder.token_to_id(token)
        return number

    def _literal_encoder(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as characters. The library has no such option for a single call."""
        with self._lock:
            if self._literal is None:
                copy = tokenizers.Tokenizer.from_str(self._vocabulary.encoder.to_str())
                copy.encode_special_tokens = True
                self._literal = copy
            return self._literal


def from_folder(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder."""
    return Tokenizer(read_folder(Path(path)))


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer inside a GGUF's metadata."""
    return Tokenizer(read_gguf(metadata))
