"""Requests from other engines get room in the order of the policy, among each other and with those that wait here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.schedule.fakes import FakeEngine, make_scheduler
from twostroke.engine.exchange import WaitingRequest, expect
from twostroke.sampling import SamplingParams
from twostroke.schedule.asking import SILENT_PLANS, SILENT_SECONDS, Asking
from twostroke.types import Request


class Asked:
    """An engine with one place that is taken, and questions to it."""

    def __init__(self, **options):
        self.engine = FakeEngine(make_scheduler(blocks=200, max_requests=1, **options))
        self.scheduler = self.engine.scheduler
        self.now = 0.0
        self.core = SimpleNamespace(scheduler=self.scheduler, clock=lambda: self.now)
        self.asking = Asking(self.scheduler)
        self.engine.add([1] * 20, 3)
        self.engine.step()

    def ask(self, number: int, priority: int = 0, key: int = 0) -> WaitingRequest | None:
        params = SamplingParams(max_tokens=3, temperature=0, priority=priority)
        tokens = tuple(range(number, number + 40))
        request = Request(number, tokens, params, arrival=float(number), limit=44, key=key)
        return expect(self.core, request, 40, self.asking)  # type: ignore[arg-type]


@pytest.mark.parametrize(("policy", "first"), [("fcfs", 100), ("priority", 102)])
def test_the_one_that_comes_first_gets_the_room(policy: str, first: int) -> None:
    asked = Asked(policy=policy)
    numbers = {100: 5, 101: 9, 102: 1}
    assert not any(asked.ask(*one) for one in numbers.items())
    asked.engine.finish_all()
    others = sorted((number for number in numbers if number != first), reverse=True)
    assert not any(asked.ask(number, numbers[number]) for number in others), "they ask before it does"
    assert asked.ask(first, numbers[first]) is not None
    assert not asked.scheduler.waiting


def test_one_that_waits_here_goes_before_one_that_is_less_important() -> None:
    asked = Asked(policy="priority")
    waiting = asked.engine.add([7] * 20, 3)
    assert asked.ask(100, priority=5) is None
    asked.engine.finish_all()
    assert waiting.output_length == 3 and asked.ask(100, priority=5) is not None


def test_a_request_that_asks_no_more_holds_no_other_up() -> None:
    asked = Asked()
    assert asked.ask(100) is None and asked.ask(101) is None
    asked.now += 2 * SILENT_SECONDS
    for _ in range(SILENT_PLANS + 1):
        asked.engine.step()
    asked.engine.finish_all()
    assert asked.ask(101) is not None
    left = Asked()
    assert left.ask(100) is None and left.ask(101) is None
    left.engine.finish_all()
    assert left.ask(101) is None
    left.asking.forget(100)
    assert left.ask(101) is not None


def test_a_key_keeps_its_turn_however_often_it_asks() -> None:
    asked = Asked()
    for _ in range(50):
        assert asked.ask(100, key=1) is None
    assert asked.scheduler.turns.give(1) == 1
