"""Nothing is shared without evidence, and the share of wrong answers stays below the bound."""

from __future__ import annotations

import random

import pytest

from twostroke.answers.bound import ErrorBound, upper_limit


def test_without_evidence_nothing_is_shared() -> None:
    bound = ErrorBound(0.01)
    assert not bound.allows("x", 1.0)
    assert bound.estimate().threshold is None and bound.estimate().upper == 1.0
    for _ in range(200):
        bound.learn("x", 0.99, True)
    assert not bound.allows("x", 0.99)  # 200 right ones do not show that fewer than 1 % are wrong
    for _ in range(600):
        bound.learn("x", 0.99, True)
    assert bound.allows("x", 0.99) and not bound.allows("x", 0.85)


def test_the_interval_is_the_exact_binomial_one() -> None:
    assert upper_limit(0, 299, 0.05) == pytest.approx(0.00997, abs=1e-4)  # the rule of three
    assert upper_limit(5, 100, 0.05) == pytest.approx(0.1023, abs=1e-3)
    assert upper_limit(0, 0, 0.05) == 1.0 and upper_limit(4, 4, 0.05) == 1.0


def test_an_answer_that_was_wrong_raises_the_threshold_of_its_entry() -> None:
    bound = ErrorBound(0.05)
    for _ in range(2000):
        bound.learn("other", 0.97, True)
    assert bound.allows("x", 0.97) and bound.allows("y", 0.97)
    bound.learn("x", 0.97, False)
    assert not bound.allows("x", 0.97) and bound.allows("y", 0.97)
    assert bound.allows("x", 0.98)


@pytest.mark.parametrize("most", [0.01, 0.05])
def test_the_share_of_wrong_answers_stays_below_the_bound(most: float) -> None:
    """A pair is wrong the more often the less similar it is; only what the bound allows is served."""
    served = wrong = 0
    for seed in range(3):
        chance, bound = random.Random(seed), ErrorBound(most)
        for number in range(4000):
            similarity = chance.uniform(0.75, 1.0)
            right = chance.random() < min(1.0, 0.5 + 2.2 * (similarity - 0.75))
            if bound.allows(str(number), similarity):
                served += 1
                wrong += not right
                if chance.random() > 0.05:
                    continue  # no shadow check
            bound.learn(str(number), similarity, right)
    assert wrong <= most * max(served, 1), (wrong, served)
    assert most == 0.01 or served > 100


def test_evidence_survives() -> None:
    bound, other = ErrorBound(0.05), ErrorBound(0.05)
    for _ in range(500):
        bound.learn("x", 0.97, True)
    other.load(bound.dump())
    assert other.estimate() == bound.estimate() and other.allows("y", 0.97)
