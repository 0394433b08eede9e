"""How many guesses are verified, from what past steps taught."""

from __future__ import annotations

import pytest

from twostroke.draft.rates import FORCED, Acceptance, StepTimes, kind_of
from twostroke.draft.speculate import MOST, WITHOUT_EVERY, Speculation, make_drafter, never_forced
from twostroke.sampling import Grammar, SamplingParams
from twostroke.types import Request, RequestState


def speculation(rate: float, cost: float, streams: int) -> Speculation:
    """Guesses are right with probability `rate`; each row costs `cost` of a step with one."""
    found = Speculation()
    for _ in range(200):
        found.acceptance.add(3, 1, int(rate >= 1) or 0)
    found.acceptance.right[3] = rate * found.acceptance.tried[3]
    for rows in range(1, streams + MOST + 1):
        found.times.add(rows, 0.01 * (1 + cost * (rows - 1)))
    found.begin(streams)
    return found


def repeating(length: int = 60) -> RequestState:
    return RequestState(Request(1, tuple(range(10, 10 + length)) * 2, SamplingParams(), limit=10_000))


@pytest.mark.parametrize(
    ("rate", "cost", "streams", "least", "most"),
    [
        (0.95, 0.02, 1, 12, 16),  # nearly free rows, good guesses: far
        (0.95, 0.3, 1, 2, 8),
        (0.5, 0.3, 1, 0, 2),
        (0.2, 0.3, 1, 0, 0),  # poor guesses: none
        (0.95, 1.0, 1, 0, 0),  # rows that cost a step each: none
        (0.6, 0.9, 16, 0, 0),  # many streams: rows are dear
    ],
)
def test_as_many_as_pay(rate: float, cost: float, streams: int, least: int, most: int) -> None:
    assert least <= len(speculation(rate, cost, streams).propose(repeating(), 100)) <= most


def test_nothing_before_a_step_was_measured_and_nothing_without_a_match() -> None:
    fresh = Speculation()
    fresh.begin(1)
    assert not fresh.propose(repeating(), 10)
    other = RequestState(Request(2, tuple(range(50)), SamplingParams(), limit=1000))
    assert not speculation(0.95, 0.02, 1).propose(other, 10)


def test_rows_of_one_plan_add_up() -> None:
    found = speculation(0.95, 0.02, 2)
    first = len(found.propose(repeating(), 100))
    assert found.rows == 2 + first and found.tokens > 2


def test_nothing_is_guessed_for_many_streams() -> None:
    assert speculation(0.95, 0.0, 2).begin(2)
    assert not speculation(0.95, 0.0, 3).begin(3)


def test_the_source_that_promises_more_is_taken() -> None:
    """Poor guesses from a match, good ones from the grammar, and the other way round."""
    request = repeating()
    grammar = SamplingParams(grammar=Grammar("json_object"))
    request = RequestState(Request(1, request.tokens, grammar, limit=10_000))
    found = speculation(0.1, 0.02, 1)
    found.forced = lambda request: [7, 8, 9]
    assert found.propose(request, 10) == [7, 8, 9]
    found = speculation(0.95, 0.02, 1)
    found.forced = lambda request: [7, 8, 9]
    for _ in range(50):
        found.acceptance.add(FORCED, 3, 0)
    assert found.propose(request, 10) == list(range(10, 20))


def test_one_step_in_a_while_goes_without() -> None:
    found = speculation(0.95, 0.02, 1)
    lengths = []
    for _ in range(2 * WITHOUT_EVERY):
        found.begin(1)
        lengths.append(len(found.propose(repeating(), 4)))
    assert 1 <= lengths.count(0) <= 3


def test_rates_follow_what_is_seen() -> None:
    shared = Acceptance()
    own = Acceptance(shared)
    for _ in range(100):
        own.add(kind_of(9), 4, 0)
    assert own.rate(kind_of(9)) < 0.1 and own.rate(kind_of(20)) == shared.rate(kind_of(20))
    for _ in range(100):
        own.add(kind_of(9), 4, 4)
    assert own.rate(kind_of(9)) > 0.9


def test_predicted_times_never_fall_when_rows_are_added() -> None:
    times = StepTimes()
    assert times.predict(3) is None
    for rows, seconds in ((1, 0.004), (4, 0.006), (8, 0.005), (16, 0.02)):
        times.add(rows, seconds)
    predicted = [times.predict(rows) or 0.0 for rows in range(1, 40)]
    assert predicted == sorted(predicted)


def test_the_setting() -> None:
    assert make_drafter("off", "cpu", never_forced) is None and make_drafter("auto", "cuda", never_forced) is None
    assert make_drafter("auto", "cpu", never_forced) is not None
    assert make_drafter("lookup", "cuda", never_forced) is not None
