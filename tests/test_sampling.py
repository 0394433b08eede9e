from __future__ import annotations

import copy
import dataclasses

import pytest

from twostroke import InputError, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "5"), ("min_tokens", -1),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
        ("top_k", -1), ("top_k", 2.0), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 2), ("seed", 1.5),
        ("seed", 2**64), ("stop", ""), ("stop", [""]), ("stop", [1]), ("stop", 7), ("stop", ["x"] * 65),
        ("stop", "x" * 1025), ("stop_token_ids", "12"), ("stop_token_ids", [1.5]), ("ignore_eos", 1),
        ("presence_penalty", 2.1), ("frequency_penalty", -3), ("repetition_penalty", 0), ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}), ("logit_bias", {1: 101.0}), ("logit_bias", {1: float("nan")}), ("logprobs", -1),
        ("logprobs", 129), ("prompt_logprobs", 1000), ("n", 0), ("n", 129), ("priority", 1.5), ("deadline", -1),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=name):
        SamplingParams(**{name: value})


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="top_p"):
        SamplingParams(topp=0.9)
    with pytest.raises(InputError, match="max_tokens"):
        SamplingParams(max_token=3)
    with pytest.raises(InputError, match="Known: max_tokens, min_tokens"):
        SamplingParams(zzz=1)
    with pytest.raises(InputError, match="by name"):
        SamplingParams(0.7)
    params = SamplingParams(top_k=3)
    assert copy.copy(params) == copy.deepcopy(params) == dataclasses.replace(params, seed=None) == params


def test_minimum_above_maximum():
    with pytest.raises(InputError, match="min_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_stop_is_one_string_or_many():
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_ids_outside_the_vocabulary():
    with pytest.raises(InputError, match="logit_bias"):
        SamplingParams(logit_bias={50: 1.0}).check_vocabulary(50)
    with pytest.raises(InputError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[-1]).check_vocabulary(50)
