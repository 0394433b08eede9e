"""Fairness between API keys: turns in the queue and places in the batch."""

from __future__ import annotations

from tests.schedule.fakes import FakeEngine, make_scheduler
from twostroke.schedule.keys import Turns, most_of
from twostroke.types import Status


def started_in_order(engine: FakeEngine) -> list[int]:
    """The keys of requests in the order in which they got into the batch."""
    seen: dict[int, int] = {}
    while not engine.scheduler.idle:
        engine.step()
        for request in engine.requests:
            if request.status is not Status.WAITING:
                seen.setdefault(request.id, request.key)
    return list(seen.values())


def test_keys_alternate_whatever_the_length_of_their_queues() -> None:
    engine = FakeEngine(make_scheduler(blocks=200, max_requests=1))
    for number in range(6):
        engine.add([number] * 20, 3, key=1)
    engine.step()
    for number in range(2):
        engine.add([50 + number] * 20, 3, key=2)
    engine.add([90] * 20, 3, key=3)
    assert started_in_order(engine) == [1, 2, 3, 1, 2, 1, 1, 1, 1]


def test_one_key_leaves_places_for_others() -> None:
    engine = FakeEngine(make_scheduler(blocks=400, max_requests=8, key_share=0.75))
    for number in range(20):
        engine.add([number] * 20, 50, key=1)
    engine.step()
    engine.step()
    running = engine.scheduler.running
    assert len(running) == 6, "three quarters of eight"
    late = [engine.add([100 + number] * 20, 50, key=2) for number in range(3)]
    engine.step()
    assert [request.status for request in late] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    engine.finish_all()


def test_without_a_second_key_nothing_is_kept_back() -> None:
    engine = FakeEngine(make_scheduler(blocks=400, max_requests=8, key_share=0.1))
    for number in range(20):
        engine.add([number] * 20, 50)
    engine.step()
    assert len(engine.scheduler.running) == 8
    engine.finish_all()


def test_a_share_of_what_others_leave() -> None:
    assert [most_of(0.75, 16, others) for others in (0, 12, 15, 16, 20)] == [12, 3, 1, 0, 0]
    assert most_of(1.0, 16, 4) == 12 and most_of(0.01, 8, 0) == 1


def test_a_key_that_was_away_gets_no_credit() -> None:
    """Its turns begin with the present one, not with those that it did not use."""
    turns = Turns()
    for _ in range(100):
        turns.take(turns.give(1))
    assert turns.give(2) == 99 and turns.give(2) == 100 and turns.give(1) == 100
    assert turns.give(0) == 0
