"""Speculative decoding in the cost model: expected tokens, the best length, and the lever that rests on both."""

from __future__ import annotations

import pytest

from tests.cost.cases import on_gpu
from twostroke.cost.answers.levers import LEVERS, Scenario
from twostroke.cost.model.drafts import (
    DraftingRoofline,
    DraftQuality,
    DraftSource,
    best_length,
    expected_tokens,
    right_for,
)
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.simulation.deployment import drafts_of
from twostroke.cost.simulation.trace import Arrival, Contents
from twostroke.draft.replay import LookupCounts
from twostroke.record import replace
from twostroke.types import MOST_DRAFTED

LOOKUP = next(lever for lever in LEVERS if lever.name == "prompt-lookup")


def always(right, **more):
    return DraftQuality((DraftSource(1.0, right),), **more)


def test_expected_tokens_are_the_sum_of_powers():
    assert expected_tokens(0.8, 4) == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3 + 0.8**4)
    assert expected_tokens(1.0, 4) == 5 and expected_tokens(0.0, 4) == 1


def test_drafts_that_are_right_to_the_end_or_wrong_at_once_bring_what_they_brought():
    assert expected_tokens(right_for(4.0, 8), 8) == pytest.approx(5.0, rel=1e-3)
    assert right_for(4.0, 8) < 36 / 40.5, "the share of right tokens where half of the drafts are right"
    assert right_for(0.0, 8) == pytest.approx(0.0, abs=1e-4) and right_for(8.0, 8) > 0.999


def test_the_length_grows_with_acceptance_and_shrinks_with_streams():
    line = on_gpu().roofline()
    lengths = [best_length(line, always(right), 1, 500).length for right in (0.0, 0.3, 0.6, 0.9)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] > 4
    many = [best_length(line, always(0.6), streams, 500) for streams in (1, 64, 256)]
    assert many[0].length >= many[1].length >= many[2].length
    for one, streams in zip(many, (1, 64, 256), strict=True):
        assert one.tpot <= line.decode_seconds(streams, 500), "never slower"


def test_a_draft_model_costs_its_own_steps():
    line = on_gpu().roofline()
    helper = replace(on_gpu(), arch=known_arch("llama-3.2-1b")).roofline()
    free, paid = best_length(line, always(0.8), 1, 500), best_length(line, always(0.8, draft=helper), 1, 500)
    assert free.tpot < paid.tpot < line.decode_seconds(1, 500) and paid.length < free.length <= MOST_DRAFTED


def test_a_simulated_stream_is_as_fast_as_the_best_length():
    plain = on_gpu().roofline()
    line = DraftingRoofline(plain, always(0.8))
    assert line.decode_seconds(1, 512) == pytest.approx(best_length(plain, always(0.8), 1, 512).tpot, rel=0.01)
    assert line.decode_run([512], 3)[0] == pytest.approx(line.decode_seconds(1, 512), rel=0.02)
    assert line.prefill_seconds(512) == plain.prefill_seconds(512)
    assert DraftingRoofline(plain, always(0.8, streams=2)).decode_seconds(3, 512) == plain.decode_seconds(3, 512)


def scenario(counts):
    rows = [Arrival(60.0 * n, (Contents(1000 * n).own(200),), 100) for n in range(1, 5)]
    deployment = replace(on_gpu(), lookup=drafts_of(counts, "cuda"))
    return Scenario(replace(deployment, config=replace(deployment.config, speculate="off")), rows)


def test_lookup_is_a_lever_where_answers_repeat_text_and_says_so_where_not():
    repeats = LookupCounts(100, (0, 0, 0, 90), (0, 0, 0, 700), (0, 0, 0, 670))
    case = scenario(repeats)
    after = LOOKUP.pull(case)
    assert isinstance(after, Scenario) and after.deployment.config.speculate == "auto"
    assert LOOKUP.setting(after.deployment) == {"speculate": "auto"}, "a draft model stays in use"
    before, then = (one.deployment.run(one.arrivals).summary.tpot.p50 for one in (case, after))
    assert then < 0.5 * before
    chat = LookupCounts(1000, (60, 10, 0, 0), (70, 14, 0, 0), (12, 4, 0, 0))
    assert "too few" in LOOKUP.pull(scenario(chat))
    assert "not known" in LOOKUP.pull(scenario(LookupCounts()))
    assert "already" in LOOKUP.pull(after)
