"""Prompt lookup in a diagnosis: the best lever where answers repeat their prompts, and none where they do not."""

from __future__ import annotations

import random

import pytest

from tests.cost.cases import Labelled, on_box
from tests.cost.fleets import poisson
from twostroke.cost.answers.diagnose import Diagnosis, diagnose
from twostroke.cost.simulation.deployment import Deployment, drafts_of
from twostroke.draft.replay import LookupCounts, replay, total
from twostroke.record import replace


def edits(rng: random.Random) -> LookupCounts:
    """A text that is written again with one token in 25 changed."""
    text = [rng.randrange(5000) for _ in range(500)]
    return replay(text, [rng.randrange(5000) if rng.random() < 0.04 else token for token in text[:130]])


def talk(rng: random.Random) -> LookupCounts:
    """Of few different tokens, so that some come again by chance."""
    return replay([rng.randrange(30) for _ in range(300)], [rng.randrange(30) for _ in range(130)])


def case(answers) -> Labelled:
    rows = poisson(random.Random(1), 24, 0.2, (400, 600), (100, 160))
    return Labelled(with_texts(on_box(speculate="off"), answers, 0), rows, "decode", ("prompt-lookup",), "tpot")


def with_texts(deployment: Deployment, answers, seed: int) -> Deployment:
    rng = random.Random(seed)
    return replace(deployment, lookup=drafts_of(total(answers(rng) for _ in range(24)), "cpu"))


def verdict(made: Labelled) -> Diagnosis:
    """Of what a noisy machine with other rates measured."""
    return diagnose(made.deployment, made.arrivals, made.measure().served)


def test_answers_that_repeat_their_prompts_ask_for_it():
    """Pulled on the machine as it really is, with other texts: TPOT lands where the prediction put it."""
    made = case(edits)
    found = verdict(made)
    assert (found.phase, found.metric) == ("decode", "tpot")
    best = found.best
    assert best is not None and best.lever.name == "prompt-lookup" and best.lever.live
    assert best.lever.because in found.sentence
    before = made.measure().summary.tpot.p50
    after = made.measure(with_texts(best.after.deployment, edits, 9), best.after.arrivals, seed=1).summary.tpot.p50
    assert best.predicted.summary.tpot.p50 == pytest.approx(after, rel=0.2)
    assert after < 0.6 * before


def test_answers_that_repeat_nothing_do_not():
    found = verdict(case(talk))
    assert "prompt-lookup" not in {effect.lever.name for effect in found.effects}
    reasons = {one.lever.name: one.reason for one in found.rejected}
    assert "too few to pay for verifying them" in reasons["prompt-lookup"]
    assert "of the guessed tokens would have been right" in reasons["prompt-lookup"]
