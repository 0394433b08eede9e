"""A simulated fleet behind the deployment's own router: what is sent is served once, and nothing is left counted."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cost.fleets import parts, requests
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.routed import RoutedFleet
from twostroke.cost.simulation.trace import Arrival, PromptPart


def fleet(pools: Pools, **settings: object) -> RoutedFleet:
    return RoutedFleet(*parts(**settings), pools)


@pytest.mark.parametrize(
    "pools",
    [Pools(4, router="cost"), Pools(3, 2, router="cost"), Pools(3, 2, router="apart"), Pools(30, router="cost")],
)
def test_everyone_is_served_once_in_order_of_arrival(pools: Pools) -> None:
    rows = requests(count=200, rate=40.0, prompt=(1, 800), output=(1, 60), shared=100)
    found = fleet(pools)
    served = found.run(rows)
    assert [one.arrival for one in served] == [row.at for row in rows]
    assert [one.output for one in served] == [row.output for row in rows]
    assert all(one.arrival <= one.scheduled <= one.first <= one.end for one in served)
    assert all(len(one.gaps) == one.output - 1 and (one.gaps >= 0).all() for one in served)
    assert not (any(found.queued) or any(found.streams) or found.flights or found.outstanding)
    for worker in found.workers:
        if worker is not None:
            worker.scheduler.tables.pool.check()


def test_prompts_are_computed_where_the_route_says() -> None:
    rows = [Arrival(30.0 * turn, (PromptPart(turn, 600),), 20) for turn in range(8)]
    apart, cost = (fleet(Pools(2, 1, router=router)) for router in ("apart", "cost"))
    for one in (apart, cost):
        one.run(rows)
    assert apart.moved == 8 * (600 // 16) * apart.settings.layout.block_bytes
    assert cost.moved == 0, "an idle worker that writes computes a prompt itself"
    busy = fleet(Pools(2, 1, router="cost"))
    busy.run(requests(count=80, rate=12.0, prompt=(600, 1200), output=(40, 80)))
    assert busy.moved > 0


def test_routes_keep_to_a_target_for_the_first_token() -> None:
    """A prompt that would be late behind others goes to the worker that writes, as in a deployment."""
    writes = [Arrival(0.0, (PromptPart(900 + turn, 16),), 400) for turn in range(8)]
    rows = [*writes, *(Arrival(1.0 + 0.01 * turn, (PromptPart(turn, 1500),), 4) for turn in range(2))]
    free, kept = (fleet(Pools(1, 1, router="cost", ttft=ttft), max_requests=32) for ttft in (None, 3.0))
    late, early = (one.run(rows)[-1] for one in (free, kept))
    assert late.first - late.arrival > 3.0 > early.first - early.arrival


def test_only_the_last_chunk_is_waited_for() -> None:
    """Blocks travel while their prompt is computed."""
    rows = [Arrival(60.0 * turn, (PromptPart(turn, 2000),), 4) for turn in range(4)]
    gaps = {}
    for link in (1e12, 10e6):
        found = fleet(Pools(1, 1, link=link, latency=0.0, router="apart"), max_batch_tokens=512)
        gaps[link] = np.median([one.gaps[0] for one in found.run(rows)])
    late = (gaps[10e6] - gaps[1e12]) * 10e6 / found.settings.layout.block_bytes
    assert late == pytest.approx(512 // 16, abs=1)


def test_turns_of_a_conversation_return_or_their_blocks_move() -> None:
    talks = [[PromptPart(100 + talk, 400)] for talk in range(12)]
    rows = []
    for turn in range(60):
        talk = talks[turn % 12]
        rows.append(Arrival(0.8 * turn, tuple(talk), 10))
        talk.append(PromptPart(1000 + turn, 60))
    calm = fleet(Pools(4, router="cost"))
    hits = sum(one.cached for one in calm.run(rows)) / sum(row.prompt for row in rows)
    assert hits > 0.6
    crowd = [Arrival(0.001 * turn, (PromptPart(7, 1600), PromptPart(2000 + turn, 40)), 30) for turn in range(40)]
    early = Arrival(-30.0, (PromptPart(7, 1600), PromptPart(1999, 40)), 30)
    shared = fleet(Pools(4, link=1e10, router="cost"))
    assert sum(one.cached > 1500 for one in shared.run([early, *crowd])) >= 36 and shared.moved > 0


def test_prompts_of_tenants_without_a_prefix_cache_share_nothing() -> None:
    rows = requests(count=40, rate=10.0, prompt=(20, 60), output=(5, 10), shared=512)
    assert sum(one.cached for one in fleet(Pools(3, router="cost"), prefix_cache=False).run(rows)) == 0
