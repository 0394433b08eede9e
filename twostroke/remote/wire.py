"""What the two processes of a server say to each other: msgpack with a fixed schema, framed by length (frames.py).
Torch-free.

    parent ─▶ child    Hello once, then Orders: requests that came, ids of requests that go; and questions
    child ─▶ parent    Stage and Ready (or Failed) while it starts, then a Report for each step, Beat now and then, and
                       the answer to each question under its number

Every message is an array whose first element is its kind, but for the Report: there is one after every step, and nearly
all of it is numbers, so those are written as such. Whatever does not have exactly the expected shape is a
`WireError`: the peer is our own code on an inherited socket pair, so that means a bug, and nobody guesses on.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from twostroke.config import Resolved
from twostroke.kv.layout import KVGroup, KVLayout
from twostroke.metrics.counts import Counts
from twostroke.metrics.steplog import Step, make_step
from twostroke.metrics.timeline import Facts
from twostroke.remote.frames import PACKER, REPORT_MARK, WireError, frame, framed, listed, unpack
from twostroke.sampling import Grammar, SamplingParams
from twostroke.types import Event, FinishReason, Request, TokenLogprobs

REPORT = f"<cI2d{len(Counts._fields)}q"  # its mark, how many tokens follow, when it was, seconds of all steps, counts
REPORT_SIZE = struct.calcsize(REPORT)
PAIR = struct.calcsize("<2q")
DEFAULTS = {item.name: getattr(SamplingParams(), item.name) for item in fields(SamplingParams)}


class Hello(NamedTuple):
    """The first word: which model to run and how. `log_level` is a number of the logging module."""

    model: str
    settings: dict[str, Any]
    log_level: int


class Orders(NamedTuple):
    """Requests, each with the number of its samples that are asked for (see Request.siblings), and ids to abort."""

    requests: tuple[tuple[Request, int], ...]
    aborts: tuple[int, ...]


class Change(NamedTuple):
    """Take these settings from the next plan on. Answered by Changed."""

    question: int
    wanted: dict[str, Any]


class Changed(NamedTuple):
    """The settings as they are now, or why nothing was changed."""

    question: int
    settings: Resolved | None
    error: str


class Recall(NamedTuple):
    """The newest `limit` steps after number `since`. Answered by Steps."""

    question: int
    since: int
    limit: int


class Steps(NamedTuple):
    question: int
    steps: tuple[Step, ...]


class Stage(NamedTuple):
    """A stage of the start began, or moved on (done of total bytes)."""

    name: str
    done: int
    total: int


class Ready(NamedTuple):
    settings: Resolved
    seconds: dict[str, float]  # of each stage of the start
    longest_step: float  # what a full step may take, extrapolated from the warm-up
    machine: str  # the processor or the card that computes, by its own name


class Failed(NamedTuple):
    """The engine could not start. `kind` is the name of the error's class."""

    kind: str
    message: str


class Beat(NamedTuple):
    """The process runs. `steps` counts those begun; `working`: the last of them has not ended."""

    steps: int
    working: bool


class Report(NamedTuple):
    """One step: its end on the shared clock, what it brought, and the seconds all steps took so far. `tokens`: (id,
    token) of requests of which that is all there is to say. They are most of them, so they cost the least."""

    at: float
    tokens: tuple[tuple[int, int], ...]
    news: tuple[Event, ...]
    counts: Counts
    step_seconds: float


# ---- each message, there and back ----------------------------------------------------------------------------------


def pack_hello(hello: Hello) -> bytes:
    return frame(["hello", *hello])


def read_hello(message: list[Any]) -> Hello:
    model, settings, level = parts(message, "hello", str, dict, int)
    return Hello(model, settings, level)


def pack_orders(orders: Orders) -> bytes:
    requests = [
        [samples, r.id, array("i", r.tokens).tobytes(), pack_params(r.params), r.seed, r.arrival, r.limit,
         list(r.stop_ids), r.salt, r.sample, r.written] for r, samples in orders.requests
    ]  # fmt: skip
    return frame(["orders", requests, orders.aborts])


def read_orders(message: list[Any]) -> Orders:
    requests, aborts = parts(message, "orders", list, list)
    return Orders(tuple(read_request(request) for request in requests), tuple(numbers(aborts)))


def read_request(value: Any) -> tuple[Request, int]:
    samples, number, tokens, params, seed, arrival, limit, stops, salt, sample, written = parts(
        ["request", *listed(value)], "request", int, int, bytes, dict, int, float, int, list, bytes, int, int
    )
    words = array("i")
    words.frombytes(tokens)
    stop_ids = frozenset(numbers(stops))
    request = Request(
        number, tuple(words), read_params(params), seed, arrival, limit, stop_ids, salt, sample, written
    )  # fmt: skip
    return request, samples


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """Only what differs from the defaults: most requests set three fields of twenty."""
    changed = {}
    for name, default in DEFAULTS.items():
        value = getattr(params, name)
        if value != default:
            if isinstance(value, Mapping):
                value = list(value.items())
            changed[name] = [value.kind, value.source] if isinstance(value, Grammar) else value
    return changed


def read_params(value: dict[str, Any]) -> SamplingParams:
    if "logit_bias" in value:
        value["logit_bias"] = dict(value["logit_bias"])
    try:
        if "grammar" in value:
            value["grammar"] = Grammar(*value["grammar"])
        return SamplingParams(**value)
    except (TypeError, ValueError) as error:
        raise WireError(f"params: {error}") from None


def pack_question(question: Change | Recall) -> bytes:
    return frame(["change" if isinstance(question, Change) else "recall", *question])


