"""The answer cache as a lever: requests whose whole prompt came before are not computed."""

from __future__ import annotations

import statistics

from tests.cost.cases import on_box
from twostroke.cost.answers.diagnose import with_known
from twostroke.cost.answers.levers import LEVERS, Scenario
from twostroke.cost.answers.tune import tune
from twostroke.cost.answers.wording import known_line
from twostroke.cost.simulation.trace import Arrival, PromptPart
from twostroke.record import replace

LEVER = next(lever for lever in LEVERS if lever.name == "answer-cache")


def asked(*prompts: int) -> list[Arrival]:
    return [
        Arrival(float(at), (PromptPart(0, 64), PromptPart(content, 32)), 20, determined=True)
        for at, content in enumerate(prompts)
    ]


def test_repeated_prompts_are_left_out() -> None:
    after = LEVER.pull(Scenario(on_box(), asked(1, 2, 1, 1, 3)))
    assert isinstance(after, Scenario)
    assert [one.at for one in after.arrivals] == [0.0, 1.0, 4.0]


def test_only_determined_answers_are_used_again() -> None:
    rows = asked(1, 1, 1, 2)
    after = LEVER.pull(Scenario(on_box(), [replace(row, determined=at > 0) for at, row in enumerate(rows)]))
    assert isinstance(after, Scenario) and [one.at for one in after.arrivals] == [0.0, 1.0, 3.0]
    unknown = LEVER.pull(Scenario(on_box(), [replace(row, determined=False) for row in rows]))
    assert isinstance(unknown, str) and "temperature 0" in unknown


def test_it_says_when_it_does_not_help() -> None:
    after = LEVER.pull(Scenario(on_box(), asked(*range(50))))
    assert isinstance(after, str) and "0.0%" in after


def test_the_others_wait_less() -> None:
    busy = [Arrival(0.01 * at, (PromptPart(at % 4, 600),), 40, determined=True) for at in range(60)]
    case = Scenario(on_box(prefix_cache=False), busy)
    after = LEVER.pull(case)
    assert isinstance(after, Scenario)
    before, then = (one.deployment.run(one.arrivals).summary for one in (case, after))
    assert then.ttft.p95 < 0.5 * before.ttft.p95


def test_the_pace_is_that_of_the_requests_that_remain() -> None:
    """An answer that was written before is guessed from the earlier one: here its tokens came in half the time."""
    rows = asked(*(at % 5 + 5 * (at // 20) for at in range(40)))
    plain = on_box()
    first = {0, 1, 2, 3, 4, 20, 21, 22, 23, 24}
    served = plain.run(rows).served
    for place, one in enumerate(served):
        if place not in first:
            one.end = one.first + (one.end - one.first) / 2
    recorded = tune(plain, rows, served)
    after = LEVER.pull(Scenario(recorded, rows, served=served))
    assert isinstance(after, Scenario) and len(after.arrivals) == len(first)
    measured, predicted = (
        statistics.median(one.tpot or 0.0 for one in found)
        for found in ([served[place] for place in first], after.deployment.run(after.arrivals).served)
    )
    assert 0.97 < predicted / measured < 1.03
    without = statistics.median(one.tpot or 0.0 for one in recorded.run(after.arrivals).served)
    assert without / measured < 0.6


def test_questions_that_ask_the_same() -> None:
    semantic = next(lever for lever in LEVERS if lever.name == "semantic-cache")
    rows = [replace(row, topic=topic) for row, topic in zip(asked(1, 2, 3, 4), (7, None, 7, None), strict=True)]
    after = semantic.pull(Scenario(on_box(), rows))
    assert isinstance(after, Scenario) and [one.at for one in after.known] == [2.0] and len(after.arrivals) == 3
    outcome = with_known(after.deployment.run(after.arrivals), after)
    assert outcome.summary.requests == 4 and min(one.ttft for one in outcome.served) < 0.02
    unknown = semantic.pull(Scenario(on_box(), asked(1, 1)))
    assert isinstance(unknown, str) and "--record-questions" in unknown


def test_a_hit_saves_the_tokens_of_the_stored_answer() -> None:
    """Another wording is answered with the first one's answer, whatever the length of its own."""
    semantic = next(lever for lever in LEVERS if lever.name == "semantic-cache")
    rows = [
        replace(row, topic=topic, output=output)
        for row, topic, output in zip(asked(1, 2, 3, 4), (7, 8, 7, 7), (10, 5, 40, 30), strict=True)
    ]
    after = semantic.pull(Scenario(on_box(), rows))
    assert isinstance(after, Scenario) and after.saved == 2 * 10
    assert known_line("semantic-cache", after) == "semantic-cache: 2 of 4 requests (50%) would have hit, with 20 tokens"
    outcome = with_known(after.deployment.run(after.arrivals), after)
    assert sum(one.output for one in outcome.served) == 10 + 5 + 40 + 30  # throughput and cost compare the same work
