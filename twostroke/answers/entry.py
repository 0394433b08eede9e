"""A stored answer. Its bytes begin with an authentication code made with a key of the deployment, so an entry that was
changed, cut, or moved from another place is not read."""

from __future__ import annotations

import hmac

import msgspec

from twostroke.answers.keys import seal

MAX_BYTES = 4 << 20
CODE = 32  # bytes


class Entry(msgspec.Struct, frozen=True, array_like=True):
    id: str
    tenant: bytes
    exact: bytes  # key of the exact tier; empty: the request was not determined
    context: bytes  # key of the semantic tier; empty: not compared by meaning
    question: str
    tokens: tuple[int, ...]
    by_string: bool  # a stop string ended it
    prompt_tokens: int
    created: float  # unix time
    seconds: float  # that computing it took
    vector: bytes = b""  # float32 of the question


def sealed(data: bytes, secret: bytes) -> bytes:
    return seal(secret, data) + data


def unseal(data: bytes, secret: bytes) -> bytes | None:
    """None for bytes that this deployment did not write."""
    if not CODE < len(data) <= MAX_BYTES or not hmac.compare_digest(seal(secret, data[CODE:]), data[:CODE]):
        return None
    return data[CODE:]


def pack(entry: Entry, secret: bytes) -> bytes:
    return sealed(msgspec.msgpack.encode(entry), secret)


def unpack(data: bytes, secret: bytes) -> Entry | None:
    """None for bytes that this deployment did not write."""
    inner = unseal(data, secret)
    try:
        return None if inner is None else msgspec.msgpack.decode(inner, type=Entry)
    except msgspec.DecodeError:
        return None
