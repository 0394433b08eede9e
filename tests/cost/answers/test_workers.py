"""Plans: bytes are the engine's own, targets are met by the fleet that is named and missed by a smaller one."""

from __future__ import annotations

import random

import pytest

from tests.cost.fleets import poisson
from twostroke.config import make_config
from twostroke.cost.answers.sizing import size
from twostroke.cost.answers.steady import CLOSE
from twostroke.cost.answers.workers import ROUGH, Demand, Need, candidates, cheapest, workers_needed
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.served import Targets
from twostroke.cost.simulation.trace import Arrival, PromptPart, at_rate, repeat
from twostroke.errors import ConfigError
from twostroke.record import replace


def deployment(model="llama-3.1-8b", device="h200", precision="bfloat16", gpus=1, **settings):
    settings = {"max_model_len": 8192, "seed": 0} | settings
    return Deployment(known_arch(model), find_device(device), make_config(**settings), precision, gpus=gpus)


def test_sizes_are_exact():
    found = size(deployment(), 1000, 200)
    assert found.parameters == 8_030_261_248
    assert found.weight_bytes == 2 * 8_030_261_248
    assert found.kv_bytes_per_token == 131_072
    settings = found.deployment.settings
    assert found.kv_bytes == settings.kv_blocks * settings.layout.block_bytes
    assert found.largest_batch == settings.kv_blocks // 75  # 1,200 tokens in blocks of 16
    assert (found.prefill.bound, found.decode.bound) == ("compute", "memory")
    assert found.decode.batch_seconds > found.decode.seconds > 16e9 / 4.8e12


def test_what_does_not_fit_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match="more devices or a narrower precision"):
        size(deployment("llama-3-70b", "l4"), 1000, 200)
    assert size(deployment("llama-3-70b", "h100", "int8", gpus=2), 1000, 200).largest_batch > 10


@pytest.mark.slow
def test_the_fleet_that_is_named_is_the_smallest():
    rows = poisson(random.Random(0), 200, 5.0, (500, 1500), (50, 150))
    need = workers_needed(deployment(device="l40s"), Demand(rows, 20.0, Targets(0.5, 0.08)))
    assert isinstance(need, Need) and need.workers > 1
    assert Targets(0.5, 0.08).met_by_share(need.outcome.served, 0.95)
    fewer = replace(need.deployment, pools=replace(need.deployment.pools, workers=need.deployment.pools.workers - 1))
    assert not Targets(0.5, 0.08).met_by_share(fewer.run(need.load).served, 0.95)
    assert need.dollars_per_hour == pytest.approx(1.1 * need.workers)


def test_targets_that_no_fleet_meets_have_no_answer():
    rows = poisson(random.Random(0), 60, 5.0, (500, 1500), (50, 150))
    reason = workers_needed(deployment(device="l4"), Demand(rows, 1.0, Targets(0.5, 0.001)))
    assert isinstance(reason, str) and "a request alone misses the targets" in reason


def test_a_split_fleet_has_both_kinds():
    rows = poisson(random.Random(0), 120, 5.0, (800, 1500), (50, 150))
    need = workers_needed(deployment(device="l40s"), Demand(rows, 10.0, Targets(1.0, 0.08)), split=True)
    assert isinstance(need, Need) and need.prefill >= 1 and need.workers >= 1


def test_the_cheapest_comes_first():
    rows = poisson(random.Random(0), 80, 5.0, (200, 600), (50, 150))
    devices = [find_device(name) for name in ("l4", "h100")]
    options = candidates(known_arch("llama-3.1-8b"), devices, make_config(max_model_len=8192, seed=0), gpus=(1,))
    found = cheapest(options, Demand(rows, 3.0, Targets(2.0, 0.1))).needs
    assert found and [one.dollars_per_hour for one in found] == sorted(one.dollars_per_hour for one in found)
    assert found[0].deployment.device.name == "l4"
    assert [one.trial.close for one in found] == [CLOSE] + [ROUGH] * (len(found) - 1), "only the first one closely"
    again = workers_needed(replace(found[0].deployment, pools=Pools()), Demand(rows, 3.0, Targets(2.0, 0.1)))
    assert isinstance(again, Need) and again.outcome.summary == found[0].outcome.summary


@pytest.mark.slow
def test_what_would_cost_far_more_is_not_simulated():
    rows = poisson(random.Random(0), 60, 5.0, (200, 600), (50, 150))
    config, tried = make_config(max_model_len=8192, seed=0), []
    options = candidates(known_arch("llama-3.1-8b"), [find_device("l4"), find_device("b200")], config, gpus=(1,))
    found = cheapest(
        options,
        Demand(rows, 0.1, Targets(2.0, 0.1)),
        lambda how, one: tried.append((one.device.name, how)),
        (False, True),
    )
    assert {name for name, _ in tried} == {"l4"} and len(found.needs) > 2
    assert {one.deployment.device.name for one in found.dropped} == {"b200"}, "and it says so"
    assert all(one.reason.startswith("not simulated") for one in found.dropped)
    assert [how != "" for _, how in tried] == [False] * (len(tried) - 1) + [True], "two pools for the cheapest alone"
    missing = [deployment(device="l4"), deployment(device="b200")]
    found = cheapest(missing, Demand(rows, 0.1, Targets(2.0, 0.008)))
    assert [one.deployment.device.name for one in found.needs] == ["b200"]
    assert [(one.deployment.device.name, "misses the targets" in one.reason) for one in found.dropped] == [("l4", True)]


def test_a_recording_is_repeated_by_other_users():
    """What all prompts begin with stays the same; a conversation has new text each time, and grows as before."""
    talk = [(PromptPart(1, 60), *(PromptPart(2 + turn, 20) for turn in range(length))) for length in (1, 3, 5)]
    other = (PromptPart(1, 60), PromptPart(99, 30))
    rows = [Arrival(float(number), parts, 10) for number, parts in enumerate([*talk, other])]
    again = [tuple(part.content for part in row.parts) for row in repeat(rows, 8)]
    assert again[:4] == [tuple(part.content for part in row.parts) for row in rows]
    assert all(contents[0] == 1 for contents in again)
    assert not {*again[6][1:], *again[7][1:]} & {*again[2][1:], *again[3][1:]}
    assert again[6][:4] == again[5] and again[5][:2] == again[4]


@pytest.mark.slow
def test_a_load_beyond_simulation_is_many_copies():
    rows = poisson(random.Random(0), 60, 5.0, (300, 600), (50, 100))
    need = workers_needed(deployment(device="l4", precision="int8"), Demand(rows, 2000.0, Targets(1.0, 0.1)))
    assert isinstance(need, Need) and need.workers > 64 and need.copies > 1


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_copies_of_a_small_fleet_are_neither_overrun_nor_half_idle(split):
    """A small load that one worker serves does not show the highest rate that it sustains."""
    rows = poisson(random.Random(0), 60, 5.0, (100, 300), (20, 60))
    fast = replace(deployment(device="h200"), config=make_config(max_model_len=4096, max_requests=64, seed=0))
    need = workers_needed(fast, Demand(rows, 100_000.0, Targets(1.0, 0.1)), split)
    assert isinstance(need, Need) and need.workers > 100 and (need.prefill > 0) == split
    for times, count, kept_up in ((1.0, 1500, True), (1.6, 4000, False)):
        long = at_rate(repeat(rows, count), times * 100_000.0 / need.copies)
        assert Targets(1.0, 0.1).met_by_share(need.deployment.run(long).served, 0.9) == kept_up
