"""Strings to tokens and back: the one face the rest of the engine sees, whatever file the vocabulary came from."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from twostroke.errors import InputError
from twostroke.text.chat import ChatTemplate
from twostroke.text.folder import read_folder
from twostroke.text.gguf_vocab import read_gguf
from twostroke.text.vocabulary import Vocabulary


class Tokenizer:
    """Encodes with the tokenizers library, decodes by joining token bytes (see pieces.py for why).

    Safe to share between threads.
    """

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
        self.whole: dict[int, str] = {}  # text of tokens met so far that are whole characters, and not special
        self._bytes: list[bytes | None] = [None] * vocabulary.size
        self._literal: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Text to ids.

        add_special: put the model's begin (and end) tokens around it, where the model wants any. A rendered chat
        template has written its own: encode that with add_special=False.
        parse_special: read "<|im_end|>" in the text as that token. With False it is just characters, as text from
        someone who must not speak for the template should be.
        """
        if not isinstance(text, str):
            raise InputError(f"prompt: must be a string, got {type(text).__name__}; pass text or a list of token ids")
        engine = self._vocabulary.engine if parse_special else self._literal_engine()
        try:
            ids: list[int] = engine.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError):  # which of the two depends on the library's version
            place = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
            raise InputError(
                f"prompt: has half a character (a lone surrogate) at position {place}; "
                "send text that can be written as UTF-8"
            ) from None
        return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix] if add_special else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """Ids to text; bytes that are not UTF-8 become U+FFFD.

        at_start=False says that the ids continue a text: SentencePiece's first space is then a real one.
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
            known = self._bytes[token_id] = self._vocabulary.piece(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token for people to read (logprobs, dashboards): half a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, such as "<|im_end|>"."""
        number: int | None = self._vocabulary.engine.token_to_id(token)
        return number

    def _literal_engine(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as characters: the switch is per engine, and engines are shared."""
        with self._lock:
            if self._literal is None:
                copy = tokenizers.Tokenizer.from_str(self._vocabulary.engine.to_str())
                copy.encode_special_tokens = True
                self._literal = copy
            return self._literal


def from_folder(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder."""
    return Tokenizer(read_folder(Path(path)))


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer inside a GGUF's metadata."""
    return Tokenizer(read_gguf(metadata))
