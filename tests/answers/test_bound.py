"""Nothing is shared without evidence, and the share of wrong answers stays below the bound."""

from __future__ import annotations

import random

import pytest

from twostroke.answers.bound import ErrorBound, JudgedPair, upper_limit

KIND, OTHER = "small words", "synonyms"


def learn(bound: ErrorBound, count: int, similarity: float, right: bool = True, entry: str = "other") -> None:
    for _ in range(count):
        bound.learn(JudgedPair(entry, KIND, similarity, right))


def test_without_evidence_nothing_is_shared() -> None:
    bound = ErrorBound(0.01)
    assert not bound.allows("x", KIND, 1.0)
    assert bound.estimate().threshold is None and bound.estimate().upper == 1.0
    learn(bound, 200, 0.99)
    assert not bound.allows("x", KIND, 0.99)  # 200 right ones do not show that fewer than 1 % are wrong
    learn(bound, 600, 0.99)
    assert bound.allows("x", KIND, 0.99) and not bound.allows("x", KIND, 0.85)


def test_each_kind_has_evidence_of_its_own() -> None:
    bound = ErrorBound(0.05)
    learn(bound, 500, 0.99)
    assert bound.allows("x", KIND, 0.99) and not bound.allows("x", OTHER, 0.99)
    bound.learn(JudgedPair("x", "a kind of another version", 0.99, False))  # is left out
    assert bound.allows("x", KIND, 0.99)


def test_the_interval_is_the_exact_binomial_one() -> None:
    assert upper_limit(0, 299, 0.05) == pytest.approx(0.00997, abs=1e-4)  # the rule of three
    assert upper_limit(5, 100, 0.05) == pytest.approx(0.1023, abs=1e-3)
    assert upper_limit(0, 0, 0.05) == 1.0 and upper_limit(4, 4, 0.05) == 1.0


def test_an_answer_that_was_wrong_raises_the_threshold_of_its_entry() -> None:
    bound = ErrorBound(0.05)
    learn(bound, 2000, 0.97)
    assert bound.allows("x", KIND, 0.97) and bound.allows("y", KIND, 0.97)
    learn(bound, 1, 0.97, False, "x")
    assert not bound.allows("x", KIND, 0.97) and bound.allows("y", KIND, 0.97)
    assert bound.allows("x", KIND, 0.98)
    learn(bound, 1, 0.9, False, "x")
    assert not bound.allows("x", KIND, 0.97)  # the highest one counts


@pytest.mark.parametrize("most", [0.01, 0.05])
def test_the_share_of_wrong_answers_stays_below_the_bound(most: float) -> None:
    """A pair is wrong the more often the less similar it is; only what the bound allows is served."""
    served = wrong = 0
    for seed in range(3):
        chance, bound = random.Random(seed), ErrorBound(most)
        for number in range(4000):
            similarity = chance.uniform(0.75, 1.0)
            right = chance.random() < min(1.0, 0.5 + 2.2 * (similarity - 0.75))
            if bound.allows(str(number), KIND, similarity):
                served += 1
                wrong += not right
                if chance.random() > 0.05:
                    continue  # no shadow check
            bound.learn(JudgedPair(str(number), KIND, similarity, right))
    assert wrong <= most * max(served, 1), (wrong, served)
    assert most == 0.01 or served > 100
