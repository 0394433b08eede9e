"""A diagnosis in sentences."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from twostroke.cost.answers.evidence import Evidence
from twostroke.cost.simulation.served import Summary
from twostroke.cost.units import seconds

ENOUGH = 0.5  # share of an overload (a logarithm) that a lever removes whose cause is named as the overload's

if TYPE_CHECKING:
    from twostroke.cost.answers.levers import Lever, Scenario
    from twostroke.cost.answers.overload import Overload


def sentence(
    phase: str,
    metric: str,
    evidence: Evidence,
    summary: Summary,
    best: Lever | None,
    slow: bool = True,
    overload: Overload | None = None,
    gain: float = 1.0,
) -> str:
    """What is slow, and the cause that the best lever removes. gain: its throughput, new over old."""
    opening = _opening(phase, metric, evidence, summary, slow, overload)
    if overload is not None and best is not None:
        if log(gain) < ENOUGH * log(overload.offered / overload.served):
            return f"{opening}. What serves more, but not enough ({gain - 1:+.0%}): {best.title}."
        return f"{overload.fact}, because {best.because}. What serves more: {best.title}; or admit less."
    if best is None:
        return f"{opening}. No lever helps much."
    if best.phase not in (phase, "both"):  # a lever for the other stroke: its cause does not explain this one
        return f"{opening}. What helps most: {best.title}."
    return f"{opening}, because {best.because}."


def mismatch_sentence(
    phase: str,
    metric: str,
    evidence: Evidence,
    summary: Summary,
    slow: bool,
    overload: Overload | None,
    mismatch: str,
) -> str:
    return (
        f"{_opening(phase, metric, evidence, summary, slow, overload)}. The replay of these requests gives {mismatch}: "
        "something that it does not know sets the time (other programs, the network, a slower clock), so no lever can "
        "be recommended."
    )


def _opening(
    phase: str, metric: str, evidence: Evidence, summary: Summary, slow: bool, overload: Overload | None
) -> str:
    if overload is not None:
        return str(overload)
    return _complaint(phase, metric, evidence, summary) if slow else _nothing_is_slow(phase, summary)


def _nothing_is_slow(phase: str, summary: Summary) -> str:
    return (
        f"Nothing is slow: TTFT {seconds(summary.ttft.p50)} and TPOT {seconds(summary.tpot.p50)} are what this "
        f"machine needs for a request alone, most of it for {_work_of(phase)}"
    )


def _complaint(phase: str, metric: str, evidence: Evidence, summary: Summary) -> str:
    if metric == "throughput":
        return f"Throughput-bound: {summary.output_rate:,.0f} tokens/s, most of the time spent {_work_of(phase)}"
    if metric == "ttft":
        queue = evidence.queue_of_ttft
        what = f"{queue:.0%} of TTFT is queueing" if queue > 0.5 else f"{1 - queue:.0%} of TTFT is reading the prompt"
        return f"Slow to start: TTFT {seconds(summary.ttft.p50)} (p95 {seconds(summary.ttft.p95)}), {what}"
    if metric == "stall":
        return (
            f"Streams stall: {evidence.stall_share:.0%} of the decode time is lost in long gaps "
            f"(the longest of each answer {seconds(summary.stall.mean)}, the usual {seconds(summary.itl.p50)})"
        )
    return (
        f"Slow to stream: TPOT {seconds(summary.tpot.p50)}, {evidence.decode_over_alone:.1f}× that of a stream "
        f"alone, with {evidence.batch:.0f} {'stream' if round(evidence.batch) == 1 else 'streams'} at once"
    )


def _work_of(phase: str) -> str:
    return "reading prompts" if phase == "prefill" else "writing answers"


def evidence_lines(e: Evidence) -> list[str]:
    """What the sentence rests on, one line for each kind of evidence."""
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
        f"TTFT {_over(e.ttft_over_alone)} that of a request alone, {longer}",
        f"decode {_over(e.decode_over_alone)} that of a request alone, + {seconds(max(0.0, e.tpot_per_stream))} TPOT "
        f"for one more stream, + {seconds(max(0.0, e.tpot_per_1k))} for 1,000 more tokens of context; "
        f"{e.batch:.1f} streams at once; {e.stall_share:.0%} of decode time in long gaps",
        f"{_utilisation(e)}{kv}",
        f"{_hits(e)}; {e.preemptions} preemptions",
    ]


def known_line(name: str, after: Scenario) -> str:
    """What an answer cache would have answered. name: of the lever."""
    known, of = len(after.known), len(after.known) + len(after.arrivals)
    return f"{name}: {known} of {of} requests ({known / of:.0%}) would have hit, with {after.saved:,} tokens"


def _over(ratio: float) -> str:
    return f"{max(1.0, ratio):.1f}×"


def _utilisation(e: Evidence) -> str:
    """The utilisation in words, without the shares that the recording does not show."""
    shares = [("prefill MFU", e.prefill_mfu), ("decode MBU", e.decode_mbu)]
    known = [f"{name} {share:.0%}" if share >= 0.01 else f"{name} {share:.1%}" for name, share in shares if share]
    return f"{', '.join(known)} of what the machine reaches" if known else "too few tokens for MFU or MBU"


def _hits(e: Evidence) -> str:
    if e.hit_rate >= 0.95 * e.shareable:
        return f"prefix hits {e.hit_rate:.0%} of prompt tokens" + (", all that there are" if e.shareable else "")
    return f"prefix hits {e.hit_rate:.0%} of prompt tokens; earlier prompts had {e.shareable:.0%}"
