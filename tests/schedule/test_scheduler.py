"""The scheduler under random arrivals, aborts, preemptions, failed steps and evictions, with a fake runner."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.schedule.fakes import FakeEngine, make_scheduler
from twostroke.types import Event


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 40), (24, 24)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_random_life_keeps_every_invariant(depth, windows, seed):
    """100,000 steps over all cases; the design's invariants are asserted after each of them."""
    rng = random.Random(seed)
    engine = FakeEngine.random(rng, depth=depth, windows=windows)
    for _ in range(5600):
        engine.random_step()
    engine.finish_all()


def test_random_levers():
    """Many short lives, each with other limits and policies."""
    for seed in range(150):
        rng = random.Random(1000 + seed)
        windows = rng.choice([(None,), (None, 24), (17,)])
        engine = FakeEngine.random(rng, depth=rng.choice([1, 2]), windows=windows)
        for _ in range(60):
            engine.random_step()
        engine.finish_all()


def test_entries_that_stand_for_several_tokens():
    """One pool holds groups of blocks of 16 tokens and of 64: the same invariants, hits at the ends of both."""
    hits = 0
    for seed in range(60):
        rng = random.Random(2000 + seed)
        windows, entries = rng.choice([((None, None), (1, 64)), ((None, 40, None), (1, 1, 32)), ((None,), (4,))])
        engine = FakeEngine.random(rng, rng.choice([1, 2]), windows, entries)
        for _ in range(100):
            engine.random_step()
        engine.finish_all()
        hits += engine.scheduler.counters.cached_tokens
    assert hits > 1000


def test_a_draft_model_finds_what_it_computed_and_nothing_else():
    """It reads some prompts, misses parts of texts, catches up; blocks are shared, evicted, kept on the host, spoilt by
    failed steps. What counts as computed was computed for exactly these tokens."""
    found = drafts = 0
    for seed in range(24):
        rng = random.Random(3000 + seed)
        windows = rng.choice([(None,), (None, 24)])
        engine = FakeEngine.random(rng, 1, windows, draft_groups=rng.choice([1, 2]))
        for _ in range(100):
            engine.random_step()
        engine.finish_all()
        found += engine.drafted
        drafts += engine.scheduler.counters.drafts
    assert found > 30_000 and drafts > 300


def test_torch_is_not_imported():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import twostroke.schedule.scheduler, twostroke.schedule.pace\n"
        "import twostroke.kv.tables, twostroke.kv.layout, twostroke.model.arch\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shared_prefix_is_computed_once_by_requests_that_arrive_together():
    engine = FakeEngine(make_scheduler(blocks=400, max_batch_tokens=256, max_requests=32))
    prefix = list(range(1000))
    for i in range(32):
        engine.add([*prefix, 5000 + i, 6000 + i], max_tokens=4)
    engine.finish_all()
    computed = engine.scheduler.counters.computed_tokens
    own_tail = 1002 - 992
    assert computed <= 1002 + 31 * (own_tail + 16) + 32 * 4


def test_second_request_computes_one_block_and_its_tail():
    engine = FakeEngine(make_scheduler(blocks=200))
    engine.add([*range(1000), 7], max_tokens=2)
    engine.finish_all()
    before = engine.scheduler.counters.computed_tokens
    engine.add([*range(1000), 8, 9], max_tokens=1)
    engine.finish_all()
    assert engine.scheduler.counters.computed_tokens - before <= 16 + 2


def test_ten_requests_in_a_cache_of_sixteen_blocks_finish_by_preemption():
    engine = FakeEngine(make_scheduler(blocks=16, max_requests=10))
    for i in range(10):
        engine.add([i * 100 + j for j in range(20)], max_tokens=100)
    engine.finish_all()
    counters = engine.scheduler.counters
    assert counters.preemptions > 0 and counters.recomputed_tokens > 0
    assert all(len(r.tokens) == 120 for r in engine.requests)


def test_static_batching_admits_only_into_an_empty_batch():
    engine = FakeEngine(make_scheduler(blocks=100, max_requests=4, static=True))
    for i in range(8):
        engine.add([i], max_tokens=1 + i)
    seen = []
    while not engine.scheduler.idle:
        engine.step()
        seen.append(sorted(r.id for r in engine.scheduler.running.values()))
    assert not any(set(batch) & {0, 1, 2, 3} and set(batch) & {4, 5, 6, 7} for batch in seen)