def read_from_parent(message: list[Any]) -> Orders | Change | Recall:
    kind = message[0]
    if kind == "change":
        return Change(*parts(message, kind, int, dict))
    if kind == "recall":
        return Recall(*parts(message, kind, int, int, int))
    return read_orders(message)


def pack_changed(changed: Changed) -> bytes:
    settings = None if changed.settings is None else asdict(changed.settings)
    return frame(["changed", changed.question, settings, changed.error])


def read_changed(message: list[Any]) -> Changed:
    question, settings, error = parts(message, "changed", int, dict | None, str)
    return Changed(question, None if settings is None else read_resolved(settings), error)


def pack_steps(steps: Steps) -> bytes:
    return frame(["steps", *steps])


def read_steps(message: list[Any]) -> Steps:
    question, steps = parts(message, "steps", int, list)
    return Steps(question, tuple(read_step(step) for step in steps))


def read_step(value: Any) -> Step:
    raw = parts(["step", *listed(value)], "step", int, float, float, list, int, list, int, int)
    numbers(raw[5])
    try:
        return make_step(raw)
    except TypeError as error:
        raise WireError(f"step: {error}") from None


def pack_stage(stage: Stage) -> bytes:
    return frame(["stage", *stage])


def pack_ready(ready: Ready) -> bytes:
    return frame(["ready", asdict(ready.settings), ready.seconds, ready.longest_step, ready.machine])


def read_ready(message: list[Any]) -> Ready:
    settings, seconds, longest, machine = parts(message, "ready", dict, dict, float, str)
    return Ready(read_resolved(settings), seconds, longest, machine)


def read_resolved(value: dict[str, Any]) -> Resolved:
    try:
        layout = value.pop("layout")
        groups = tuple(KVGroup(group["window"], tuple(group["layers"])) for group in layout.pop("groups"))
        return Resolved(layout=KVLayout(groups=groups, **layout), **value)
    except (TypeError, KeyError) as error:
        raise WireError(f"settings: {error}") from None


def pack_failed(failed: Failed) -> bytes:
    return frame(["failed", *failed])


def pack_beat(beat: Beat) -> bytes:
    return frame(["beat", *beat])


def pack_report(report: Report) -> bytes:
    at, tokens, news, counts, seconds = report
    flat = [number for pair in tokens for number in pair]
    data = struct.pack(f"{REPORT}{len(flat)}q", REPORT_MARK, len(tokens), at, seconds, *counts, *flat)
    return framed(data + PACKER.pack([pack_news(one) for one in news]) if news else data)


def pack_news(news: Event) -> list[Any]:
    prompt = [[position, *scores] for position, scores in news.prompt_logprobs.items()]
    reason = None if news.finish_reason is None else news.finish_reason.value
    return [news.request_id, news.token_ids, reason, news.logprobs, prompt, news.error, news.facts]


def read_report(message: list[Any]) -> Report:
    (body,) = parts(message, "report", bytes)
    try:
        _, count, at, seconds, *counts = struct.unpack_from(REPORT, body)
        end = REPORT_SIZE + count * PAIR
        tokens = tuple(struct.iter_unpack("<2q", body[REPORT_SIZE:end]))
    except struct.error as error:
        raise WireError(f"report: {error}") from None
    if len(tokens) != count:
        raise WireError(f"report: {len(tokens)} tokens where {count} belong")
    news = tuple(map(read_news, unpack(body[end:]))) if len(body) > end else ()
    return Report(at, tokens, news, Counts(*counts), seconds)


def read_news(value: Any) -> Event:
    request, tokens, reason, logprobs, prompt, error, facts = parts(
        ["news", *listed(value)], "news", int, list, str | None, list, list, str | None, list | None
    )
    return Event(
        request,
        tuple(numbers(tokens)),
        None if reason is None else FinishReason(reason),
        tuple(read_scores(one) for one in logprobs),
        {position: read_scores(rest) for position, *rest in prompt},
        error,
        None if facts is None else Facts(*facts),
    )


def read_scores(value: Any) -> TokenLogprobs:
    token, logprob, top = parts(["scores", *listed(value)], "scores", int, float, list)
    return TokenLogprobs(token, logprob, tuple((number, score) for number, score in top))


def read_from_child(message: list[Any]) -> Stage | Ready | Failed | Beat | Report | Changed | Steps:
    kind = message[0]
    if kind == "report":
        return read_report(message)
    if kind == "beat":
        return Beat(*parts(message, kind, int, bool))
    if kind == "stage":
        return Stage(*parts(message, kind, str, int, int))
    if kind == "ready":
        return read_ready(message)
    if kind == "failed":
        return Failed(*parts(message, kind, str, str))
    if kind == "changed":
        return read_changed(message)
    if kind == "steps":
        return read_steps(message)
    raise WireError(f"unknown kind {kind[:40]!r}")


def parts(message: list[Any], kind: str, *types: Any) -> list[Any]:
    """The rest of a message of this kind, each part of its type."""
    if message[0] != kind or len(message) != len(types) + 1:
        raise WireError(f"expected {kind} with {len(types)} parts, got {message[0]} with {len(message) - 1}")
    for value, expected in zip(message[1:], types, strict=True):
        if not isinstance(value, expected):
            raise WireError(f"{kind}: {type(value).__name__} where {expected} belongs")
    return message[1:]


def numbers(values: list[Any]) -> list[int]:
    if not all(type(value) is int for value in values):
        raise WireError("something else than whole numbers in a list of them")
    return values
