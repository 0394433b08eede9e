"""`twostroke cluster --auto`: the planner divides the workers, from the targets and the expected traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twostroke.errors import ConfigError
from twostroke.record import replace

if TYPE_CHECKING:  # the help is shown without what a simulation needs
    from twostroke.cost.answers.split import Verdict
    from twostroke.cost.model.rates import Rates

REQUESTS = 300  # of the load that is simulated


@dataclass(frozen=True, slots=True)
class Traffic:
    """The expected traffic as typed; None: the default."""

    workload: str | None = None
    trace: str | None = None
    rate: float | None = None
    scale: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    hardware: str | None = None


def check_auto(auto: bool, workers: int, traffic: Traffic) -> None:
    typed = [name for name in Traffic.__slots__ if getattr(traffic, name) is not None and name != "ttft"]
    if not auto and typed:
        raise ConfigError(f"--{typed[0]} is for --auto: give both, or leave it out.")
    if auto and workers < 2:
        raise ConfigError("--auto divides --workers N, with N of at least 2: give --workers.")
    if traffic.workload is not None and traffic.trace is not None:
        raise ConfigError("--workload has no effect with --trace: give one of them.")


def planned(
    model: str,
    settings: dict[str, Any],
    workers: int,
    traffic: Traffic,
    one_machine: bool,
    apart: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Verdict:
    """one_machine: the workers share this machine, so each has a part of its rates. apart: prefill workers compute
    every prompt, where there are any."""
    from twostroke.bench.workload import choose_load
    from twostroke.cli.deployment import deployment_for
    from twostroke.cli.options import make_targets, refuse_unsimulated
    from twostroke.cost.answers.split import divide
    from twostroke.cost.simulation.fleet import MEASURED_LINKS, Pools

    simulated = {name: value for name, value in settings.items() if name != "threads"}
    refuse_unsimulated(simulated)
    hardware = traffic.hardware or "this"
    deployment = deployment_for(model, hardware, None, 1, simulated)[0]
    if hardware == "this" and one_machine and deployment.rates is not None:
        deployment = replace(deployment, rates=part_of(deployment.rates, workers))
    load = choose_load(
        traffic.trace, traffic.workload or "chat", count=REQUESTS, per_second=traffic.rate, scale=traffic.scale or 1.0
    )
    link = MEASURED_LINKS[deployment.device.kind]
    deployment = replace(deployment, pools=Pools(workers, 0, *link, "apart" if apart else "cost", traffic.ttft))
    return divide(deployment, load.arrivals, make_targets(traffic.ttft, traffic.tpot), progress)


def part_of(rates: Rates, parts: int) -> Rates:
    return replace(
        rates,
        bandwidth=rates.bandwidth / parts,
        compute=rates.compute / parts,
        kv_bandwidth=rates.kv_bandwidth / parts,
        attention_compute=rates.attention_compute / parts,
    )
