"""Prompts that arrive together at an idle engine are read together: their answers begin when all are read."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.schedule.fakes import FakeEngine, make_scheduler
from tests.schedule.test_gap import Engine
from twostroke.record import replace
from twostroke.schedule.together import MANY, Together
from twostroke.types import FinishReason, RequestState

EVER = 1e9


def engine_with(together: Together, depth: int = 1, **limits) -> FakeEngine:
    return FakeEngine(make_scheduler(blocks=400, max_batch_tokens=64, together=together, **limits), depth)


def burst(engine: FakeEngine, count: int, length: int = 40) -> list[RequestState]:
    return [engine.add([number] * length, max_tokens=5) for number in range(count)]


def first(request: RequestState) -> float:
    return request.timeline.token_times[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_begin_when_all_prompts_are_read(depth):
    engine = engine_with(Together(EVER), depth)
    requests = burst(engine, 16)
    engine.finish_all()
    assert len({first(request) for request in requests}) == 1
    assert engine.scheduler.counters.steps == 16 * 40 / 64 + 5 - 1, "steps that read were full"
    for request in requests:
        assert all(later > earlier for earlier, later in pairwise(request.timeline.token_times))


def test_few_prompts_do_not_wait():
    engine = engine_with(Together(EVER))
    requests = burst(engine, MANY - 1)
    engine.finish_all()
    assert first(requests[0]) < first(requests[2]) < first(requests[-1])


def test_no_answer_waits_longer_than_that():
    """Each step takes more than a second."""
    engine = engine_with(Together(3.0))
    requests = burst(engine, 16)
    engine.finish_all()
    begun = sorted(map(first, requests))
    assert 3.0 < begun[0] < 6.0 < begun[-1]
    assert all(later > earlier for one in requests for earlier, later in pairwise(one.timeline.token_times))


def test_prompts_that_come_later_are_not_waited_for():
    engine = engine_with(Together(EVER))
    requests = burst(engine, 16)
    while not engine.scheduler.together.kept:
        engine.step()
    late = [engine.add([50 + number] * 640, max_tokens=5) for number in range(4)]
    engine.finish_all()
    assert len({first(request) for request in requests}) == 1 and first(requests[0]) < min(map(first, late))


def test_nothing_waits_beside_a_stream():
    engine = engine_with(Together(EVER))
    engine.add([99] * 8, max_tokens=100)
    for _ in range(3):
        engine.step()
    requests = burst(engine, 16)
    engine.finish_all()
    assert first(requests[0]) < first(requests[-1])


def test_a_request_with_a_deadline_does_not_wait():
    engine = engine_with(Together(EVER))
    requests = burst(engine, 16)
    requests[0].params = replace(requests[0].params, deadline=1.0)
    engine.finish_all()
    assert first(requests[0]) < first(requests[1]) == first(requests[-1])


def test_what_has_no_room_is_not_waited_for():
    engine = engine_with(Together(EVER), max_requests=4)
    requests = burst(engine, 16)
    engine.finish_all()
    assert len({first(request) for request in requests[:4]}) == 1
    assert first(requests[0]) < first(requests[4])


def test_an_answer_that_waits_can_be_aborted():
    engine = engine_with(Together(EVER))
    requests = burst(engine, 16)
    while not engine.scheduler.together.kept:
        engine.step()
    event = engine.scheduler.abort(requests[0], engine.now)
    assert event is not None and event.finish_reason is FinishReason.ABORT
    assert event.token_ids == tuple(requests[0].tokens[40:]) != ()
    engine._count(event)
    engine.finish_all()


def test_requests_on_their_way_count():
    """A step ends with one answer. More prompts have arrived meanwhile, and are in the queue before the next plan."""
    engine = engine_with(Together(EVER, within=10.0))
    alone = engine.add([99] * 40, max_tokens=5)
    engine.scheduler.together.coming = lambda: 15
    engine.step()
    assert alone.output_length == 1 and not engine.told
    engine.scheduler.together.coming = int
    burst(engine, 15)
    engine.finish_all()
    assert len({first(request) for request in engine.requests}) == 1


def test_a_burst_on_a_gpu_ends_sooner():
    """256 prompts of 512 tokens, 128 tokens each, with steps that take as long as on an H200."""

    def run(longest: float) -> tuple[float, float]:
        engine = Engine(noise=0.0, seed=1)
        engine.core.scheduler.together.longest = longest
        requests = [engine.ask(512, 128) for _ in range(256)]
        while not engine.core.idle:
            engine.core.step()
        gaps = [later - earlier for r in requests for earlier, later in pairwise(r.timeline.token_times)]
        return max(request.timeline.end for request in requests), max(gaps)

    (end, gap), (before, _) = run(4.0), run(0.0)
    assert end < 0.96 * before and gap < 0.05
