"""From one token to its bytes.

Decoding concatenates these bytes and reads them as UTF-8. A token has the same bytes whatever its neighbours are, so
streaming is exact: a character can be sent as soon as its last byte is known.
"""

from __future__ import annotations

import re

SPACE_MARK = "▁"  # SentencePiece writes a space as U+2581
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in byte-level BPE: Latin-1 where printable, else from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def byte_level(text: str) -> bytes:
    """A byte-level BPE token. A token with a character outside the alphabet stands for its own text."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in text])
    except KeyError:
        return verbatim(text)


def byte_token(text: str) -> bytes | None:
    """The byte of a `<0xXX>` token; None for other tokens."""
    match = _BYTE_TOKEN.match(text)
    return bytes([int(match[1], 16)]) if match else None


def sentencepiece(text: str) -> bytes:
    """A SentencePiece token: U+2581 is a space."""
    return verbatim(text.replace(SPACE_MARK, " "))


def verbatim(text: str) -> bytes:
    """A token that stands for its own text. A lone surrogate in a damaged file becomes "?"."""
    return text.encode("utf-8", "replace")
