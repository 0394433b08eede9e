"""How many guesses are verified, from what past steps taught."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.draft.by_model import CAUGHT_UP, READY, TRIAL_EVERY, ModelDrafts
from twostroke.draft.rates import FORCED, JUDGED, MODEL, PAUSE, Acceptance, RealisedGain, StepTimes, kind_of
from twostroke.draft.speculate import REST, TRY_EVERY, UNREADY, WITHOUT_EVERY, Speculation, make_drafter, never_forced
from twostroke.sampling import Grammar, SamplingParams
from twostroke.types import MOST_DRAFTED, UNWRITTEN, Plan, Request, RequestState, Result, Work, WorkKind


def speculation(rate: float, cost: float, streams: int, many: bool = False) -> Speculation:
    """Guesses are right with probability `rate`; each row costs `cost` of a step with one. many: more than two streams
    may guess."""
    found = Speculation(text_streams=max(2, streams) if many else 2, most_streams=max(2, streams) if many else 2)
    for _ in range(200):
        found.acceptance.add(3, 1, int(rate >= 1) or 0)
    found.acceptance.right[3] = rate * found.acceptance.tried[3]
    for rows in range(1, streams * (MOST_DRAFTED + 1) + 1):
        found.times.add(rows, 0.01 * (1 + cost * (rows - 1)))
    found.begin(others(streams))
    return found


def others(count: int) -> list[RequestState]:
    """Streams that repeat nothing."""
    return [RequestState(Request(100 + n, tuple(range(50)), SamplingParams(), limit=1000)) for n in range(count)]


def guesses(found: Speculation, request: RequestState, most: int) -> list[int]:
    """Of a request, beside as many others as there were before."""
    found.begin([request, *others(found.streams - 1)])
    return list(found.propose(request, most))


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
    assert least <= len(guesses(speculation(rate, cost, streams, many=True), repeating(), 100)) <= most


def test_nothing_before_a_step_was_measured_and_nothing_without_a_match() -> None:
    fresh = Speculation()
    fresh.streams = 1
    assert not guesses(fresh, repeating(), 10)
    assert not guesses(speculation(0.95, 0.02, 1), others(1)[0], 10)


def test_a_plan_waits_for_a_result_where_guesses_would_pay() -> None:
    """Also for a request that has not been asked before: on a GPU the next plan is made while a step runs."""
    for rate, cost, request, waits in (
        (0.95, 0.02, repeating(), True),
        (0.2, 0.3, repeating(), False),
        (0.95, 0.02, others(1)[0], False),
    ):
        found = speculation(rate, cost, 1)
        assert found.begin([request]) is found.waits() is waits
    assert by_model(0.9, 0.02, 0.1, 1).waits() and not by_model(0.1, 0.02, 0.1, 1).waits()


def test_streams_pay_together_for_what_guesses_cost_once_a_step() -> None:
    """A step with any guesses takes a third longer than one without. Poor guesses of one stream do not pay for that;
    those of four streams together do."""
    found = Speculation(text_streams=4, most_streams=4)
    found.acceptance.right[3] = 0.9 * 1000
    found.acceptance.tried[3] = 1000
    for rows in range(4, 80):
        found.times.add(rows, 0.01 * ((1 if rows == 4 else 1.33) + 0.01 * (rows - 4)))
    alike = [RequestState(Request(n, repeating().tokens, SamplingParams(), limit=10_000)) for n in range(4)]
    assert found.begin(alike) and found.waits()
    assert all(len(found.propose(request, 100)) > 4 for request in alike)
    assert found.begin([alike[0], *others(3)]) and len(found.propose(alike[0], 100)) > 4
    found.acceptance.right[3] = 0.5 * 1000
    found.of.clear()
    assert not found.begin([alike[0], *others(3)]) and not found.propose(alike[0], 100) and not found.waits()
    assert [found.begin(alike) for _ in range(REST)] == [False] * (REST - 1) + [True]
    assert all(found.propose(request, 100) for request in alike)


def test_rows_of_one_plan_add_up() -> None:
    found = speculation(0.95, 0.02, 2)
    first = len(guesses(found, repeating(), 100))
    assert found.rows == 2 + first and found.tokens > 2


def test_nothing_is_guessed_for_many_streams() -> None:
    assert speculation(0.95, 0.0, 2).begin([repeating(), *others(1)])
    assert not speculation(0.95, 0.0, 3).begin([repeating(), *others(2)])


def test_a_plan_asks_for_guesses_where_a_grammar_may_force_them() -> None:
    """Also where nothing is found in the texts."""
    found, (plain,) = speculation(0.95, 0.02, 1), others(1)
    forced = RequestState(Request(9, plain.tokens, SamplingParams(grammar=Grammar("regex", "ab")), limit=1000))
    assert not found.begin([plain]) and found.begin([forced]) and not found.waits()


def test_the_source_that_promises_more_is_taken() -> None:
    """Poor guesses from a match, good ones from the grammar, and the other way round."""
    request = repeating()
    grammar = SamplingParams(grammar=Grammar("json_object"))
    request = RequestState(Request(1, request.tokens, grammar, limit=10_000))
    found = speculation(0.1, 0.02, 1)
    found.forced = lambda request: [7, 8, 9]
    assert guesses(found, request, 10) == [7, 8, 9]
    found = speculation(0.95, 0.02, 1)
    found.forced = lambda request: [7, 8, 9]
    for _ in range(50):
        found.acceptance.add(FORCED, 3, 0)
    assert guesses(found, request, 10) == list(range(10, 20))


def test_one_step_in_a_while_goes_without() -> None:
    found = speculation(0.95, 0.02, 1)
    lengths = []
    for _ in range(2 * WITHOUT_EVERY):
        lengths.append(len(guesses(found, repeating(), 4)))
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
    slow = StepTimes()
    for rows in (1, 2, 4, 8):
        for _ in range(9):
            slow.add(rows, 0.001 * rows)
    slow.add(3, 0.1)  # measured once, while the machine was busy
    assert (slow.predict(8) or 0.0) < 0.012


def by_model(rate: float, cost: float, share: float, streams: int) -> Speculation:
    """Drafts of a model whose pass takes `share` of a step."""
    found = speculation(0.1, cost, streams)
    found.most_streams, found.model = 64, ModelDrafts(share)
    for _ in range(200):
        found.acceptance.add(MODEL, 1, 0)
    found.acceptance.right[MODEL] = rate * found.acceptance.tried[MODEL]
    for rows in range(1, 33):
        found.model.times.add(rows, 0.01 * share * (1 + 0.01 * rows))
    found.begin(others(streams))
    return found


def unmatched(number: int = 9, read: bool = True) -> RequestState:
    request = RequestState(Request(number, tuple(range(80)), SamplingParams(), limit=10_000))
    request.computed, request.drafted = 79, 79 if read else 0
    return request


@pytest.mark.parametrize(
    ("rate", "cost", "share", "streams", "least", "most"),
    [
        (0.8, 0.02, 0.1, 1, 3, 8),  # a good and small model: some
        (0.95, 0.02, 0.05, 1, 8, 16),
        (0.8, 0.02, 0.5, 1, 0, 2),  # a pass takes half a step: hardly
        (0.3, 0.02, 0.2, 1, 0, 0),  # poor guesses
        (0.8, 0.02, 0.1, 16, 1, 5),  # sixteen streams share the passes
        (0.8, 0.9, 0.1, 16, 0, 0),  # rows cost as much as streams
    ],
)
def test_a_draft_model_writes_as_many_as_pay(rate, cost, share, streams, least, most) -> None:  # type: ignore[no-untyped-def]
    found = by_model(rate, cost, share, streams)
    for number in range(streams):
        draft = found.propose(unmatched(number), 100)
        assert least <= len(draft) <= most and set(draft) <= {UNWRITTEN}


def test_one_prediction_is_as_one_of_many() -> None:
    times = StepTimes()
    for rows, seconds in ((3, 0.5), (9, 0.2), (17, 0.4), (17, 0.6), (4, 0.3)):
        times.add(rows, seconds)
    many = times.predict_all(np.arange(1, 40), (0, 0.9))
    assert many is not None
    assert [times.predict(rows) for rows in range(1, 40)] == pytest.approx(list(many))


def test_no_step_is_predicted_longer_than_a_stream_may_pause() -> None:
    for found, request in ((speculation(0.95, 0.1, 1), repeating()), (by_model(0.95, 0.1, 0.1, 1), unmatched())):
        free = len(guesses(found, request, 100))
        found.longest = lambda: 0.0135
        assert free > 4 > len(guesses(found, request, 100)) > 0


def test_a_long_first_pass_says_little_about_short_ones() -> None:
    """A prompt was read, and nothing was drafted yet."""
    model = ModelDrafts(0.2)
    assert model.pass_seconds(1, 0.1) == pytest.approx(0.02)
    model.times.add(60, 0.08)
    assert model.pass_seconds(1, 0.1) == pytest.approx(0.02) and model.pass_seconds(60, 0.1) == 0.08
    model.times.add(1, 0.03)
    assert model.pass_seconds(1, 0.1) == 0.03


def test_the_better_of_text_and_model_is_taken() -> None:
    request = repeating()
    request.computed = request.drafted = len(request.tokens) - 1
    assert set(guesses(by_model(0.9, 0.02, 0.1, 1), request, 10)) == {UNWRITTEN}  # matches were seldom right
    found = by_model(0.9, 0.02, 0.3, 1)
    found.acceptance.right[3] = 0.95 * found.acceptance.tried[3]
    assert guesses(found, request, 10) == list(range(10, 20))


def test_what_the_draft_model_missed_is_read_when_that_pays() -> None:
    found = by_model(0.9, 0.02, 0.1, 1)
    missed = unmatched(read=False)
    assert not found.propose(missed, 10)
    steps = next(n for n in range(1000) if found.catches_up(missed))
    assert steps < 20  # seconds saved in so many steps exceed those of a pass over 80 tokens
    missed.drafted = len(missed.tokens) - READY
    assert found.propose(missed, 10), "it may write now"
    assert found.catches_up(missed), "if it does not, it reads on: what is left would make the next draft longer"
    missed.drafted = len(missed.tokens) - CAUGHT_UP
    assert not found.catches_up(missed)
    missed.drafted = len(missed.tokens) - READY
    assert not found.catches_up(missed), "it begins again only when it has missed more"
    poor = by_model(0.1, 0.02, 0.1, 1)
    assert not any(poor.catches_up(missed) for _ in range(100))


def test_prompts_are_read_where_drafts_pay_and_else_once_in_a_while() -> None:
    good, poor = by_model(0.9, 0.02, 0.1, 1), by_model(0.1, 0.02, 0.1, 1)
    assert all(good.reads(unmatched(number, read=False)) for number in range(10))
    read = [poor.reads(unmatched(number, read=False)) for number in range(2 * TRIAL_EVERY)]
    assert read.count(True) == 2
    tried = unmatched(read.index(True))
    assert len(poor.propose(tried, 10)) > 0 and not poor.propose(unmatched(read.index(False)), 10)


def test_steps_that_were_slower_than_without_drafts_end_in_a_pause() -> None:
    found = speculation(0.95, 0.02, 1)
    assert guesses(found, repeating(), 4)
    slower = found._realised(1)
    for _ in range(JUDGED):
        slower.add(0.02, 0.021)
    assert [found.begin([repeating()]) for _ in range(PAUSE)] == [False] * (PAUSE - 1) + [True]
    for _ in range(JUDGED):
        slower.add(0.02, 0.021)
    assert [found.begin([repeating()]) for _ in range(2 * PAUSE)].count(True) == 1  # the next pause is twice as long
    judged = RealisedGain()
    for _ in range(100):
        judged.add(0.02, 0.019)
        assert judged.allows()


def test_beside_other_streams_guesses_must_have_gained_more() -> None:
    found = speculation(0.95, 0.02, 2)
    for streams, allowed in ((1, True), (2, False)):
        judged = found._realised(streams)
        for _ in range(JUDGED):
            judged.add(0.0205, 0.02)
        assert judged.allows() is allowed


def test_reading_a_long_text_costs_what_its_rows_cost() -> None:
    times = StepTimes()
    times.add(1, 0.02)
    assert times.predict_more(100) == times.predict(100), "one number of rows says nothing about the others"
    times.add(16, 0.08)  # a processor: 4 ms a row
    assert times.predict_more(8) == times.predict(8)
    assert times.predict_more(116) == pytest.approx(0.48) and (times.predict(116) or 0.0) < 0.1
    free = StepTimes()  # a GPU: rows are free
    free.add(1, 0.002)
    free.add(32, 0.002)
    assert free.predict_more(320) == free.predict(320)


def test_each_length_of_context_has_times_of_its_own() -> None:
    times = StepTimes()
    times.at(100)
    for _ in range(5):
        times.add(1, 0.01)
    times.at(8000)
    assert times.predict(1) == 0.01  # as long as nothing else is known
    for _ in range(5):
        times.add(1, 0.02)
    assert times.predict(1) == 0.02 and times.at(120).predict(1) == 0.01
    times.add(1, 5.0)
    assert times.predict(1) == 0.01  # one slow step decides nothing


def test_the_setting() -> None:
    assert make_drafter("off", "cpu", never_forced) is None and make_drafter("draft", "cuda", never_forced) is None
    assert make_drafter("off", "cpu", never_forced, 0.3) is None
    text, model, both = (make_drafter(name, "cpu", never_forced, 0.3) for name in ("lookup", "draft", "auto"))
    assert text is not None and text.text_streams == 2 and text.model is None
    assert model is not None and not model.text_streams and model.model is not None
    assert both is not None and both.text_streams and both.model is not None
    card = make_drafter("auto", "cuda", never_forced, 0.3)
    assert card is not None and (card.text_streams, card.most_streams) == (32, 32)
    alone = make_drafter("auto", "cuda", never_forced)
    assert alone is not None and (alone.text_streams, alone.most_streams) == (32, 32)
    assert make_drafter("auto", "cpu", never_forced) is not None
    assert make_drafter("lookup", "cuda", never_forced) is not None


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize(
    ("rate", "cost", "expected", "guesses"),
    [(0.0, 0.05, 12, 3), (0.15, 0.1, 11, 2), (0.0, 0.1, 11, 2), (0.2, 0.3, 8, 1), (0.0, 0.6, 4, 1)],
)
def test_a_try_stays_due_until_a_plan_makes_it(
    rate: float, cost: float, expected: int, guesses: int, again: bool
) -> None:
    """On a GPU the plan in which it falls due waits for the step in flight, and is made again. Where a step with
    guesses takes much longer, tries are rarer, and have fewer guesses."""
    found = speculation(rate, cost, 1)
    request, tries = repeating(), 0
    for _ in range(12 * TRY_EVERY):
        if found.begin([request]):
            assert found.waits() and (not again or (found.begin([request]) and found.waits()))
            tries += len(found.propose(request, 100)) == guesses
    assert abs(tries - expected) <= expected // 4


def verified(request: RequestState, drafted: int, kept: int) -> tuple[Plan, Result]:
    work = Work(request, 10, 1 + drafted, WorkKind.VERIFY, (5,) * drafted)
    return Plan(0, (work,)), Result(((5,) * (kept + 1),))


def test_steps_with_guesses_are_learnt_with_the_time_of_the_host() -> None:
    found, request = Speculation(), repeating()
    found.begin([request])
    found.learn(Plan(0, (Work(request, 10, 1, WorkKind.WRITE),)), Result(((5,),)), 0.004, 0.009)
    assert found.times.predict(1) == 0.004 and found.verified.predict(5) is None
    plan, result = verified(request, 4, 2)
    found.learn(plan, result._replace(settled=False), 0.005, 0.05)
    assert found.verified.predict(5) is None, "such a step will be faster"
    for found.on_try in (False, True):
        found.learn(plan.undrafted(), Result(((5,),), settled=False, verified=False), 0.004, 0.004)
        assert [found.begin([request]) for _ in range(UNREADY)] == [False] * UNREADY and not found.unready
        assert found.trying is found.on_try, "a try that was left out stays due"
    found.learn(plan, result, 0.005, 0.006)
    assert found.verified.predict(5) == 0.006 and found.times.predict(1) == 0.004
    found.begin([request])
    predicted = found._seconds_of(np.arange(2, 6), 1, 0.004)  # on the line from one row without guesses to five with
    assert list(predicted) == pytest.approx([0.0045, 0.005, 0.0055, 0.006])
