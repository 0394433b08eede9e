"""Requests as they arrived: when, how long, and which parts of their prompts are the same text.

A prompt is a list of `Part(content, length)`: equal contents are equal text, at any position. Token ids are made from
them, so the prefix cache hits as it did, and a diagnosis sees when prompts differ only in their first line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from twostroke.errors import InputError
from twostroke.record import replace

MOONCAKE_BLOCK = 512  # tokens under one hash id
FORMATS = (
    "a .csv must have Azure's columns (TIMESTAMP, ContextTokens, GeneratedTokens), any other file Mooncake's JSON "
    "lines (timestamp, input_length, output_length, hash_ids)"
)


class PromptPart(NamedTuple):
    content: int
    length: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One recorded request. `at` is in seconds from the start of the recording."""

    at: float
    parts: tuple[PromptPart, ...]
    output: int  # tokens written
    priority: int = 0
    determined: bool = False  # an equal prompt would get an equal answer: temperature 0, or a seed
    topic: int | None = None  # equal for questions that ask the same; None: not recorded

    @property
    def prompt(self) -> int:
        return sum(part.length for part in self.parts)

    def tokens(self) -> list[int]:
        """Made-up token ids: one for the first token of a content, one for all its others. Two prompts have the same
        ids up to where their parts differ. Few ids are few objects: plans simulate millions of blocks."""
        ids: list[int] = []
        for content, length in self.parts:
            ids += ([4 * content] + [4 * content + 1] * (length - 1))[:length]  # none is a simulated output token
        return ids


class Contents:
    """Numbers for contents that no other prompt has: down from a large number; shared contents count up from 0."""

    def __init__(self, first: int = 1 << 34):
        self.next = first

    def own(self, length: int) -> PromptPart:
        self.next -= 1
        return PromptPart(self.next, length)


def read_trace(path: str | Path, limit: int | None = None) -> list[Arrival]:
    """A trace in Azure's format (.csv) or Mooncake's (.jsonl), sorted by arrival, starting at 0."""
    path = Path(path)
    try:
        with path.open() as lines:
            rows = list(_first(azure(lines) if path.suffix == ".csv" else mooncake(lines), limit))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): check the path.") from None
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"{path}: {FORMATS} ({type(error).__name__}: {error}).") from None
    if not rows:
        raise InputError(f"{path}: holds no requests. {FORMATS[0].upper()}{FORMATS[1:]}.")
    return from_zero(rows)


def _first(rows: Iterator[Arrival], limit: int | None) -> Iterator[Arrival]:
    for number, row in enumerate(rows):
        if limit is not None and number >= limit:
            return
        yield row


def azure(lines: Iterable[str]) -> Iterator[Arrival]:
    """TIMESTAMP, ContextTokens, GeneratedTokens. The format does not say what prompts share."""
    contents = Contents()
    for row in csv.DictReader(lines):
        when = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()  # Python reads six digits of the seven
        prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        yield Arrival(when, (contents.own(max(1, prompt)),), max(1, output))


def mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    """timestamp in ms, lengths, and an id for each 512 tokens: equal ids mean equal text up to there."""
    for line in lines:
        if not line.strip():
            continue
        row = json.loads(line)
        length, parts = max(1, int(row["input_length"])), []
        for content in row["hash_ids"]:
            parts.append(PromptPart(int(content), min(MOONCAKE_BLOCK, length)))
            length -= parts[-1].length
            if length <= 0:
                break
        if length > 0:
            parts.append(PromptPart((1 << 33) + int(row["hash_ids"][-1] if row["hash_ids"] else 0), length))
        yield Arrival(int(row["timestamp"]) / 1000, tuple(parts), max(1, int(row["output_length"])))


def from_zero(rows: Sequence[Arrival]) -> list[Arrival]:
    ordered = sorted(rows, key=lambda row: row.at)
    return [replace(row, at=row.at - ordered[0].at) for row in ordered]


