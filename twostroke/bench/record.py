"""What happened to each request of a load, seen by the client, and a run of them as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.bench.workload import Load
from twostroke.cost.simulation.served import Served, Summary, summarize
from twostroke.cost.simulation.trace import Arrival, PromptPart
from twostroke.draft.replay import LookupCounts, total
from twostroke.errors import InputError

KIND = "twostroke bench"
VERSION = 1
IN_PROCESS = "in process"


@dataclass(slots=True)
class RequestRecord:
    """Times in seconds from the start of the run, on the client's clock."""

    arrival: float  # when it was due
    sent: float  # when it was sent
    pieces: list[float] = field(default_factory=list)  # when each event with text arrived
    end: float | None = None
    prompt: int = 0
    cached: int = 0
    output: int = 0
    error: str | None = None
    timings: dict[str, Any] | None = None  # the server's own, where it reports them
    parts: list[list[int]] = field(default_factory=list)
    lookup: list[Any] | None = None  # counts of a replay of prompt lookup over the answer, in process

    @property
    def ttft(self) -> float | None:
        return self.pieces[0] - self.arrival if self.pieces else None

    @property
    def outside(self) -> float | None:
        """The network's and the client's share of TTFT; None where the server does not report its own."""
        inside = (self.timings or {}).get("ttft_s")
        return None if inside is None or self.ttft is None else self.ttft - inside

    def served(self) -> Served:
        """The request as the cost model takes it. Without the server's own timings queueing counts as prefill; with
        them the time on the network counts as queueing."""
        if not self.pieces or self.end is None:
            return Served(self.arrival, self.prompt, refused=True)
        timings = self.timings or {}
        before = self.pieces[0] - self.sent
        prefill = min(before, float(timings.get("prefill_s", before - timings.get("queue_s", 0.0))))
        scheduled = self.pieces[0] - max(0.0, prefill)
        served = Served(self.arrival, self.prompt, self.cached, scheduled, self.pieces[0], self.pieces[-1])
        served.output = max(self.output, 1)
        served.preemptions = int(timings.get("preemptions", 0))
        served.gaps = np.diff(self.pieces).astype(np.float32)
        return served


@dataclass(slots=True)
class Run:
    """One load, measured once."""

    load: str
    target: str  # a URL, or IN_PROCESS
    rate: float | None
    closed: int | None
    records: list[RequestRecord]
    machine: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    flags: list[str] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        """Whether any request was."""
        return any(record.pieces for record in self.records)

    def served(self) -> list[Served]:
        return [record.served() for record in self.records]

    def outside(self) -> list[float]:
        """The network's and the client's share of each TTFT, where known; none in process."""
        if IN_PROCESS in self.target:
            return []
        return [record.outside for record in self.records if record.outside is not None]

    def summary(self) -> Summary:
        return summarize(self.served())

    def arrivals(self) -> list[Arrival]:
        """The requests with the lengths that the server counted, for a replay."""
        rows: list[Arrival] = []
        for record in self.records:
            parts = tuple(PromptPart(*part) for part in record.parts) or (
                PromptPart(-1 - len(rows), max(1, record.prompt)),
            )
            at = record.arrival if self.closed is None else record.sent
            rows.append(Arrival(at, fitted(parts, record.prompt), max(1, record.output)))
        return rows

    def lookup(self) -> LookupCounts:
        """What a replay of prompt lookup over the answers counted."""
        return total(LookupCounts(*one.lookup) for one in self.records if one.lookup is not None)

    def document(self) -> dict[str, Any]:
        summary = self.summary() if self.answered else None
        return {**asdict(self), "summary": None if summary is None else summary.document()}


def fitted(parts: tuple[PromptPart, ...], length: int) -> tuple[PromptPart, ...]:
    """The parts scaled so that they add up to the length that the server counted."""
    whole = sum(part.length for part in parts)
    if length < 1 or length == whole:
        return parts
    scaled = [PromptPart(part.content, max(1, round(part.length * length / whole))) for part in parts]
    rest = length - sum(part.length for part in scaled)
    scaled[-1] = PromptPart(scaled[-1].content, max(1, scaled[-1].length + rest))
    return tuple(scaled)


def new_run(load: Load, target: str, model: str, machine: str) -> Run:
    return Run(load.name, target, load.rate, load.closed, [], machine, model=model)


def typed(arguments: Sequence[str]) -> str:
    """The command as results show it: without its key."""
    shown = list(arguments)
    for place, word in enumerate(shown):
        if word == "--api-key":
            shown[place + 1 : place + 2] = ["KEY"]
        elif word.startswith("--api-key="):
            shown[place] = "--api-key=KEY"
    return " ".join(["twostroke", *shown])


def save(runs: list[Run], path: Path, command: str) -> None:
    document = {"kind": KIND, "version": VERSION, "command": command, "runs": [run.document() for run in runs]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def load_runs(path: Path) -> list[Run]:
    try:
        document = json.loads(path.read_text())
        if not isinstance(document, dict) or document.get("kind") != KIND:
            raise ValueError(f"its kind is not {KIND!r}")
        if document.get("version") != VERSION:
            raise ValueError(f"its version is {document.get('version')}, this is {VERSION}")
        runs = []
        for one in document["runs"]:
            one.pop("summary")
            one["records"] = [RequestRecord(**record) for record in one["records"]]
            runs.append(Run(**one))
        return runs
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): give a result of `bench --json`.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: not a result of `twostroke bench --json` ({type(error).__name__}: {error}): measure again."
        ) from None
