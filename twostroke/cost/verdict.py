"""A verdict on a running server as one JSON document, made by a process of its own so that no stream waits for it.

    python -m twostroke.cost.verdict < documents > verdict

In: {"settings": …, "arrivals": …, "steps": …, "memory": bytes}, as the admin routes tell them. Out: what the dashboard
shows. It needs no torch and starts in a fraction of a second.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from twostroke.cost.diagnose import Diagnosis, Effect, diagnose, seconds
from twostroke.cost.recorded import read_recording
from twostroke.errors import TwostrokeError

LATEST = 80  # requests that are replayed: enough for a verdict, little enough for a server that has other work
NICE = 15


def verdict(documents: dict[str, Any]) -> dict[str, Any]:
    arrivals = {**documents["arrivals"], "arrivals": documents["arrivals"]["arrivals"][-LATEST:]}
    recording = read_recording(documents["settings"], arrivals, documents["steps"], documents.get("memory"))
    found = diagnose(recording.deployment, recording.arrivals, recording.served)
    return as_document(found, len(recording.arrivals))


def as_document(found: Diagnosis, requests: int) -> dict[str, Any]:
    return {
        "sentence": found.sentence,
        "phase": found.phase,
        "metric": found.metric,
        "requests": requests,
        "measured": {"ttft": found.measured.ttft.p50, "tpot": finite(found.measured.tpot.p50)},
        "replayed": {"ttft": found.simulated.ttft.p50, "tpot": finite(found.simulated.tpot.p50)},
        "evidence": evidence_lines(found),
        "levers": [effect_document(effect) for effect in found.effects],
        "useless": [{"name": one.lever.name, "reason": one.reason} for one in found.useless],
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


def evidence_lines(found: Diagnosis) -> list[str]:
    """What the sentence rests on, a line for each kind of evidence."""
    e = found.evidence
    kv = "" if e.kv_peak is None else f", KV blocks held at most {e.kv_peak:.0%}"
    longer = (
        f"+ {seconds(e.prefill_per_1k)} for 1,000 more prompt tokens"
        if e.prefill_per_1k > 0
        else "whatever the prompt's length"
    )
    return [
        f"prompts {e.prompt.p50:,.0f} tokens (p95 {e.prompt.p95:,.0f}), answers {e.output.p50:,.0f} "
        f"(p95 {e.output.p95:,.0f})",
        f"time of requests: queue {e.queue_share:.0%}, prefill {e.prefill_share:.0%}, decode {e.decode_share:.0%}",
        f"TTFT {e.ttft_over_ideal:.1f}× that of a request alone, {longer}",
        f"decode {e.decode_over_ideal:.1f}× that of a request alone, + {seconds(max(0.0, e.tpot_per_stream))} TPOT "
        f"for one more stream, + {seconds(max(0.0, e.tpot_per_1k))} for 1,000 more tokens of context; "
        f"{e.batch:.1f} streams at once; {e.stall_share:.0%} of writing time in long gaps",
        f"prefill MFU {e.prefill_mfu:.0%}, decode MBU {e.decode_mbu:.0%} of what the machine reaches{kv}",
        f"prefix hits {e.hit_rate:.0%} of {e.shareable:.0%} that earlier prompts had; {e.preemptions} preemptions",
    ]


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
