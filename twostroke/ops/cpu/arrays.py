"""Addresses of what the native library reads, and owners of what it allocates."""

from __future__ import annotations

import ctypes

import numpy as np

from twostroke.ops.cpu.library import NormRef
from twostroke.ops.interface import Norm

_NOTHING = ctypes.c_char * 0


class NativeOwner:
    """An object whose end frees what the native library allocated for it."""

    __slots__ = ("__weakref__",)


def address(array: np.ndarray) -> int:
    """Where the elements of a contiguous, writable array begin: `array.ctypes.data`, four times as fast."""
    return ctypes.addressof(_NOTHING.from_buffer(array))  # type: ignore[arg-type]


def any_address(array: np.ndarray) -> int:
    return address(array) if array.flags.carray else array.ctypes.data


def norm_reference(norm: Norm | None) -> NormRef:
    return NormRef() if norm is None else NormRef(address(norm.weight), norm.eps)
