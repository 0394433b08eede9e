"""Messages between the processes of one engine as msgpack. A NumPy array is its type, its shape and its bytes."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")


def encode(value: Any) -> bytes:
    """value: what msgspec knows, NumPy's arrays and NumPy's numbers."""
    return _encoder.encode(value)


def decode(body: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(body, type=kind, dec_hook=_to_array)


def _of_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value)} is no part of a message")


def _to_array(kind: type, found: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"{kind} is no part of a message")
    dtype, shape, data = found
    return np.frombuffer(bytearray(data), dtype).reshape(shape)  # one that can be written to


_encoder = msgspec.msgpack.Encoder(enc_hook=_of_array)
