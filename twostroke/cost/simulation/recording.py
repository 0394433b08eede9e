"""A running server as a deployment, arrivals and served requests, read from its admin routes' documents.

The machine's rates are fitted to the recorded steps, so a server can be diagnosed without a calibration. A calibration
is better where there is one: it also covers steps that the server has not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.cost.model.calibration import Calibration
from twostroke.cost.model.fit import coldness, fit, fit_launched, with_between
from twostroke.cost.model.rates import KEY_SECONDS, REQUEST_SECONDS, STEP_SECONDS, Rates, TileRates
from twostroke.cost.model.roofline import Roofline
from twostroke.cost.simulation.deployment import Deployment, deployment_of, drafts_of
from twostroke.cost.simulation.served import Served
from twostroke.cost.simulation.trace import Arrival, PromptPart
from twostroke.draft.replay import LookupCounts
from twostroke.errors import InputError
from twostroke.metrics.steplog import LoggedWork, Step
from twostroke.model.document import read_arch
from twostroke.record import replace

FEWEST_STEPS = 24  # that a fit needs
GOOD = 75  # percentile of the steps' rates that counts as what the machine reaches
Parsed = Mapping[str, Any]  # a JSON object
UNKNOWN = Rates(1e10, 1e11, 1e10, 5e10, STEP_SECONDS["cpu"], REQUEST_SECONDS["cpu"], source="a guess")


@dataclass(frozen=True, slots=True)
class Recording:
    deployment: Deployment
    arrivals: list[Arrival]  # from zero, in order
    served: list[Served]  # of each arrival


def read_recording(
    settings: Parsed, arrivals: Parsed, steps: Parsed, memory: int | None = None, rates: Rates | None = None
) -> Recording:
    """Read a recording from the three documents of the admin routes. `memory`: bytes that the server may use, where
    known; `rates`: from a calibration of its machine with its model."""
    try:
        arch = read_arch(settings["arch"])
        values = {name: one["value"] for name, one in settings["settings"].items()}
        log = [read_step(one) for one in steps["steps"]]
        rows = [one for one in arrivals["arrivals"] if one["output_tokens"] > 0]
        used = settings["weight_bytes"] + values["kv_blocks"] * settings["layout"]["block_bytes"]
        machine = settings.get("machine") or "this server"
        made = Calibration(machine, settings["model"], UNKNOWN, max(memory or 0, used), values["threads"],
                           values["device"])  # fmt: skip
        deployment = deployment_of(arch, values, made, settings["weight_bytes"])
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the server's settings, steps or arrivals are not in the known form ({error!r}).") from None
    found = rates or rates_of(log, deployment)
    deployment = deployment_of(arch, values, replace(made, rates=found), settings["weight_bytes"])
    deployment = replace(deployment, lookup=drafts_of(read_counts(arrivals.get("lookup")), made.kind))
    first = min((one["time"] for one in rows), default=0.0)
    times = token_times(steps["steps"])
    return Recording(
        deployment,
        [read_arrival(one, first) for one in rows],
        [read_served(one, first, times.get(one["request"], [])) for one in rows],
    )


def read_counts(document: Parsed | None) -> LookupCounts:
    """The counts of a replay of prompt lookup; a server that does not report them counts none."""
    if document is None:
        return LookupCounts()
    columns = (tuple(int(value) for value in document[name]) for name in ("covered", "tried", "right"))
    return LookupCounts(int(document["steps"]), *columns)


def read_step(document: Parsed) -> Step:
    works = tuple(
        LoggedWork(lane["request"], lane["start"], lane["tokens"], "read" if lane["stage"] == "prefill" else "write")
        for lane in document["lanes"]
    )
    return Step(document["number"], document["time"], document["seconds"], works, document["sampled"])


def read_arrival(document: Parsed, first: float) -> Arrival:
    parts = tuple(PromptPart(*part) for part in document["parts"]) or (
        PromptPart(-document["request"], document["prompt_tokens"]),
    )
    return Arrival(
        document["time"] - first,
        parts,
        document["output_tokens"],
        document["priority"],
        document.get("determined") is True,
        document.get("topic"),
    )


def read_served(document: Parsed, first: float, times: Sequence[float]) -> Served:
    arrival = document["time"] - first
    if document["ttft_s"] is None:
        return Served(arrival, document["prompt_tokens"], refused=True)
    scheduled = arrival + document["queue_s"]
    began = arrival + document["ttft_s"]
    output = document["output_tokens"]
    served = Served(
        arrival, document["prompt_tokens"], document["cached_tokens"], scheduled, began, began + document["decode_s"]
    )
    served.output, served.preemptions = output, document["preemptions"]
    if len(times) == output:  # the log has every step of the request
        served.gaps = np.diff(times).astype(np.float32)
    elif output > 1:
        served.gaps = np.full(output - 1, document["decode_s"] / (output - 1), dtype=np.float32)
    return served


def token_times(steps: Sequence[Parsed]) -> dict[int, list[float]]:
    """When each request got its tokens: at the end of the step that finished its prompt, and of each decode step."""
    found: dict[int, list[float]] = {}
    for step in steps:
        end = step["time"] + step["seconds"]
        for lane in step["lanes"]:
            times = found.setdefault(lane["request"], [])
            if lane["stage"] == "prefill":
                times.clear()
            times.append(end)
    return found


def rates_of(log: Sequence[Step], deployment: Deployment) -> Rates:
    """Fitted to the log, starting from the best rates of its steps."""
    settings = deployment.settings
    useful = [step for step in log if step.seconds > 0 and step.works]
    if len(useful) < FEWEST_STEPS:
        return UNKNOWN
    line = Roofline(deployment.model, settings.layout, UNKNOWN)
    best, model, layout = reached(useful, line), deployment.model, settings.layout
    if deployment.device.kind == "cpu":
        found = fit(useful, model, layout, replace(best, kv_by_bytes=False), coldness(useful))
    else:
        tiles = TileRates(best.attention_compute, KEY_SECONDS)
        found = fit_launched(useful, model, layout, replace(best, kv_by_bytes=True, tiles=tiles))
    return with_between(found, useful)


def reached(log: Sequence[Step], line: Roofline) -> Rates:
    """FLOP/s of good steps with prompts, bytes/s of good steps without."""
    computes, bandwidths = [], []
    for step in log:
        chunks = [(work.start, work.count) for work in step.chunks]
        contexts = step.contexts
        computes.append(line.flops(chunks, contexts, step.sampled) / step.seconds)
        bandwidths.append(line.bytes(chunks, contexts, step.sampled) / step.seconds)
    reads = [rate for step, rate in zip(log, computes, strict=True) if step.chunks] or computes
    writes = [rate for step, rate in zip(log, bandwidths, strict=True) if not step.chunks] or bandwidths
    compute, bandwidth = float(np.percentile(reads, GOOD)), float(np.percentile(writes, GOOD))
    quickest = float(np.percentile([step.seconds for step in log], 100 - GOOD))
    return Rates(bandwidth, compute, bandwidth, compute / 2, 0.1 * quickest, 0.005 * quickest, source="recorded steps")
