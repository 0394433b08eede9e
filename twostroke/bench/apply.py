"""Measure, diagnose, pull the best lever, and measure again under the same load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from twostroke.bench.inprocess import measure, settings_document
from twostroke.bench.ledger import Prediction
from twostroke.bench.record import Run
from twostroke.bench.workload import Load, renewed
from twostroke.cost.answers.diagnose import Diagnosis, Effect, diagnose
from twostroke.cost.model.calibration import Calibration
from twostroke.cost.simulation.deployment import deployment_of, drafts_of
from twostroke.cost.simulation.served import Summary, Targets
from twostroke.engine.settings import change
from twostroke.errors import TwostrokeError
from twostroke.record import replace

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Applied:
    diagnosis: Diagnosis
    effect: Effect
    before: Run
    after: Run
    prediction: Prediction
    live: bool  # whether the running engine took it; False: a new one was started


def apply(
    llm: LLM,
    reopen: Callable[[dict[str, Any]], LLM],
    load: Load,
    model: str,
    calibration: Calibration,
    weight_bytes: int,
    targets: Targets = Targets(),
) -> Applied | Diagnosis:
    """Diagnose, pull the best lever and measure again. Without a lever that helps: the diagnosis alone."""
    before = measure(llm, load, model, calibration.machine)
    deployment = deployment_of(llm.arch, settings_document(llm), calibration, weight_bytes)
    deployment = replace(deployment, lookup=drafts_of(before.lookup(), calibration.kind))
    found = diagnose(deployment, before.arrivals(), before.served(), targets, paced=before.rate is not None)
    for effect in found.effects:
        try:
            changed = pull(llm, reopen, effect)
        except (TwostrokeError, ValueError):  # this machine does not support it
            continue
        if changed is not None:
            break
    else:
        return found
    after = measure(changed, renewed(load), model, calibration.machine)
    prediction = make_prediction(found, effect, before, after, calibration.machine, model)
    return Applied(found, effect, before, after, prediction, effect.lever.live)


def pull(llm: LLM, reopen: Callable[[dict[str, Any]], LLM], effect: Effect) -> LLM | None:
    """The engine with the lever pulled: the same one where it takes the setting live. None: no setting pulls it."""
    if effect.lever.setting is None:
        return None
    settings = effect.lever.setting(effect.after.deployment)
    if not effect.lever.live:
        return reopen(settings)
    llm.settings = llm.engine.intake.settings = change(llm.engine.core.scheduler, llm.settings, settings)
    return llm


def make_prediction(found: Diagnosis, effect: Effect, before: Run, after: Run, machine: str, model: str) -> Prediction:
    old, new = value_of(found.metric, found.measured), value_of(found.metric, after.summary())
    predicted = value_of(found.metric, effect.predicted.summary)  # with rates tuned to `before`
    if found.metric == "ttft":
        predicted += outside_engine(before)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Prediction(when, machine, model, before.load, effect.lever.name, found.metric, old, predicted, new)


def outside_engine(run: Run) -> float:
    """Seconds of TTFT that the simulation does not include: the network and the client, and the server's own handling
    of a request, which is the shortest queue time."""
    outside = [record.outside for record in run.records if record.outside is not None]
    queues = [record.timings["queue_s"] for record in run.records if record.timings and "queue_s" in record.timings]
    handling = quantiles(queues, n=10)[0] if len(queues) > 1 else 0.0
    return (max(0.0, median(outside)) if outside else 0.0) + max(0.0, handling)


def value_of(metric: str, summary: Summary) -> float:
    """The number that the verdict names."""
    if metric in ("ttft", "tpot"):
        return float(getattr(summary, metric).p50)
    return summary.stall.mean if metric == "stall" else summary.output_rate