def faster(rows: Sequence[Arrival], factor: float) -> list[Arrival]:
    """The same requests, arriving `factor` times as fast."""
    return [replace(row, at=row.at / factor) for row in rows]


def at_rate(rows: Sequence[Arrival], per_second: float) -> list[Arrival]:
    """The same requests at another rate; those that all arrived at once are spread evenly."""
    recorded = rate(rows)
    if recorded == float("inf"):
        return [replace(row, at=number / per_second) for number, row in enumerate(rows)]
    return faster(rows, per_second / recorded)


def shorter(rows: Sequence[Arrival], scale: float) -> list[Arrival]:
    """The same requests with lengths divided by `scale`, so that a small machine can serve them."""
    cut = []
    for row in rows:
        parts = tuple(PromptPart(part.content, max(1, round(part.length / scale))) for part in row.parts)
        cut.append(replace(row, parts=parts, output=max(2, round(row.output / scale))))
    return cut


def rate(rows: Sequence[Arrival]) -> float:
    """Requests a second, as recorded."""
    span = rows[-1].at - rows[0].at
    return (len(rows) - 1) / span if span > 0 else float("inf")


def mean_lengths(rows: Sequence[Arrival]) -> tuple[float, float]:
    """Mean tokens of a prompt and of an answer."""
    return sum(row.prompt for row in rows) / len(rows), sum(row.output for row in rows) / len(rows)


def shared_first(rows: Sequence[Arrival]) -> list[Arrival]:
    """The prompts with the parts that only one of them has moved behind those that several share."""
    seen: dict[int, int] = {}
    for row in rows:
        for content in {part.content for part in row.parts}:
            seen[content] = seen.get(content, 0) + 1
    return [replace(row, parts=tuple(sorted(row.parts, key=lambda part: -min(seen[part.content], 2)))) for row in rows]


def fresh_tokens(arrivals: Sequence[Arrival]) -> list[int]:
    """For each prompt, the tokens whose content no earlier prompt had at any position."""
    seen: set[int] = set()
    fresh = []
    for arrival in arrivals:
        fresh.append(sum(part.length for part in arrival.parts if part.content not in seen))
        seen.update(part.content for part in arrival.parts)
    return fresh


def repeat(rows: Sequence[Arrival], count: int) -> list[Arrival]:
    """`count` arrivals: the recording repeated by other users. Text that unrelated prompts begin with stays the same;
    text of one prompt, or of one growing conversation, is new in each repetition."""
    public = _public(rows)
    period = (rows[-1].at - rows[0].at) * len(rows) / max(1, len(rows) - 1)
    contents, made = Contents(1 << 36), []
    renewed: dict[int, PromptPart] = {}
    for number in range(count):
        row, turn = rows[number % len(rows)], number // len(rows)
        if number % len(rows) == 0:
            renewed = {}
        parts = row.parts
        if turn:
            for part in parts:
                if part.content not in public and part.content not in renewed:
                    renewed[part.content] = contents.own(part.length)
            parts = tuple(PromptPart(renewed.get(part.content, part).content, part.length) for part in parts)
        made.append(replace(row, at=row.at + turn * period, parts=parts))
    return made


def _public(rows: Sequence[Arrival]) -> set[int]:
    """Contents that unrelated prompts share: those with several different successors, those that end several prompts,
    and all contents before them. Within one conversation a content has one successor only."""
    after: dict[int, set[int]] = {}
    ends: dict[int, int] = {}
    for row in rows:
        for part, following in pairwise(row.parts):
            after.setdefault(part.content, set()).add(following.content)
        ends[row.parts[-1].content] = ends.get(row.parts[-1].content, 0) + 1
    found = {content for content, following in after.items() if len(following) > 1}
    found |= {content for content, times in ends.items() if times > 1}
    for row in rows:
        last = max((place for place, part in enumerate(row.parts) if part.content in found), default=-1)
        found.update(part.content for part in row.parts[:last])
    return found
