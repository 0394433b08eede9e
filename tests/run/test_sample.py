"""The chain from logits to a token: filters, noise, penalties."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.choices import next_choice
from twostroke.run import sample
from twostroke.sampling import SamplingParams
from twostroke.types import Request, RequestState


def request(tokens=(1, 2, 3), written=(), seed=5, index=0, **params) -> RequestState:
    stops = frozenset({0})
    made = RequestState(Request(0, tuple(tokens), SamplingParams(**params), seed, stop_ids=stops, sample=index))
    made.tokens += written
    return made


def row_of(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def first_highest(logits: np.ndarray) -> np.ndarray:
    """As a backend's argmax."""
    return np.where(np.isnan(logits).any(axis=1), -1, logits.argmax(axis=1))


def test_samples_follow_the_distribution():
    """Chi-square of 20,000 draws at different positions against softmax, and no two keys alike."""
    logits = row_of(0.0, 1.0, 2.0, -1.0, 0.5, -3.0)
    want = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    draws = 20_000
    counts = np.zeros(6)
    for position in range(draws):
        key = sample.noise_key(99, 0, position)
        counts[(logits / 0.8 + sample.gumbel(key, np.arange(6))).argmax()] += 1
    chi2 = float(((counts - draws * want) ** 2 / (draws * want)).sum())
    assert chi2 < 20.5  # 0.999 quantile with 5 degrees of freedom
    keys = {sample.noise_key(s, i, p) for s in range(10) for i in range(10) for p in range(100)}
    assert len(keys) == 10_000


def test_noise_of_a_token_does_not_depend_on_the_others():
    key = sample.noise_key(1, 2, 3)
    everything = sample.gumbel(key, np.arange(1000))
    assert np.array_equal(everything[[7, 500]], sample.gumbel(key, np.array([7, 500])))


@pytest.mark.parametrize("seed", range(20))
def test_filters_against_the_plain_definition(seed):
    row = 3 * np.random.default_rng(seed).standard_normal(50, np.float32)
    params = SamplingParams(
        top_k=[0, 5, 200][seed % 3], top_p=[1.0, 0.7, 0.05][seed // 3 % 3], min_p=[0.0, 0.1][seed % 2]
    )
    values, ids = sample.keep_likely(row, params)
    assert np.array_equal(row[ids], values)
    order = sorted(range(50), key=lambda token: -float(row[token]))[: params.top_k or 50]
    weights = [math.exp(float(row[token])) for token in order]
    probabilities = [weight / sum(weights) for weight in weights]
    kept, before = set(), 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if before < params.top_p and probability >= params.min_p * probabilities[0]:
            kept.add(token)
        before += probability
    assert set(ids.tolist()) == kept


def test_penalties_and_bias():
    row = row_of(1.0, 2.0, -2.0, 4.0, 5.0)
    one = request(
        tokens=[1, 2],
        written=[3, 3, 4],
        presence_penalty=0.5,
        frequency_penalty=1.0,
        repetition_penalty=2.0,
        logit_bias={0: 3.0},
    )
    # repetition: 1, 2 (prompt), 3, 4 (answer); presence and frequency: 3 twice, 4 once
    assert sample.adjust(row, next_choice(one)).tolist() == [4.0, 1.0, -4.0, 2.0 - 2.5, 2.5 - 1.5]
    assert row.tolist() == [1.0, 2.0, -2.0, 4.0, 5.0]


def test_no_stop_token_before_the_minimum():
    row = row_of(9.0, 1.0, 2.0)
    assert sample.choose_one(row, next_choice(request(min_tokens=1, temperature=0))) == 2
    assert sample.choose_one(row, next_choice(request(written=[1], min_tokens=1, temperature=0))) == 0


def test_logits_that_are_not_numbers_fail_their_own_row_only():
    logits = np.random.default_rng(0).standard_normal((4, 30), np.float32)
    logits[1, 5] = float("nan")
    logits[2, 5] = float("inf")
    choices = [next_choice(request(temperature=warm)) for warm in (0, 0, 1.0, 1.0)]
    tokens = sample.choose(logits, choices, first_highest)
    assert [token is None for token in tokens] == [False, True, True, False]
    alone = [sample.choose(logits[i : i + 1], [choices[i]], first_highest)[0] for i in range(4)]
    assert tokens == alone


def test_siblings_and_positions_draw_differently():
    row = np.zeros(1000, np.float32)
    drawn = {sample.choose_one(row, next_choice(request(index=i))) for i in range(8)}
    drawn |= {sample.choose_one(row, next_choice(request(written=[1] * p))) for p in range(1, 8)}
    assert len(drawn) > 10


def test_logprobs_are_of_the_models_own_distribution():
    row = row_of(0.0, 1.0, 2.0)
    got = sample.logprobs(row, 0, 2)
    want = row - math.log(sum(math.exp(value) for value in (0.0, 1.0, 2.0)))
    assert got.token_id == 0
    assert got.logprob == pytest.approx(float(want[0]))
    assert [token for token, _ in got.top] == [2, 1]
    assert sample.logprobs(row, 0, 0).top == ()


def test_equal_ones_stay_in_order_of_their_ids():
    """Of tokens that are equally likely the lowest ids are kept, in every filter and in what is told of them."""
    row = row_of(1.0, 3.0, -0.0, 3.0, 1.0, 0.0, 3.0, 1.0)
    assert sample.keep_likely(row, SamplingParams(top_k=2))[1].tolist() == [1, 3]
    assert sample.keep_likely(row, SamplingParams(top_k=5))[1].tolist() == [1, 3, 6, 0, 4]
    assert sample.keep_likely(row, SamplingParams(top_k=7))[1].tolist() == [1, 3, 6, 0, 4, 7, 2]
    assert sample.keep_likely(row, SamplingParams(top_p=0.5))[1].tolist() == [1, 3]
    assert sample.keep_likely(row, SamplingParams(min_p=0.9))[1].tolist() == [1, 3, 6]
    assert [token for token, _ in sample.logprobs(row, 0, 5).top] == [1, 3, 6, 0, 4]
    assert len(sample.logprobs(row, 0, 20).top) == 8


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0, 40.0])
def test_what_is_left_out_before_sorting_is_what_sorting_would_leave_out(spread):
    """top_p over a whole vocabulary against the definition: the rank of every token, and what comes before it."""
    row = (spread * np.random.default_rng(1).standard_normal(3000)).round(2).astype(np.float32)
    order = np.lexsort((np.arange(3000), -row))
    weights = np.exp(row[order].astype(np.float64) - float(row.max()))
    before = np.concatenate(([0.0], np.cumsum(weights / weights.sum())))[:-1]
    for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-7):
        ids = sample.keep_likely(row, SamplingParams(top_p=top_p))[1]
        assert ids.tolist() == order[before < max(top_p - sample.SLACK, sample.SLACK)].tolist()


def test_a_token_that_cannot_be_chosen_has_a_score_that_json_can_write():
    got = sample.logprobs(row_of(1.0, -np.inf, 0.0), 1, 3)
    assert got.logprob == sample.LEAST and got.top[-1] == (1, sample.LEAST)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_prompt_whose_scores_are_not_numbers_is_an_error(bad: float):
    scores = {1: sample.logprobs(row_of(1.0, 2.0), 0, 1), 2: sample.logprobs(row_of(bad, 2.0), 1, 1)}
    assert sample.prompt_details(scores).error == sample.NOT_FINITE
    del scores[2]
    assert sample.prompt_details(scores).error is None
