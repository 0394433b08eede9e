"""Drafts take rows and blocks that are left over: no plan evicts or preempts more because of them."""

from __future__ import annotations

import copy
import random
from typing import NamedTuple

import pytest

from tests.schedule.fakes import FakeEngine, RandomDrafter, RandomModelDrafter, make_scheduler
from twostroke.ops.interface import BLOCK
from twostroke.schedule.scheduler import Scheduler
from twostroke.types import Plan, RequestState, Work

ROWS = 100_000  # of a step: guesses take none from prompts


def names(scheduler: Scheduler) -> set:
    """Of the blocks that a request could find."""
    return set(scheduler.tables.pool.by_name)


def lost(scheduler: Scheduler, plan) -> tuple[Plan, int, set]:
    """What a plan costs others: preemptions, and the blocks that are found no more."""
    preempted, found = scheduler.counters.preemptions, names(scheduler)
    made = plan(0.0)
    return made, scheduler.counters.preemptions - preempted, found - names(scheduler)


def compare_plans(engine: FakeEngine, scarce: list[int]) -> None:
    """Each plan is made twice: by a copy of the scheduler without a drafter, then as it is. scarce: gets the guesses of
    each plan that evicts or preempts."""
    scheduler, plan = engine.scheduler, engine.scheduler.plan

    def both(now: float) -> Plan:
        plain = copy.deepcopy(scheduler)
        plain.plan = Scheduler.plan.__get__(plain)
        plain.drafter = None
        made, *cost = lost(scheduler, plan)
        without, *cost_without = lost(plain, plain.plan)
        if made.works:
            assert cost == cost_without
            assert [work.start for work in made.works] == [work.start for work in without.works]
            if cost != [0, set()]:
                scarce.append(sum(len(work.draft) for work in made.works))
        return made

    scheduler.plan = both


def holds_no_more_than_it_needs(scheduler: Scheduler) -> None:
    for request in scheduler.running.values():
        for blocks, span in zip(scheduler.tables.held[request.row], scheduler.tables.spans, strict=True):
            assert len(blocks) == -(-request.start // span), "a guess that was dropped left a block behind"


@pytest.mark.parametrize("draft_groups", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
def test_no_plan_evicts_or_preempts_more_because_of_guesses(depth, draft_groups):
    scarce: list[int] = []
    for seed in range(5):
        rng = random.Random(seed)
        windows = rng.choice([(None,), (None, 24)])
        blocks = rng.randint(14, 40) * (len(windows) + draft_groups)
        scheduler = make_scheduler(blocks, windows, ROWS, rng.randint(2, 12), policy=rng.choice(["fcfs", "priority"]),
                                   draft_groups=draft_groups)  # fmt: skip
        scheduler.drafter = (RandomModelDrafter if draft_groups else RandomDrafter)(rng)
        engine = FakeEngine(scheduler, depth, rng)
        engine.capacity = 180
        compare_plans(engine, scarce)
        for _ in range(60):
            engine.random_step()
            holds_no_more_than_it_needs(scheduler)
    assert sum(count > 0 for count in scarce) > 20, "guesses where blocks are scarce"


class Oracle(RandomDrafter):
    """Knows what comes, with errors put in."""

    def __init__(self, errors: float):
        super().__init__(random.Random(0))
        self.errors = errors

    def begin(self, streams) -> bool:
        return True

    def waits(self) -> bool:
        return True

    def propose(self, request: RequestState, most: int) -> list[int]:
        known = len(request.tokens)
        return [token_at(request, known + i) + (self.rng.random() < self.errors) for i in range(min(most, 16))]


def token_at(request: RequestState, position: int) -> int:
    return (31 * request.id + 7 * position) % 1000


class Certain(FakeEngine):
    """Each text continues in one way only."""

    def _sample(self, work: Work) -> tuple[int, ...]:
        if not work.samples:
            return ()
        first = len(work.request.tokens)
        right = [token_at(work.request, first + i) for i in range(len(work.draft) + 1)]
        kept = next((i for i, guess in enumerate(work.draft) if guess != right[i]), len(work.draft))
        return tuple(right[: kept + 1])


class Served(NamedTuple):
    evicted: int
    preempted: int
    accepted: int


def serve(errors: float | None, prompts: int, requests: int, blocks: int, answer: int) -> Served:
    """A whole load on few blocks. errors: of the guesses; None: nothing is guessed."""
    scheduler = make_scheduler(blocks, max_batch_tokens=ROWS, max_requests=requests)
    scheduler.drafter = None if errors is None else Oracle(errors)
    engine, pool, evicted = Certain(scheduler), scheduler.tables.pool, []
    take = pool.take
    pool.take = lambda: evicted.append(not pool.free) or take()
    for number in range(prompts):
        engine.add([1000 * number + i for i in range(3 * BLOCK)], answer)
    engine.finish_all()
    return Served(sum(evicted), scheduler.counters.preemptions, scheduler.counters.accepted_tokens)


ONE_BY_ONE, IN_FOURS, SCARCE, SCARCER = (12, 1, 10, 100), (12, 4, 40, 60), (12, 4, 30, 100), (10, 10, 16, 100)


@pytest.mark.parametrize("load", [ONE_BY_ONE, IN_FOURS, SCARCE, SCARCER])
def test_a_load_with_wrong_guesses_evicts_and_preempts_as_often_as_without(load):
    without, wrong = serve(None, *load), serve(1.0, *load)
    assert wrong == without and without.evicted > 30
    assert (without.preempted > 0) == (load in (SCARCE, SCARCER))


@pytest.mark.parametrize("load", [ONE_BY_ONE, IN_FOURS])
def test_a_load_with_right_guesses_evicts_and_preempts_as_often_as_without(load):
    """Where answers end in the same order: else other requests meet in a step."""
    without, right = serve(None, *load), serve(0.0, *load)
    assert right[:2] == without[:2] and right.accepted > 500
