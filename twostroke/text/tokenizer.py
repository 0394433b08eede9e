"""Strings to tokens and back, for vocabularies from any file."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from twostroke.errors import InputError
from twostroke.text.chat import ChatTemplate, RenderedPrompt, renderer
from twostroke.text.controls import Controls
from twostroke.text.encode import encode_ids
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
        self._vocabulary = vocabulary
        self._controls = Controls([token.content for token in self._control_tokens()])
        self.chat: ChatTemplate | None = None
        if vocabulary.template:
            process = renderer(controls=self._controls)
            self.chat = ChatTemplate(vocabulary.template, vocabulary.names, process=process)
        self._bytes: list[bytes | None] = [None] * vocabulary.size
        self._literal: tuple[tokenizers.Tokenizer, dict[int, int]] | None = None
        self._lock = threading.Lock()

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, limit: int | None = None
    ) -> list[int]:
        """Text to ids.

        add_special: add the model's begin and end tokens, if it has any. A rendered chat template contains its own:
        encode that with add_special=False.
        parse_special: read "<|im_end|>" in the text as that token. With False it is plain characters: use that for text
        that must not contain control tokens. In a `RenderedPrompt` only the tokens that the template wrote are control
        tokens; those that a message spells are plain characters.
        limit: more tokens than this are a LongTextError.
        """
        if not isinstance(text, str):
            raise InputError(f"prompt: must be a string, got {type(text).__name__}; pass text or a list of token ids")
        if parse_special and isinstance(text, RenderedPrompt) and text.marked is not None:
            text, parse_special = text.marked, False
        encoder, numbers = (self._vocabulary.encoder, {}) if parse_special else self._literal_encoder()
        try:
            ids = encode_ids(encoder, text, limit)
        except (TypeError, UnicodeError):  # which of the two depends on the library's version
            place = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
            raise InputError(
                f"prompt: has half a character (a lone surrogate) at position {place}; "
                "send text that can be written as UTF-8"
            ) from None
        if numbers:
            ids = [numbers.get(number, number) for number in ids]
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

    def _control_tokens(self) -> list[tokenizers.AddedToken]:
        return [token for token in self._vocabulary.encoder.get_added_tokens_decoder().values() if token.special]

    def _literal_encoder(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """An encoder that knows control tokens by their aliases only, and from its ids to those of the vocabulary where
        they differ. It shares the model's memory. The library has no such option for a single call."""
        with self._lock:
            if self._literal is None:
                original = self._vocabulary.encoder
                encoder = tokenizers.Tokenizer(original.model)
                if original.normalizer is not None:
                    encoder.normalizer = original.normalizer
                if original.pre_tokenizer is not None:
                    encoder.pre_tokenizer = original.pre_tokenizer
                added = {n: self._renamed(token) for n, token in original.get_added_tokens_decoder().items()}
                encoder.add_tokens(list(added.values()))
                numbers = {encoder.token_to_id(token.content): n for n, token in added.items()}
                self._literal = encoder, {here: n for here, n in numbers.items() if here is not None}
            return self._literal

    def _renamed(self, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
        """A control token under its alias; other added tokens as they are."""
        return tokenizers.AddedToken(
            self._controls.alias(token.content) if token.special else token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=False,
        )


def from_folder(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder."""
    return Tokenizer(read_folder(Path(path)))


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer inside a GGUF's metadata."""
    return Tokenizer(read_gguf(metadata))
