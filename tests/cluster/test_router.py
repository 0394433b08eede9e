"""The router takes the route whose stream begins first, and is right against a search over all routes."""

from __future__ import annotations

import random
import statistics
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.plain_router import PlainRouter
from twostroke.cluster.router import Ask, Link, Role, Route, Router, WorkerLoad
from twostroke.cluster.search import FEW
from twostroke.ops.interface import BLOCK
from twostroke.record import replace

BYTES = 1_000_000  # of a block
FAST = WorkerLoad(max_streams=8, token_seconds=0.001, step_seconds=0.01)


def names(prompt: int, count: int) -> list[bytes]:
    return [bytes([prompt, i]) for i in range(count)]


def router(link: Link | None = None, **roles: Role) -> Router:
    made = Router(BYTES, link or Link(1e9, 0.001))
    for name, role in roles.items():
        made.update(name, role, FAST)
    return made


def test_a_long_prompt_goes_to_a_prefill_worker_and_a_short_one_stays() -> None:
    """Streams wait while a decode worker computes a prompt; a transfer has its latency."""
    found = router(Link(1e9, 0.05), p=Role.PREFILL, d=Role.DECODE)
    found.update("d", Role.DECODE, WorkerLoad(streams=2, max_streams=8, token_seconds=0.001, step_seconds=0.01))
    long = found.choose(Ask(1000, names(1, 62)))
    assert long is not None and (long.prefill, long.decode, long.sent) == ("p", "d", 62)
    assert long.ttft == pytest.approx(1.0) and long.second == pytest.approx(1.0 + 0.05 + 62 * BYTES / 1e9 + 0.01)
    assert long.cost == pytest.approx(long.second)
    found.update("p", Role.PREFILL, FAST)
    found.update("d", Role.DECODE, WorkerLoad(streams=2, max_streams=8, token_seconds=0.001, step_seconds=0.01))
    short = found.choose(Ask(16, names(2, 1)))
    assert short is not None and (short.prefill, short.decode) == ("d", "d")
    assert short.ttft == pytest.approx(0.016) and short.cost == pytest.approx(0.016 + 0.01 + 2 * 0.016)


def test_a_slow_link_keeps_prompts_where_they_are() -> None:
    for bandwidth, prefill in ((1e9, "p"), (1e6, "d")):
        found = router(Link(bandwidth), p=Role.PREFILL, d=Role.DECODE)
        found.update("d", Role.DECODE, WorkerLoad(streams=4, max_streams=8, token_seconds=0.002))
        route = found.choose(Ask(160, names(1, 10)))
        assert route is not None and route.prefill == prefill


def test_a_prompt_goes_where_its_beginning_is_unless_that_worker_is_busy() -> None:
    found = router(a=Role.BOTH, b=Role.BOTH)
    found.stored("b", names(1, 50))
    route = found.choose(Ask(820, names(1, 51)))
    assert route is not None and (route.prefill, route.decode, route.cached) == ("b", "b", 50)
    assert route.ttft == pytest.approx(0.02)
    found.update("b", Role.BOTH, WorkerLoad(queued_tokens=5000, max_streams=8, token_seconds=0.001))
    route = found.choose(Ask(820, names(1, 51)))
    assert route is not None and (route.prefill, route.cached) == ("a", 0)


def test_blocks_that_the_decode_worker_has_are_not_counted_as_sent() -> None:
    found = router(Link(1e6), p=Role.PREFILL, d=Role.DECODE, e=Role.DECODE)
    for name in "de":
        found.update(name, Role.DECODE, WorkerLoad(max_streams=8, token_seconds=1.0))
    found.stored("e", names(1, 9))
    route = found.choose(Ask(160, names(1, 10)))
    assert route is not None and (route.prefill, route.decode, route.sent) == ("p", "e", 1)


def test_what_was_sent_counts_until_the_next_report() -> None:
    found = router(a=Role.BOTH, b=Role.BOTH)
    taken = [found.choose(Ask(100, names(i, 6))) for i in range(6)]
    assert [route.decode for route in taken if route] == ["a", "b"] * 3
    found.update("a", Role.BOTH, FAST)
    assert [found.choose(Ask(100, names(i, 6))).decode for i in (10, 11)] == ["a", "a"]  # type: ignore[union-attr]


def test_a_full_worker_is_waited_for_or_passed_over() -> None:
    found = router(a=Role.BOTH, b=Role.BOTH)
    full = WorkerLoad(streams=8, max_streams=8, token_seconds=0.001, stream_seconds=40.0)
    found.update("a", Role.BOTH, full)
    assert found.choose(Ask(100)).decode == "b"  # type: ignore[union-attr]
    found.update("b", Role.BOTH, full)
    assert found.choose(Ask(100)).ttft == pytest.approx(5.0)  # type: ignore[union-attr]


