"""The core of the router in C++ (ops/cpu/native/router.cpp): the same routes as `PythonCore`, sooner. Torch-free."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from twostroke.cluster.core import NumberedRoute
from twostroke.cluster.search import Ask, Times
from twostroke.cluster.standing import BlockName, Role, Standing, WorkerLoad
from twostroke.ops.cpu.library import ROUTER_ANSWER, ROUTER_ASK, WORKER_REPORT, WORKER_STANDING, load_short

NAME_BYTES = 8
NOT_FETCHED: Times = (-1.0, 0.0)


class CompiledCore:
    def __init__(self) -> None:
        library = load_short()
        self._router = library.ts_router_new()
        if self._router is None:
            raise MemoryError
        weakref.finalize(self, library.ts_router_free, self._router)
        self._library = library
        self._update, self._choose = library.ts_router_update, library.ts_router_choose
        self._answer = bytearray(ROUTER_ANSWER.size)
        self._out = ctypes.addressof(ctypes.c_char.from_buffer(self._answer))

    def update(self, number: int, role: Role, load: WorkerLoad) -> None:
        report = WORKER_REPORT.pack(
            *(role is not Role.PREFILL, role is not Role.DECODE, load.queued_tokens, load.streams, load.max_streams),
            *(load.token_seconds, load.step_seconds, load.stream_seconds, load.blocks),
        )
        if self._update(self._router, number, report):
            raise MemoryError

    def pause(self, number: int) -> None:
        if self._library.ts_router_pause(self._router, number):
            raise MemoryError

    def lost(self, number: int) -> None:
        if self._library.ts_router_lost(self._router, number):
            raise MemoryError

    def stored(self, number: int, names: Sequence[BlockName]) -> None:
        if self._library.ts_router_stored(self._router, number, joined(names), len(names)):
            raise MemoryError

    def cached(self, number: int, names: Sequence[BlockName]) -> int:
        return int(self._library.ts_router_cached(self._router, number, joined(names), len(names)))

    def standing(self, number: int) -> Standing:
        out = ctypes.create_string_buffer(WORKER_STANDING.size)
        self._library.ts_router_standing(self._router, number, out)
        return Standing(*WORKER_STANDING.unpack(out))

    def choose(self, ask: Ask, apart: bool, but: int, times: Times, prefix_times: Times | None) -> NumberedRoute | None:
        tokens, names, due = ask
        given = ROUTER_ASK.pack(apart, but, tokens, due, *times, *(prefix_times or NOT_FETCHED))
        if self._choose(self._router, joined(names), len(names), given, self._out):
            raise MemoryError
        route = ROUTER_ANSWER.unpack(self._answer)
        return route if route[0] >= 0 else None


def joined(names: Sequence[Any]) -> bytes:
    """8 bytes each, side by side. Names of another length are hashed; those of one router are of one kind."""
    if isinstance(names, array):
        return names.tobytes()
    whole = b"".join(names)
    if len(whole) == NAME_BYTES * len(names):
        return whole
    return b"".join(blake2b(name, digest_size=NAME_BYTES).digest() for name in names)
