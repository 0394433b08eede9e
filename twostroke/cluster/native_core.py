"""The core of the router in C++ (ops/cpu/native/router.cpp): the same routes as `PythonCore`, sooner. Torch-free."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from hashlib import blake2b

from twostroke.cluster.core import NumberedRoute
from twostroke.cluster.search import Ask, Times
from twostroke.cluster.standing import Role, Standing, WorkerLoad
from twostroke.ops.cpu.library import RouterAnswer, WorkerStanding, load_short

NAME_BYTES = 8
NOT_FETCHED: Times = (-1.0, 0.0)


class NativeCore:
    def __init__(self) -> None:
        library = load_short()
        self._router = library.ts_router_new()
        if self._router is None:
            raise MemoryError
        weakref.finalize(self, library.ts_router_free, self._router)
        self._library = library
        self._update, self._choose = library.ts_router_update, library.ts_router_choose
        self._answer = RouterAnswer()
        self._out = ctypes.byref(self._answer)

    def update(self, number: int, role: Role, load: WorkerLoad) -> None:
        done = self._update(
            *(self._router, number, role is not Role.PREFILL, role is not Role.DECODE),
            *(load.queued_tokens, load.streams, load.max_streams),
            *(load.token_seconds, load.step_seconds, load.stream_seconds, load.blocks),
        )
        check(done)

    def pause(self, number: int) -> None:
        check(self._library.ts_router_pause(self._router, number))

    def lost(self, number: int) -> None:
        check(self._library.ts_router_lost(self._router, number))

    def stored(self, number: int, names: Sequence[bytes]) -> None:
        check(self._library.ts_router_stored(self._router, number, joined(names), len(names)))

    def cached(self, number: int, names: Sequence[bytes]) -> int:
        return int(self._library.ts_router_cached(self._router, number, joined(names), len(names)))

    def standing(self, number: int) -> Standing:
        out = WorkerStanding()
        self._library.ts_router_standing(self._router, number, ctypes.byref(out))
        return Standing(out.wait, out.place, out.sent_tokens, out.sent_streams, out.names, out.blocks)

    def choose(self, ask: Ask, apart: bool, but: int, times: Times, prefix_times: Times | None) -> NumberedRoute | None:
        tokens, names, due = ask
        before, out = prefix_times or NOT_FETCHED, self._answer
        check(
            self._choose(self._router, tokens, joined(names), len(names), due, apart, but, *times, *before, self._out)
        )
        if out.prefill < 0:
            return None
        return NumberedRoute(
            out.prefill, out.decode, out.ttft, out.second, out.cost, out.cached, out.sent, out.fetched, out.source
        )


def joined(names: Sequence[bytes]) -> bytes:
    """Side by side. Names that have not 8 bytes each are hashed to so many; those of one router are of one kind."""
    whole = b"".join(names)
    if len(whole) == NAME_BYTES * len(names):
        return whole
    return b"".join(blake2b(name, digest_size=NAME_BYTES).digest() for name in names)


def check(done: int) -> None:
    if done:
        raise MemoryError
