"""The core of the router in C++ decides the same as the one in Python, to the last bit."""

from __future__ import annotations

import gc
import random
import weakref
from array import array
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.cluster.core import PythonCore
from twostroke.cluster.native_core import CompiledCore, joined
from twostroke.cluster.router import Ask, Link, Role, Router, WorkerLoad
from twostroke.ops.cpu.library import available
from twostroke.ops.interface import BLOCK

pytestmark = pytest.mark.skipif(not available(), reason="the native library is not built")

BYTES = 1 << 20  # of a block
LINKS = (Link(), Link(10e9, 0.002), Link(1e8, 0.05))


class Two:
    """Two routers with different cores that are told the same, at random."""

    def __init__(self, rng: random.Random, workers: int, room: int, link: Link, prefix_link: Link | None):
        self.rng, self.room = rng, room
        self.cores = CompiledCore(), PythonCore()
        self.routers = [Router(BYTES, link, prefix_link, core) for core in self.cores]
        self.names = [f"worker-{number}" for number in range(workers)]
        self.numbers = rng.random() < 0.5  # for names of blocks
        self.coarse = rng.random() < 0.5  # loads are often equal
        self.kinds = rng.choice(("b", "pd", "pdd", "bpd"))
        for name in self.names:
            self.update(name)

    def tell(self, order: str, *facts: object) -> None:
        found = [getattr(router, order)(*facts) for router in self.routers]
        assert found[0] == found[1], (order, facts)

    def update(self, name: str) -> None:
        rng = self.rng
        kinds = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
        seconds = (lambda: rng.choice((0.0, 0.001, 0.01))) if self.coarse else (lambda: rng.uniform(0, 0.01))
        queued = rng.choice((0, 100, 3000)) if self.coarse else rng.randrange(4000)
        load = WorkerLoad(
            queued, rng.randrange(9), rng.randrange(1, 9), seconds() / 10, seconds(), 100 * seconds(), self.room
        )
        self.tell("update", name, kinds[rng.choice(self.kinds)], load)

    def prompt(self) -> Sequence[bytes | int]:
        """Its beginning is that of others, up to any of some borders. A name stands for all before it too."""
        rng = self.rng
        count = rng.choice((0, 1, 5, 16, 63, 64, 65, 80, rng.randrange(300)))
        group, border, own = rng.randrange(3), rng.choice((0, 17, 40, 64, 70, 130)), rng.randrange(10)
        both, alone = random.Random(group), random.Random(f"{group} {border} {own}")
        shared = [both.randbytes(8) for _ in range(min(count, border))]
        names = shared + [alone.randbytes(8) for _ in range(count - len(shared))]
        return array("q", b"".join(names)) if self.numbers else names

    def step(self) -> None:
        rng = self.rng
        what, name = rng.random(), rng.choice(self.names)
        if what < 0.3:
            self.update(name)
        elif what < 0.33:
            self.tell("pause", name)
        elif what < 0.36:
            self.tell("lost", name)
        elif what < 0.5 and name in self.routers[0].workers:
            prompt = self.prompt()
            self.tell("stored", name, prompt)
            self.tell("cached", name, prompt[: rng.randrange(len(prompt) + 1)] + self.prompt())
            self.tell("standing", name)
        else:
            prompt = self.prompt()
            length = len(prompt) * BLOCK + rng.randrange(BLOCK)
            due = rng.choice((inf, 0.0, rng.uniform(0, 3)))
            self.tell("choose", Ask(length, prompt, due), rng.random() < 0.3, rng.choice((None, name)))


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.integers(1, 14) | st.integers(1, 200),
    st.sampled_from([0, 40, 300, 3000, 1 << 62]),
    st.sampled_from(LINKS),
    st.sampled_from([None, *LINKS]),
)
def test_both_cores_choose_the_same_routes(
    seed: int, workers: int, room: int, link: Link, prefix_link: Link | None
) -> None:
    """Workers join, report, change roles, pause, forget and are lost; prompts share beginnings of any length."""
    two = Two(random.Random(seed), workers, room, link, prefix_link)
    for _ in range(150):
        two.step()
    for name in two.routers[0].workers:
        two.tell("standing", name)


def test_a_beginning_that_many_workers_have_is_looked_for_in_turn() -> None:
    two = Two(random.Random(1), 100, 1 << 62, Link(10e9, 0.002), Link(10e9, 0.002))
    prompt = [bytes([number, *[7] * 7]) for number in range(100)]
    for name in two.names:
        two.tell("stored", name, prompt)
    for number in range(400):
        two.tell("choose", Ask(1700, prompt + [number.to_bytes(8, "little")] * (number % 2)))


def test_a_router_is_freed_and_forgets_workers_that_it_never_had() -> None:
    core = CompiledCore()
    core.update(0, Role.BOTH, WorkerLoad())
    for number in (1, -1, 1 << 30, -(1 << 31)):
        core.pause(number)
        core.lost(number)
        core.stored(number, [b"12345678"])
        assert core.cached(number, [b"12345678"]) == 0 and core.standing(number).names == 0
    chosen = core.choose(Ask(40, [b"12345678"]), False, 1 << 30, (0.0, 0.0), None)
    assert chosen is not None and core.cached(0, [b"12345678"]) == 1
    gone = weakref.ref(core)
    del core
    gc.collect()
    assert gone() is None


def test_names_of_other_lengths_are_hashed() -> None:
    assert joined([b"12345678", b"abcdefgh"]) == b"12345678abcdefgh" and joined([]) == b""
    assert len(joined([b"1", b"2"])) == 16 and joined([b"1", b"2"])[8:] == joined([b"2"])
