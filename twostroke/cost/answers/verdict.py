"""A diagnosis of a running server as one JSON document, made in a process of its own so that no stream waits for it.

    python -m twostroke.cost.answers.verdict < documents > verdict

In: {"settings": …, "arrivals": …, "steps": [… of each worker], "memory": bytes, "workers": … or null}, from the admin
routes. Out: what the dashboard shows.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from twostroke.cost.answers.diagnose import Diagnosis, Effect, diagnose
from twostroke.cost.answers.wording import evidence_lines
from twostroke.cost.simulation.clustered import as_cluster, joined_steps
from twostroke.cost.simulation.recording import read_recording
from twostroke.errors import TwostrokeError

LATEST = 80  # requests that are replayed: enough for a verdict, and little work for the server's machine
NICE = 15


def verdict(documents: dict[str, Any]) -> dict[str, Any]:
    arrivals = {**documents["arrivals"], "arrivals": documents["arrivals"]["arrivals"][-LATEST:]}
    steps, workers = joined_steps(documents["steps"]), documents["workers"]
    recording = read_recording(documents["settings"], arrivals, steps, documents.get("memory"))
    deployment = recording.deployment if workers is None else as_cluster(recording.deployment, workers)
    found = diagnose(deployment, recording.arrivals, recording.served)
    return as_document(found, len(recording.arrivals))


def as_document(found: Diagnosis, requests: int) -> dict[str, Any]:
    return {
        "sentence": found.sentence,
        "phase": found.phase,
        "metric": found.metric,
        "requests": requests,
        "measured": {"ttft": found.measured.ttft.p50, "tpot": finite(found.measured.tpot.p50)},
        "replayed": {"ttft": found.simulated.ttft.p50, "tpot": finite(found.simulated.tpot.p50)},
        "evidence": evidence_lines(found.evidence),
        "levers": [effect_document(effect) for effect in found.effects],
        "useless": [{"name": one.lever.name, "reason": one.reason} for one in found.rejected],
    }


def effect_document(effect: Effect) -> dict[str, Any]:
    lever = effect.lever
    return {
        "name": lever.name,
        "title": lever.title,
        "live": lever.live,
        "settings": None if lever.setting is None else lever.setting(effect.after.deployment),
        "ttft": effect.ttft,
        "tpot": effect.tpot,
        "stall": effect.stall,
        "throughput": effect.throughput,
        "cost": effect.cost,
    }


def finite(value: float) -> float | None:
    return value if value == value else None


def main() -> None:
    if hasattr(os, "nice"):
        os.nice(NICE)
    try:
        answer = verdict(json.load(sys.stdin))
    except TwostrokeError as error:
        answer = {"trouble": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
