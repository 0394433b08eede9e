"""A running deployment of several workers, as its admin routes describe it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.recording import Parsed
from twostroke.record import replace


def joined_steps(documents: Sequence[Parsed]) -> dict[str, Any]:
    """The steps of several workers as those of one log."""
    steps = [step for document in documents for step in document["steps"]]
    return {**documents[0], "steps": sorted(steps, key=lambda step: step["time"] + step["seconds"])}


def pools_of(workers: Parsed) -> Pools:
    """The pools of the workers that are up. The link is as fast as transfers were."""
    roles = [one["role"] for one in workers["workers"] if one["healthy"]]
    prefill, link = roles.count("prefill"), workers["transfers"]
    plain = Pools(max(1, len(roles) - prefill), prefill, router=workers["route"], ttft=workers["ttft"])
    if not link["done"] or not link["bandwidth"] or link["bandwidth"] == float("inf"):
        return plain
    return replace(plain, link=link["bandwidth"], latency=link["latency"])


def as_cluster(deployment: Deployment, workers: Parsed) -> Deployment:
    """One worker of several: a cluster shows the sums over those that write."""
    pools = pools_of(workers)
    config, writers = deployment.config, pools.workers
    requests, blocks = config.max_requests, config.kv_blocks
    config = replace(
        config,
        max_requests=None if requests is None else max(1, requests // writers),
        kv_blocks=None if blocks is None else max(1, blocks // writers),
    )
    return replace(deployment, config=config, pools=pools)
