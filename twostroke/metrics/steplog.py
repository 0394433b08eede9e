"""Every step with what it computed and how long it took: the last few thousand, in memory. Torch-free.

The engine writes one entry for each collected step. The cost model is fitted to it, the lanes of a dashboard are drawn
from it, and a diagnosis reads from it how large the batches really were.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

KEPT = 4096  # steps


class Piece(NamedTuple):
    """`count` tokens of one request, the first of them at position `start`."""

    request: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count


class Step(NamedTuple):
    number: int
    launched: float  # on the engine's clock
    seconds: float  # less what it spent waiting for the step before it
    pieces: tuple[Piece, ...]
    sampled: int  # rows of logits made

    @property
    def tokens(self) -> int:
        return sum(piece.count for piece in self.pieces)

    @property
    def chunks(self) -> list[Piece]:
        """Stretches of prompts."""
        return [piece for piece in self.pieces if piece.count > 1]

    @property
    def streams(self) -> list[Piece]:
        """Single tokens: streams that advanced by one."""
        return [piece for piece in self.pieces if piece.count == 1]


class StepLog:
    def __init__(self, kept: int = KEPT):
        self.steps: deque[Step] = deque(maxlen=kept)

    def add(self, step: Step) -> None:
        self.steps.append(step)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def since(self, moment: float) -> list[Step]:
        """Steps launched after `moment`, oldest first."""
        recent = []
        for step in reversed(self.steps):
            if step.launched <= moment:
                break
            recent.append(step)
        return recent[::-1]

    def save(self, path: Path) -> None:
        path.write_text("".join(json.dumps(as_document(step)) + "\n" for step in self.steps))


def as_document(step: Step) -> dict[str, Any]:
    return {
        "number": step.number,
        "launched": step.launched,
        "seconds": step.seconds,
        "pieces": [list(piece) for piece in step.pieces],
        "sampled": step.sampled,
    }


def from_document(document: dict[str, Any]) -> Step:
    pieces = tuple(Piece(*piece) for piece in document["pieces"])
    return Step(document["number"], document["launched"], document["seconds"], pieces, document["sampled"])


def read_steps(lines: Iterable[str]) -> list[Step]:
    """Steps as `StepLog.save` writes them, one JSON object on each line."""
    return [from_document(json.loads(line)) for line in lines if line.strip()]
