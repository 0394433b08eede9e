"""Prompt lookup replayed over answers: only counts, and those that the drafter itself would have."""

from __future__ import annotations

import random

from twostroke.draft.replay import GUESSED, LookupCounts, agreeing, replay, total


def test_an_answer_that_repeats_its_prompt_is_guessed():
    rng = random.Random(0)
    prompt = [rng.randrange(1000) for _ in range(200)]
    counts = replay(prompt, prompt[:100])
    assert sum(counts.right) > 80 and counts.steps < 25, "a few steps find the place, the others write several tokens"
    assert sum(counts.tried) <= sum(counts.right) + counts.steps
    assert 0 <= counts.steps + sum(counts.right) - 99 <= 1, "a step writes a token, and each right guess one more"


def test_an_answer_that_repeats_nothing_has_no_guesses():
    counts = replay(range(100), range(1000, 1080))
    assert counts == LookupCounts(79) and replay([1, 2, 3], [4]) == LookupCounts()


def test_counts_add_up():
    one, other = LookupCounts(3, (1, 0, 0, 0), (2, 0, 0, 0), (1, 0, 0, 0)), LookupCounts(5, (0, 0, 0, 4))
    assert total([one, other]) == LookupCounts(8, (1, 0, 0, 4), (2, 0, 0, 0), (1, 0, 0, 0))
    assert total([]) == LookupCounts()
    assert agreeing([1, 2, 3], [1, 2, 4]) == 2 and agreeing([1, 2], [1, 2]) == 2 and GUESSED > 1
