"""The workers of a running cluster: how they should be divided, and their roles changed while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.bench.client import Target
from twostroke.bench.record import Run
from twostroke.bench.remote import Admin, Measure
from twostroke.bench.workload import Load, renewed
from twostroke.cost.answers.split import Verdict, divide, role_changes
from twostroke.cost.simulation.clustered import as_cluster
from twostroke.cost.simulation.recording import Parsed, Recording
from twostroke.cost.simulation.served import Targets
from twostroke.errors import InputError
from twostroke.record import replace


@dataclass(frozen=True, slots=True)
class RolesChanged:
    """Roles that were changed, and the load before and after, where one was measured."""

    verdict: Verdict
    roles: dict[str, str]
    before: float  # goodput, requests/s
    after: float


def recorded(admin: Admin, workers: Parsed) -> Recording:
    """Rates come from the steps of the workers, as a calibration measured the whole machine."""
    found = admin.recording(workers=workers)
    if not found.arrivals:
        raise InputError("the cluster has answered nothing yet: give a load with --workload, or try again later.")
    return replace(found, deployment=as_cluster(found.deployment, workers))


def apply(admin: Admin, target: Target, load: Load, measure: Measure, targets: Targets) -> RolesChanged | Verdict:
    """Measure, divide, change roles, measure again. Only the verdict where nothing is to be changed."""
    workers = admin.workers()
    assert workers is not None, "a cluster"
    target = replace(target, vocabulary=admin.get("/twostroke/settings")["arch"]["vocab"])
    before = measure(target, load)
    found = divide(recorded(admin, workers).deployment, before.arrivals(), targets)
    if not found.changes:
        return found
    roles = {one["name"]: one["role"] for one in workers["workers"] if one["healthy"]}
    changes = role_changes(roles, found.best)
    for name, role in changes.items():
        admin.change({"worker": name, "role": role}, "/twostroke/workers")
    after = measure(target, renewed(load))
    return RolesChanged(found, changes, goodput(before, found.targets), goodput(after, found.targets))


def goodput(run: Run, targets: Targets) -> float:
    return targets.goodput(run.served())
