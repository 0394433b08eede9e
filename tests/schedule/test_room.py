"""KV blocks between API keys: a key that fills the pool makes room for one that waits, and every request ends."""

from __future__ import annotations

import random

import pytest

from tests.schedule.fakes import FakeEngine, make_scheduler
from twostroke.types import RequestState, Status

FLOOD, OTHER = 1, 2


def filled_pool(depth: int = 1, streams: int = 8, blocks: int = 80, max_tokens: int = 900) -> FakeEngine:
    """One key's answers have taken the whole pool, and the next of them wait."""
    engine = FakeEngine(make_scheduler(blocks=blocks, max_requests=32, key_share=0.75), depth)
    engine.capacity = 1000
    for number in range(streams):
        engine.add([number] * 20, max_tokens, key=FLOOD)
    while engine.scheduler.tables.pool.available > 2:
        engine.step()
    return engine


def steps_until(engine: FakeEngine, request: RequestState, status: Status, most: int) -> int:
    for step in range(most):
        if request.status is status:
            return step
        engine.step()
    raise AssertionError(f"it was {request.status} after {most} steps")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_key_does_not_wait_for_another_keys_answers(depth: int) -> None:
    engine = filled_pool(depth)
    for number in range(30):
        engine.add([30 + number] * 20, 900, key=FLOOD)
    before = engine.scheduler.counters.preemptions
    late = engine.add([99] * 300, 20, key=OTHER)
    assert steps_until(engine, late, Status.RUNNING, 10) <= 2 + depth
    assert engine.scheduler.counters.preemptions - before <= 3, "no more of them than it needs"
    steps_until(engine, late, Status.FINISHED, 40)
    assert late.timeline.preemptions == 0, "the answers of the key that has most took its blocks"
    engine.finish_all()


def test_each_of_several_keys_has_an_equal_part() -> None:
    engine = filled_pool()
    late = [engine.add([40 + number] * 250, 30, key=2 + number) for number in range(3)]
    for request in late:
        steps_until(engine, request, Status.RUNNING, 12)
    engine.finish_all()


def test_a_key_keeps_its_best_request() -> None:
    """A single answer that holds nearly all blocks is not taken back for requests of another key."""
    engine = filled_pool(streams=1, blocks=60)
    first = engine.requests[0]
    late = engine.add([99] * 200, 20, key=OTHER)
    steps_until(engine, first, Status.FINISHED, 1000)
    assert first.timeline.preemptions == 0
    steps_until(engine, late, Status.FINISHED, 100)


def test_what_would_not_help_is_not_taken() -> None:
    """The other key asks for more than the flooding key has beyond its part."""
    engine = filled_pool()
    before = engine.scheduler.counters.preemptions
    late = engine.add([99] * (16 * 70), 1, key=OTHER)
    for _ in range(5):
        engine.step()
    assert late.status is Status.WAITING and engine.scheduler.counters.preemptions == before
    engine.finish_all()


def test_a_less_important_request_takes_nothing() -> None:
    engine = filled_pool()
    before = engine.scheduler.counters.preemptions
    engine.add([99] * 100, 20, priority=1, key=OTHER)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.counters.preemptions == before
    engine.finish_all()


@pytest.mark.parametrize(("key", "share"), [(0, 0.75), (1, 1.0)])
def test_without_keys_or_shares_nothing_changes(key: int, share: float) -> None:
    engine = FakeEngine(make_scheduler(blocks=80, max_requests=32, key_share=share))
    engine.capacity = 1000
    for number in range(8):
        engine.add([number] * 20, 900, key=key)
    while engine.scheduler.tables.pool.available > 2:
        engine.step()
    late = engine.add([99] * 300, 20, key=2 * key)
    for _ in range(5):
        engine.step()
    assert late.status is Status.WAITING and not engine.scheduler.room.leaving
    engine.finish_all()


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_lives_with_keys_end(first: int) -> None:
    """Small pools, long answers, several keys, steps that fail, steps planned ahead."""
    made_room = 0
    for seed in range(first, first + 50):
        rng = random.Random(f"room {seed}")
        engine = FakeEngine.random(rng, depth=rng.choice([1, 2]), windows=rng.choice([(None,), (None, 24), (17,)]))
        engine.keys = rng.choice([(1, 1, 1, 2, 3), (1, 1, 1, 1, 1, 2), (1, 2)])
        for _ in range(60):
            made_room += bool(engine.scheduler.room.leaving)
            engine.random_step()
        engine.finish_all(20_000)
    assert made_room, "no life had a key that made room"
