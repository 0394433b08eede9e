"""Workers are divided as the simulator says: prompts apart where they disturb streams, one pool if it serves more."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.cost.fleets import CPU, poisson
from twostroke.cli.cluster_auto import Traffic, check_auto, part_of, planned
from twostroke.config import make_config
from twostroke.cost.answers.split import Division, Verdict, divide, divisions, role_changes
from twostroke.cost.model.devices import DEVICES
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.simulation.clustered import as_cluster, pools_of
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.fleet import MEASURED_LINKS, Pools
from twostroke.cost.simulation.served import Targets
from twostroke.errors import ConfigError
from twostroke.record import replace

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def workers(count: int, prefill: int = 0, **settings: Any) -> Deployment:
    config = make_config(max_model_len=8192, seed=0, **settings)
    device = next(device for device in DEVICES.values() if device.kind == "cpu")
    arch = known_arch("smollm2-135m")
    assert arch is not None
    return Deployment(arch, device, config, "int8", rates=CPU, pools=Pools(count - prefill, prefill))


def test_long_prompts_among_streams_are_computed_apart() -> None:
    """Steps without chunks: a stream on a worker that computes prompts stands still for them."""
    rng = random.Random(1)
    load = poisson(rng, 80, 0.8, (900, 1100), (60, 120))
    found = divide(workers(4, chunked_prefill=False, max_batch_tokens=8192), load, Targets(8.0, 0.02))
    assert found.changes and found.best.prefill and found.best.goodput > found.now.goodput
    assert found.sentence.startswith(f"split {found.best.prefill}:{found.best.workers} instead of 4 mixed: goodput +")
    split = replace(workers(4), pools=Pools(found.best.workers, found.best.prefill))
    kept = divide(split, load[:10], Targets(100.0, 10.0))
    assert kept.now.prefill == found.best.prefill and not kept.changes and kept.sentence.startswith("split ")


def test_one_pool_is_better_where_workers_of_one_kind_would_wait() -> None:
    load = poisson(random.Random(2), 60, 2.5, (500, 900), (2, 6))
    found = divide(workers(3), load, Targets(3.0, 0.3))
    assert not found.changes and not found.best.prefill
    assert found.sentence.startswith("one pool is better here, because with split") and "p95" in found.sentence
    light = divide(workers(2), [replace(one, at=20 * one.at) for one in load[:10]], Targets(1e3, 1e3))
    assert "may stay" in light.sentence
    heavy = divide(workers(2), load, Targets(0.01, 0.3))
    assert not heavy.changes and heavy.sentence.startswith("2 workers are too few")
    alone = divide(workers(1), load[:5], Targets())
    assert "nothing to divide" in alone.sentence and alone.targets.given


def test_divisions_are_those_around_the_estimate_and_the_present_one() -> None:
    load = poisson(random.Random(2), 20, 3.0, (500, 600), (50, 60))
    found = divisions(workers(200, 150), load)
    assert len(found) <= 7 and {0, 150} <= {pools.prefill for pools in found}
    assert all(pools.workers + pools.prefill == 200 for pools in found)


def test_as_few_workers_change_their_roles_as_can() -> None:
    def to(prefill: int, others: int) -> Division:
        return Division(prefill, others, 1.0, 1.0, None)  # type: ignore[arg-type]

    roles = {"a": "both", "b": "both", "c": "both"}
    assert role_changes(roles, to(1, 2)) == {"a": "prefill", "b": "decode", "c": "decode"}
    assert role_changes({"a": "decode", "b": "prefill", "c": "decode"}, to(2, 1)) == {"a": "prefill"}
    assert role_changes({"a": "decode", "b": "prefill"}, to(0, 2)) == {"a": "both", "b": "both"}
    assert role_changes(roles, to(0, 3)) == {}


def test_a_running_cluster_is_one_worker_of_several() -> None:
    rows = [{"role": role, "healthy": True} for role in ("prefill", "decode", "decode")] + [
        {"role": "decode", "healthy": False}
    ]
    transfers = {"done": 0, "bandwidth": 1e9, "latency": 0.1}
    shown = {"workers": rows, "transfers": transfers, "route": "apart", "ttft": 1.5}
    assert pools_of(shown) == Pools(2, 1, router="apart", ttft=1.5)
    shown |= {"transfers": {**transfers, "done": 3}, "route": "cost", "ttft": None}
    found = as_cluster(workers(1, max_requests=64, kv_blocks=4000), shown)
    assert found.pools == Pools(2, 1, 1e9, 0.1, "cost")
    assert (found.config.max_requests, found.config.kv_blocks) == (32, 2000)
    assert part_of(CPU, 2).compute == CPU.compute / 2


@pytest.mark.parametrize(("kind", "machines"), [("cpu", ("aarch64", "x86_64")), ("cuda", ("h200",))])
def test_links_are_as_they_were_measured(kind: str, machines: tuple[str, ...]) -> None:
    """A line through both sizes; of the machines of a kind the slower one."""
    lines = []
    for machine in machines:
        measured = json.loads((RESULTS / f"exchange-{machine}.json").read_text())["sizes"].values()
        (small, first), (large, second) = [
            (one["bytes"], one["shared memory"]["whole"]["ms"] / 1e3) for one in measured
        ]
        bandwidth = (large - small) / (second - first)
        lines.append((bandwidth, first - small / bandwidth))
    link = min(lines)[0], max(latency for _, latency in lines)
    assert MEASURED_LINKS[kind] == pytest.approx(link, rel=0.04)


def test_auto_simulates_the_measured_link(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Deployment] = []
    monkeypatch.setattr("twostroke.cost.answers.split.divide", lambda deployment, *rest: seen.append(deployment))
    planned("llama-3.1-8b", {}, 3, Traffic(rate=2.0, hardware="h200"), one_machine=True)
    planned("llama-3.1-8b", {}, 3, Traffic(rate=2.0, ttft=1.5, hardware="h200"), one_machine=True, apart=True)
    link = MEASURED_LINKS["cuda"]
    assert [one.pools for one in seen] == [Pools(3, 0, *link, "cost"), Pools(3, 0, *link, "apart", 1.5)]


def test_what_auto_needs_is_said() -> None:
    for auto, count, traffic, words in (
        (True, 1, Traffic(), "give --workers"),
        (False, 3, Traffic(rate=2.0), "--rate is for --auto"),
        (True, 3, Traffic(workload="chat", trace="mooncake"), "--workload has no effect"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_auto(auto, count, traffic)


def test_a_verdict_without_any_goodput_now() -> None:
    some = divide(workers(2), poisson(random.Random(2), 10, 3.0, (50, 60), (5, 6)), Targets(9.0, 9.0))
    none = some.now._replace(goodput=0.0)
    assert "goodput instead of none" in Verdict(none, some.tried[-1], [none], some.targets).sentence


def test_a_large_fleet_is_divided_as_a_part_of_it_is() -> None:
    """The part has its share of the rate: a thousand workers do not look idle because few requests are simulated."""
    load = poisson(random.Random(1), 200, 0.5 * 32, (900, 1100), (60, 120))
    targets, settings = Targets(8.0, 0.02), {"chunked_prefill": False, "max_batch_tokens": 8192}
    part = divide(workers(32, **settings), load, targets)
    whole = divide(workers(3200, **settings), [replace(one, at=one.at / 100) for one in load], targets)
    assert part.changes and part.best.prefill
    assert (whole.best.prefill, whole.best.workers) == (100 * part.best.prefill, 100 * part.best.workers)
    assert whole.best.goodput == pytest.approx(100 * part.best.goodput, rel=0.01)
    present = divide(workers(3200, 1234, **settings), load, targets).now
    assert (present.prefill, present.workers) == (1234, 1966)