def test_a_worker_that_is_lost_is_not_chosen_and_its_blocks_are_forgotten() -> None:
    found = router(p=Role.PREFILL, d=Role.DECODE)
    found.stored("d", names(1, 4))
    found.lost("d")
    assert found.choose(Ask(100, names(1, 6))) is None
    found.update("d", Role.DECODE, FAST)
    route = found.choose(Ask(100, names(1, 6)))
    assert route is not None and route.cached == 0


seconds = st.sampled_from([0.0, 0.001, 0.01, 0.3])
loads = st.builds(WorkerLoad, st.integers(0, 3000), st.integers(0, 9), st.integers(1, 8), seconds, seconds, seconds)
workers = st.lists(st.tuples(st.sampled_from(Role), loads, st.integers(0, 12)), max_size=6)


def every_route(found: Router, ask: Ask) -> list[Route]:
    """All of them, by the definition."""
    routes = []
    for first, helper in found.workers.items():
        cached = found.cached(first, ask.names)
        for second, writer in found.workers.items():
            if writer.role is Role.PREFILL or (helper.role is Role.DECODE and first != second):
                continue
            left = helper.load.queued_tokens + max(1, ask.tokens - cached * BLOCK)
            ttft = left * helper.load.token_seconds
            step, lacking = writer.load.step_seconds, len(ask.names) - found.cached(second, ask.names)
            others = helper.load.streams * max(1, ask.tokens - cached * BLOCK) * helper.load.token_seconds
            if first == second:
                ttft = max(ttft, found.standing(first).place)
                routes.append(Route(first, first, ttft, ttft + step, ttft + step + others, cached))
            elif ask.names:
                ready = max(ttft + found.link.seconds(lacking * BYTES), found.standing(second).place) + step
                routes.append(Route(first, second, ttft, ready, ready + others, cached, lacking))
    return routes


@settings(max_examples=80)
@given(workers, st.integers(0, 12), st.sampled_from([Link(), Link(1e8, 0.01), Link(1e6, 0.5)]))
def test_no_route_begins_sooner_than_the_one_that_is_chosen(many: list, blocks: int, link: Link) -> None:
    found = Router(BYTES, link)
    for number, (role, load, held) in enumerate(many):
        found.update(str(number), role, load)
        found.stored(str(number), names(1, held))
    ask = Ask(blocks * BLOCK + 5, names(1, blocks))
    routes = every_route(found, ask)
    chosen = found.choose(ask)
    assert (chosen is None) == (not routes)
    if chosen is not None:
        close = [route.cost == pytest.approx(chosen.cost) for route in routes if route[:2] == chosen[:2]]
        assert close == [True]
        assert chosen.cost == pytest.approx(min((route.cost for route in routes), default=inf))


@settings(max_examples=120)
@given(workers, st.integers(0, 12), seconds, st.sampled_from([Link(), Link(1e8, 0.01)]))
def test_a_first_token_is_late_only_where_the_soonest_route_is_late_too(
    many: list, blocks: int, due: float, link: Link
) -> None:
    found = Router(BYTES, link)
    for number, (role, load, held) in enumerate(many):
        found.update(str(number), role, load)
        found.stored(str(number), names(1, held))
    ask = Ask(blocks * BLOCK + 5, names(1, blocks), due)
    routes = every_route(found, ask)
    chosen = found.choose(ask)
    if chosen is None:
        return
    cheapest = pytest.approx(min(route.cost for route in routes))
    soonest = pytest.approx(min(route.second for route in routes))
    assert chosen.cost == cheapest or (chosen.second == soonest and chosen.ttft <= due)
    if all(route.ttft <= due for route in routes if route.cost == cheapest):
        assert chosen.cost == cheapest
    elif chosen.ttft > due:
        assert any(route.ttft > due for route in routes if route.second == soonest)


def test_a_prompt_that_is_due_does_not_wait_for_a_worker_without_streams() -> None:
    """In place it takes 1 s, for which eight streams wait; the prefill worker is busy for 5 s."""
    for due, where in ((inf, "p"), (2.0, "d"), (0.5, "p")):
        found = router(p=Role.PREFILL, d=Role.DECODE)
        found.update("p", Role.PREFILL, replace(FAST, queued_tokens=5000))
        found.update("d", Role.DECODE, replace(FAST, streams=8, max_streams=16))
        route = found.choose(Ask(1000, names(1, 62), due))
        assert route is not None and route.prefill == where


