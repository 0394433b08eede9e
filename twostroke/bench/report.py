"""A run in the terminal: its numbers, and checks for values that are suspicious or impossible."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from rich.markup import escape
from rich.table import Table

from twostroke.bench.record import IN_PROCESS, Run
from twostroke.cost.answers.overload import find_overload
from twostroke.cost.model.roofline import Roofline
from twostroke.cost.simulation.served import Spread, Targets
from twostroke.cost.units import per_second, seconds

LATE = 0.05  # seconds between the due time and the sending of a request from which on the client is too slow
BEATEN = 0.5  # a time below this share of the roofline's is impossible
FASTEST = 1e-5  # seconds per token; a lower TPOT is impossible
COLUMNS = ("mean", "p50", "p90", "p95", "p99")


def check(run: Run, roofline: Roofline | None = None) -> list[str]:
    """Sentences on figures that are impossible, or that the client distorts."""
    found = []
    done = [record for record in run.records if record.pieces]
    failed = [record for record in run.records if record.error]
    if failed:
        found.append(f"{len(failed)} of {len(run.records)} requests failed; the first: {failed[0].error}")
    late = [record for record in run.records if record.sent - record.arrival > LATE]
    if late and IN_PROCESS not in run.target:  # there a request is handed over between two steps
        sent = f"{len(late)} {'request' if len(late) == 1 else 'requests'}"
        found.append(f"the client sent {sent} more than {1000 * LATE:.0f} ms late: it is a bottleneck")
    silent = [record for record in run.records if not record.pieces and not record.error]
    if silent:
        found.append(f"{len(silent)} answers held no text: they count as failed")
    if any(record.cached > record.prompt for record in done):
        found.append("impossible: more prompt tokens cached than there were")
    if any((record.outside or 0.0) < -0.001 for record in done):
        found.append("impossible: the server's TTFT is longer than what the client saw (two clocks, or a wrong one)")
    lumpy = [record for record in done if record.output > 1.5 * len(record.pieces)]
    if lumpy:
        found.append(f"{len(lumpy)} answers came in pieces of several tokens: gaps are per piece, not per token")
    tpots = [tpot for served in run.served() if not served.refused and (tpot := served.tpot) is not None]
    if tpots and min(tpots) < FASTEST:
        found.append(f"impossible: a TPOT of {min(tpots):.2g} s; were answers buffered on their way?")
    return found + (check_physics(run, roofline) if roofline is not None and done else [])


def check_physics(run: Run, roofline: Roofline) -> list[str]:
    """Times far below what the machine's measured rates allow."""
    found = []
    answered = [served for served in run.served() if not served.refused]
    reading = (roofline.model.read_bytes(1) + roofline.model.head_bytes) / roofline.rates.bandwidth
    tpot = min((one.tpot for one in answered if one.tpot is not None), default=reading)
    if tpot < BEATEN * reading:
        found.append(f"impossible: TPOT {seconds(tpot)}; reading the weights alone takes {seconds(reading)}")
    for one in answered:
        fresh = max(1, one.prompt - one.cached)
        products = roofline.flops([(one.cached, fresh)], [], 1) / roofline.rates.compute
        if one.ttft < BEATEN * products:
            found.append(
                f"impossible: TTFT {seconds(one.ttft)} for {fresh:,} prompt tokens; their products alone take "
                f"{seconds(products)}"
            )
            break
    return found


def table(run: Run) -> Table:
    shown = Table(title=escape(title(run)), title_justify="left", header_style="bold")
    for name in ("", *COLUMNS):
        shown.add_column(name, justify="right" if name else "left")
    for row in rows(run):
        shown.add_row(*row)
    return shown


def rows(run: Run) -> list[list[str]]:
    """Name, and a cell for each of COLUMNS."""
    summary, outside = run.summary(), run.outside()
    spreads: list[tuple[str, Spread]] = [
        ("TTFT (queue + prefill), per request", summary.ttft),
        ("TPOT, per request", summary.tpot),
        ("ITL, per gap", summary.itl),
        ("longest gap, per request", summary.stall),
        ("E2E, per request", summary.e2e),
    ]
    if outside:
        spreads.insert(1, ("  of which network and client", Spread.of(outside)))
    return [
        [name, *("–" if isnan(value) else seconds(value) for value in (getattr(spread, p) for p in COLUMNS))]
        for name, spread in spreads
    ]


def title(run: Run) -> str:
    if run.closed is not None:
        load = f"{run.closed} at a time"
    else:
        load = per_second(run.rate) if run.rate else "the trace's own rate"
    return " · ".join(part for part in (run.load, load, run.target, run.model) if part)


def overload(run: Run) -> str | None:
    """That more requests arrived than were served; None: they were served, or a closed loop admits no more."""
    found = None if run.closed is not None else find_overload(run.served(), run.rate is not None)
    return None if found is None else f"{found}."


def lines(run: Run, targets: Targets = Targets()) -> list[str]:
    summary = run.summary()
    shown = [
        f"{summary.requests} answers in {summary.seconds:.1f} s: {summary.request_rate:.2f} requests/s, "
        f"{summary.prompt_rate:,.0f} prompt tokens/s in, {summary.output_rate:,.0f} tokens/s out",
        f"time of requests: queue {summary.queue_share:.0%}, prefill {summary.prefill_share:.0%}, "
        f"decode {summary.decode_share:.0%} · prefix hits {summary.hit_rate:.0%} · {summary.preemptions} preemptions",
    ]
    if not any(record.timings for record in run.records):
        shown.append("the server does not report its own timings: queueing counts as prefill here")
    if targets.given:
        shown.append(f"goodput at {targets}: {targets.goodput(run.served()):.2f} requests/s")
    return shown


def sweep_table(runs: Sequence[Run], targets: Targets) -> Table:
    """Several rates of one load."""
    shown = Table(header_style="bold")
    names = ["rate", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "tokens/s"]
    for name in (*names, *(("goodput",) if targets.given else ())):
        shown.add_column(name, justify="right")
    for run in runs:
        s = run.summary()
        row = [f"{run.rate or s.request_rate:.3g}", *map(seconds, (s.ttft.p50, s.ttft.p95, s.tpot.p50, s.tpot.p95))]
        row.append(f"{s.output_rate:,.0f}")
        if targets.given:
            row.append(f"{targets.goodput(run.served()):.2f}")
        shown.add_row(*row)
    return shown
