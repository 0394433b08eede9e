"""A diagnosis knows mixtures and latent attention: the same load on a model without them gets another verdict."""

from __future__ import annotations

import random

import pytest

from tests.cost.cases import Labelled
from tests.cost.fleets import poisson
from twostroke.config import make_config
from twostroke.cost.answers.diagnose import Diagnosis, diagnose
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.trace import Arrival
from twostroke.model.arch import Arch, DenseArch, GroupedArch
from twostroke.record import replace


def verdict(arch: Arch, rows: list[Arrival], precision: str = "bfloat16") -> Diagnosis:
    """Of what a noisy machine with other rates measured."""
    config = make_config(max_model_len=16384, max_requests=64, seed=0)
    deployment = Deployment(arch, find_device("h200"), config, precision)
    return diagnose(deployment, rows, Labelled(deployment, rows, "decode", (), "tpot").measure().served)


def test_several_streams_of_a_mixture_read_more_experts_than_one() -> None:
    """So a stream is slower beside others. A dense model of the same bytes reads all of them for one stream too."""
    mixture = known_arch("qwen3-30b-a3b")
    assert mixture is not None
    dense = replace(mixture, layers=tuple(replace(one, feed=DenseArch(128 * 768)) for one in mixture.layers))
    rows = poisson(random.Random(4), 16, 3.0, (50, 100), (200, 300))
    found, other = verdict(mixture, rows), verdict(dense, rows)
    assert found.sentence.startswith("Slow to stream") and (found.phase, found.metric) == ("decode", "tpot")
    assert found.best is not None and found.best.lever.name == "weights-int4"
    assert other.sentence.startswith("Nothing is slow")


@pytest.mark.slow
def test_latents_of_long_contexts_are_not_what_is_slow() -> None:
    """With weights in four bits K and V of 16 heads are what decode reads; latents are a seventh of that."""
    latent = known_arch("deepseek-v2-lite")
    assert latent is not None
    grouped = replace(latent, layers=tuple(replace(one, mixer=GroupedArch(16, 16, 128)) for one in latent.layers))
    rows = poisson(random.Random(3), 16, 1.5, (7000, 9000), (150, 300))
    found, other = verdict(latent, rows, "int4"), verdict(grouped, rows, "int4")
    assert other.best is not None and other.best.lever.name == "kv-int8" and "long contexts" in other.sentence
    assert "kv-int8" not in {effect.lever.name for effect in found.effects} and "long contexts" not in found.sentence