def test_one_poisoned_request_fails_alone():
    engine = FakeEngine(make_scheduler(blocks=100))
    for i in range(6):
        engine.add([100 * i + j for j in range(20)], max_tokens=5)
    poison = engine.requests[3]
    engine.poisonous = lambda work: work.request is poison
    engine.finish_all()
    reasons = [r.finish_reason.value for r in engine.requests]
    assert reasons == ["length", "length", "length", "error", "length", "length"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_poison_deep_in_a_prompt_harms_its_neighbours_once(prefix_cache, depth):
    """Tried alone, a request must come as far as it was when it failed: its first chunks prove nothing."""
    engine = FakeEngine(make_scheduler(200, max_batch_tokens=16, max_requests=8, prefix_cache=prefix_cache), depth)
    for i in range(1, 4):
        engine.add([1000 * i + j for j in range(20)], max_tokens=300)
    for _ in range(6):
        engine.step()
    bad = engine.add(list(range(100)), max_tokens=5)
    failed = []
    fail = engine.scheduler.fail

    def counted(plans, error, now):
        failed.append({work.request.id for plan in plans for work in plan.works})
        return fail(plans, error, now)

    engine.scheduler.fail = counted
    engine.poisonous = lambda work: work.request is bad and work.start <= 50 < work.start + work.count
    engine.finish_all()
    assert [r.finish_reason.value for r in engine.requests] == ["length", "length", "length", "error"]
    assert len(failed) == 2 and failed[1] == {bad.id}


def test_unchunked_prompt_runs_in_one_step_over_the_budget():
    engine = FakeEngine(make_scheduler(blocks=100, max_batch_tokens=64, chunked=False))
    request = engine.add(list(range(300)), max_tokens=2)
    engine.finish_all()
    assert request.timeline.chunks == 1


def test_priority_and_prefill_first_order():
    engine = FakeEngine(make_scheduler(blocks=100, max_requests=1, policy="priority"))
    low = engine.add([1, 2, 3], max_tokens=2, priority=5)
    high = engine.add([4, 5, 6], max_tokens=2, priority=-5)
    engine.finish_all()
    assert high.timeline.end < low.timeline.end

    engine = FakeEngine(make_scheduler(blocks=400, max_batch_tokens=64, policy="prefill-first"))
    stream = engine.add([1], max_tokens=50)
    engine.step()
    engine.step()
    long = engine.add(list(range(640)), max_tokens=1)
    before = stream.output_length
    for _ in range(10):
        engine.step()
    assert long.finish_reason is not None and stream.output_length == before


def test_identity_of_phases():
    engine = FakeEngine(make_scheduler(blocks=30, max_requests=4))
    for i in range(12):
        engine.add(list(range(i, i + 50)), max_tokens=20)
    engine.finish_all()
    for request in engine.requests:
        t = request.timeline
        assert t.e2e == pytest.approx(t.queue + t.prefill + t.decode)
        assert t.ttft == pytest.approx(t.queue + t.prefill)


def test_whoever_was_admitted_on_a_promise_starts_again_when_it_is_broken():
    """The second request holds blocks the failed step never filled, though it was not part of that step."""
    engine = FakeEngine(make_scheduler(blocks=100, max_batch_tokens=70, chunked=False))
    first = engine.add(list(range(64)), max_tokens=2)
    second = engine.add([*range(64), *range(900, 980)], max_tokens=2)
    plan = engine.scheduler.plan(0.0)
    assert [work.request for work in plan.works] == [first]
    assert second.computed == 64
    engine.scheduler.fail([plan], "boom", 0.0)
    engine.scheduler.check()
    assert second.computed == 0
    engine.snapshots.clear()
    engine._count(Event(first.id, (), first.finish_reason))
    engine.finish_all()


def test_a_prompt_is_admitted_only_beside_what_others_were_promised():
    engine = FakeEngine(make_scheduler(blocks=20, max_batch_tokens=16))
    for base in (0, 1000):
        engine.add(list(range(base, base + 200)), max_tokens=2)
    engine.finish_all()
    assert engine.scheduler.counters.preemptions == 0
