"""One self-contained page for a result: numbers, plots, flags. No script, no external files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from twostroke.bench import plots, report
from twostroke.bench.record import Run
from twostroke.cost.simulation.served import Targets

STYLE = """
:root{--ink:#1c2430;--soft:#66707d;--paper:#fff;--line:#e3e7ec;--queue:#b9bfc7;--prefill:#3a6ea5;--decode:#d9822b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa4b1;--paper:#14181e;--line:#2b323b;--queue:#5b636e;
--prefill:#6ea3d8;--decode:#e9a15b}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1120px;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin-top:2rem}p.flag{border-left:4px solid #c0392b;padding-left:.7rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto;
margin-bottom:1rem}
td,th{padding:.25rem .8rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
@media(max-width:600px){td,th{padding:.2rem .35rem;font-size:.8rem}td:first-child{white-space:normal;min-width:6.5rem}}
td:first-child,th:first-child{text-align:left}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:1rem}
svg{width:100%;height:auto}svg text{fill:var(--ink);font:11px system-ui,sans-serif}
svg .title{font-size:13px;font-weight:600}
svg .label{fill:var(--soft)}.grid{stroke:var(--line)}.line{fill:none;stroke:var(--prefill);stroke-width:2}
.line.decode,.line.tpot{stroke:var(--decode)}.dot{fill:var(--prefill)}.dot.decode,.dot.tpot{fill:var(--decode)}
rect.queue{fill:var(--queue)}rect.prefill,rect.ttft{fill:var(--prefill)}rect.decode,rect.tpot{fill:var(--decode)}
footer{color:var(--soft);margin-top:3rem;font-size:.85rem}
"""


def page(runs: Sequence[Run], command: str, targets: Targets = Targets()) -> str:
    sections = [sweep(runs, targets)] if len(runs) > 1 else []
    sections += [section(run, targets) for run in runs]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>twostroke bench: {escape(runs[0].load)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(runs[0].load)} on {escape(runs[0].target)}</h1>{''.join(sections)}"
        f"<footer>{escape(runs[0].machine)} · <code>{escape(command)}</code> · TTFT includes queueing · "
        "TPOT per request = (E2E − TTFT)/(n − 1) · ITL per gap · percentiles over requests and over tokens are not "
        "mixed</footer>"
        "</body></html>\n"
    )


def section(run: Run, targets: Targets) -> str:
    served = [one for one in run.served() if not one.refused]
    said = ([overload] if (overload := report.overload(run)) else []) + run.flags
    flags = "".join(f'<p class="flag">{escape(flag)}</p>' for flag in said)
    if not served:
        return f"<h2>{escape(report.title(run))}</h2>{flags}<p>No request was answered.</p>"
    body = "".join(f"<tr>{''.join(f'<td>{cell.strip()}</td>' for cell in row)}</tr>" for row in report.rows(run))
    head = "".join(f"<th>{name}</th>" for name in ("", *report.COLUMNS))
    text = "".join(f"<p>{escape(line)}</p>" for line in report.lines(run, targets))
    drawn = [
        plots.cumulative("TTFT over requests", "seconds", [one.ttft for one in served], "ttft"),
        plots.cumulative("TPOT over requests", "seconds", [v for one in served if (v := one.tpot) is not None], "tpot"),
        plots.cumulative("ITL over gaps", "seconds", np.concatenate([one.gaps for one in served]), "tpot"),
        plots.lanes([(one.arrival, one.scheduled, one.first, one.end) for one in served]),
    ]
    return (
        f"<h2>{escape(report.title(run))}</h2>{flags}{text}<table><tr>{head}</tr>{body}</table>"
        f'<div class="plots">{"".join(f"<div>{one}</div>" for one in drawn if one)}</div>'
    )


def sweep(runs: Sequence[Run], targets: Targets) -> str:
    """Throughput against latency, and goodput against rate where there are targets."""
    answered = [run for run in runs if run.answered]
    if len(answered) < 2:
        return ""
    summaries = [run.summary() for run in answered]
    drawn = [
        plots.curve("throughput against TTFT", "output tokens/s", "TTFT p95, s",
                    [("ttft", [(s.output_rate, s.ttft.p95) for s in summaries])]),
        plots.curve("throughput against TPOT", "output tokens/s", "TPOT p95, s",
                    [("tpot", [(s.output_rate, s.tpot.p95) for s in summaries])]),
    ]  # fmt: skip
    if targets.given:
        points = [
            (run.rate or one.request_rate, targets.goodput(run.served()))
            for run, one in zip(answered, summaries, strict=True)
        ]
        drawn.append(plots.curve("goodput against rate", "requests/s offered", "requests/s good", [("ttft", points)]))
    return f'<h2>over all rates</h2><div class="plots">{"".join(f"<div>{one}</div>" for one in drawn)}</div>'
