"""From one token to its bytes.

Decoding is the concatenation of these bytes, read as UTF-8. That one sentence is what makes streaming exact: a token
means the same bytes whatever stands beside it, so text can be sent as soon as its last byte is known.
"""

from __future__ import annotations

import re

SPACE_MARK = "▁"  # SentencePiece writes a space as U+2581
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable characters byte-level BPE writes bytes with: Latin-1's own where printable, else U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def byte_level(text: str) -> bytes:
    """A byte-level BPE token. One that uses a character outside the alphabet was never encoded: it is itself."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in text])
    except KeyError:
        return verbatim(text)


def byte_token(text: str) -> bytes | None:
    """The byte of a `<0xXX>` token, None for any other text."""
    match = _BYTE_TOKEN.match(text)
    return bytes([int(match[1], 16)]) if match else None


def sentencepiece(text: str) -> bytes:
    """A SentencePiece token: a mark is a space."""
    return verbatim(text.replace(SPACE_MARK, " "))


def verbatim(text: str) -> bytes:
    """A token that stands for its own text. A damaged name (a lone surrogate) must not break a stream."""
    return text.encode("utf-8", "replace")