class Both:
    """A router, and the one by its definition, told the same."""

    def __init__(self, *links: Link | None):
        self.real, self.plain = Router(BYTES, *links), PlainRouter(BYTES, *links)  # type: ignore[arg-type]

    def tell(self, order: str, *facts: object) -> None:
        for one in (self.real, self.plain):
            getattr(one, order)(*facts)

    def choose(self, ask: Ask, apart: bool, but: str | None) -> None:
        """The same route, or one that costs the same."""
        want = self.plain.choose(ask, apart, [name for name in self.plain.workers if name != but])
        found = self.real.choose(ask, apart, but)
        assert (found is None) == (want is None)
        if found is None or want is None:
            return
        assert found.cost == pytest.approx(want.cost, rel=1e-9, abs=1e-12)
        prompt = self.plain.prompts(ask, {name: one for name, one in self.plain.workers.items() if name != but})
        lacking = len(ask.names) - self.plain.workers[found.decode].cached(ask.names)
        right = self.plain.route(found.prefill, found.decode, prompt[found.prefill], lacking)
        assert found[2:-1] == pytest.approx(right[2:-1]) and found.source == right.source
        self.plain.take(found, ask)


changes = st.tuples(st.integers(0, FEW - 1), st.sampled_from(Role), loads, st.sampled_from([9, 40, 1 << 62]))
lengths = st.integers(0, 70) | st.integers(0, 170)
requests = st.tuples(st.integers(0, 5), lengths, st.booleans(), st.integers(-1, FEW - 1))


@settings(max_examples=150)
@given(
    st.lists(changes | requests | st.integers(0, FEW - 1), max_size=60),
    st.sampled_from([Link(), Link(1e8, 0.01)]),
    st.sampled_from([None, Link(1e9, 0.001), Link(1e8, 0.1)]),
)
def test_its_choices_are_those_of_the_plain_router(orders: list, link: Link, prefix_link: Link | None) -> None:
    """Workers join, report, forget and are lost; prompts share beginnings of any length."""
    both = Both(link, prefix_link)
    for order in orders:
        if isinstance(order, int):
            both.tell("lost", str(order))
        elif isinstance(order[1], Role):
            number, role, load, blocks = order
            both.tell("update", str(number), role, replace(load, blocks=blocks))
        else:
            prompt, blocks, apart, but = order
            shared = 90 if prompt < 2 else 20
            ask = Ask(blocks * BLOCK + 5, [*names(0, min(blocks, shared)), *names(prompt, blocks)[shared:]])
            both.choose(ask, apart, str(but))


def random_load(rng: random.Random, role: Role, full: bool) -> WorkerLoad:
    streams = 0 if role is Role.PREFILL else rng.randrange(24, 40) if full else rng.randrange(24)
    queued, slower = rng.choice((0, rng.randrange(4000))), rng.choice((0.5, 1.0, 2.0))
    return WorkerLoad(queued, streams, 32, 1e-4 * slower, 0.01 * slower * (1 + streams / 32), 5.0, 1 << 16)


@pytest.mark.parametrize(("roles", "full"), [("pdd", False), ("pdd", True), ("b", False), ("b", True)])
def test_of_many_workers_it_chooses_as_if_it_looked_at_all(roles: str, full: bool) -> None:
    """Most choices are the best there is; all together cost 4 % more at most."""
    rng, kinds = random.Random(7), {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    real, plain = Router(1 << 20, Link(10e9, 0.002)), PlainRouter(1 << 20, Link(10e9, 0.002))
    costs = []
    for number in range(400):
        places = range(120) if number == 0 else rng.sample(range(120), 3)
        for place in places:
            role = kinds[roles[place % len(roles)]]
            load = random_load(rng, role, full)
            real.update(str(place), role, load)
            plain.update(str(place), role, load)
        tokens, group = int(rng.choice((20, 200, 1000, 6000)) * rng.uniform(0.5, 2)), rng.randrange(40)
        talk = [b"%d" % group, b"%d %d" % (group, number // 3)]
        turn = [talk[block >= 30] + b" %d" % block for block in range(tokens // BLOCK)]
        want, found = plain.choose(Ask(tokens, turn)), real.choose(Ask(tokens, turn))
        assert want is not None and found is not None
        plain.take(found, Ask(tokens, turn))
        costs.append((found.cost, want.cost))
    ratios = [cost / least for cost, least in costs]
    assert min(ratios) > 1 - 1e-9 and statistics.median(ratios) < 1.01
    assert sum(cost for cost, _ in costs) < 1.04 * sum(least for _, least in costs)


def test_a_worker_among_many_changes_its_role_pauses_and_is_lost() -> None:
    found = router(**{f"d{number}": Role.DECODE for number in range(30)})
    found.update("p", Role.PREFILL, FAST)

    def helpers() -> set[str]:
        for name in found.workers:
            found.update(name, found.workers[name].role, replace(FAST, streams=4) if name != "p" else FAST)
        return {route.prefill for route in (found.choose(Ask(1600, names(9, 100))),) if route}

    assert helpers() == {"p"}
    found.update("p", Role.DECODE, FAST)
    found.update("d7", Role.PREFILL, FAST)
    assert found.choose(Ask(1600, names(8, 100)), apart=True).prefill == "d7"  # type: ignore[union-attr]
    found.pause("d7")
    assert found.choose(Ask(1600, names(7, 100)), apart=True).prefill != "d7"  # type: ignore[union-attr]
    for name in list(found.workers):
        found.lost(name)
    assert found.choose(Ask(1600, names(7, 100))) is None


def test_a_worker_that_pauses_is_not_asked_and_keeps_its_blocks() -> None:
    found = router(a=Role.BOTH, b=Role.BOTH)
    found.stored("a", names(1, 10))
    found.pause("a")
    assert found.choose(Ask(170, names(1, 10))).decode == "b"  # type: ignore[union-attr]
    found.update("b", Role.BOTH, WorkerLoad(queued_tokens=5000, max_streams=8, token_seconds=0.001))
    found.update("a", Role.BOTH, FAST)
    route = found.choose(Ask(170, names(1, 10)))
    assert route is not None and (route.prefill, route.cached) == ("a", 10)


def test_long_prompts_are_known_to_a_multiple_of_blocks_and_at_their_ends() -> None:
    """The next turn of a conversation finds all of the one before. Few names are kept, and they count as all blocks."""
    found = router(a=Role.BOTH)
    talk, other = names(1, 250), names(2, 250)
    found.stored("a", talk[:205])
    assert found.cached("a", talk) == 205
    assert [found.cached("a", [*talk[:same], *other[same:]]) for same in (40, 64, 80, 95, 96, 200)] == (
        [40, 64, 65, 81, 81, 193]
    )
    known = found.standing("a")
    assert known.names == 64 + 9 + 1 and known.blocks == 64 + 9 * 16 + 12
    found.update("a", Role.BOTH, replace(FAST, blocks=300))
    found.stored("a", other)
    assert found.cached("a", other) == 250 and 0 < found.cached("a", talk) < 205 and found.standing("a").blocks <= 338


def test_a_beginning_is_fetched_where_that_is_sooner_than_to_compute_it() -> None:
    """800 tokens take 0.8 s to compute. The worker that has them is busy with prompts, or only writes answers."""
    busy = WorkerLoad(queued_tokens=3000, max_streams=8, token_seconds=0.001, step_seconds=0.01)
    for seconds, role, fetched in ((0.01, Role.PREFILL, 50), (0.01, Role.DECODE, 50), (0.5, Role.PREFILL, 0)):
        found = Router(BYTES, Link(1e9, 0.001), Link(1e9, seconds))
        found.update("p", Role.PREFILL, FAST)
        found.update("d", Role.DECODE, FAST)
        found.update("q", role, busy)
        found.stored("q", names(1, 50))
        route = found.choose(Ask(820, names(1, 51)), apart=True)
        assert route is not None and (route.prefill, route.cached, route.fetched) == ("p", 0, fetched)
        assert route.source == ("q" if fetched else "") and found.cached("p", names(1, 51)) == 51
        # The holder ends its step of 512 tokens, then the blocks come, and 20 tokens are computed.
        assert route.ttft == pytest.approx(0.512 + 0.01 + 50 * BYTES / 1e9 + 0.02 if fetched else 0.82)
        assert found.standing("p").sent_tokens == (20 if fetched else 820)


def test_many_workers_and_requests() -> None:
    """Loads stay even over 32 workers, and prompts with the same beginning meet."""
    rng = random.Random(1)
    found = Router(BYTES, Link(25e9, 0.002))
    for number in range(32):
        found.update(str(number), Role.BOTH, WorkerLoad(max_streams=10**6, token_seconds=1e-4, step_seconds=0.01))
    hits = 0
    for _ in range(2000):
        group = rng.randrange(20)
        route = found.choose(Ask(700, [*names(group, 30), *names(rng.randrange(100, 250), 12)]))
        assert route is not None
        hits += route.cached >= 30
    sent = [found.standing(name).sent_streams for name in found.workers]
    assert sum(sent) == 2000 and max(sent) < 3 * min(sent) and hits > 1000
