"""/twostroke/…: settings, steps and arrivals as JSON."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.config import Config, Resolved
from twostroke.engine.settings import LIVE
from twostroke.metrics.steplog import Step
from twostroke.model.arch import Arch, arch_document
from twostroke.remote.ended import EndedRequest
from twostroke.schedule.policy import POLICIES
from twostroke.serve.errors import ApiError, bad_request
from twostroke.serve.protocol.base import Shape
from twostroke.serve.work import step_work

NAMES = tuple(item.name for item in fields(Resolved) if item.name not in ("layout", "reasons"))
FIXED = (frozenset(item.name for item in fields(Config)) | {"max_queue"}) - set(LIVE)
LEFT_OUT: Any = None  # a value of null is refused as of the wrong type
Count = Annotated[int, Field(ge=1, le=1 << 20)]


class SettingsRequest(Shape):
    """Settings that a running engine takes. Whatever is left out stays as it is."""

    max_batch_tokens: Count = LEFT_OUT
    max_requests: Count = LEFT_OUT
    batching: Literal["continuous", "static"] = LEFT_OUT
    chunked_prefill: bool = LEFT_OUT
    max_gap: Annotated[float, Field(gt=0, le=3600)] = LEFT_OUT
    policy: Annotated[str, Field(max_length=64, json_schema_extra={"enum": list(POLICIES)})] = LEFT_OUT
    prefix_cache: bool = LEFT_OUT


class StepsQuery(Shape):
    since: Annotated[int, Field(ge=0)] = 0
    limit: Annotated[int, Field(ge=1, le=1024)] = 256


class ArrivalsQuery(Shape):
    limit: Annotated[int, Field(ge=1, le=1024)] = 1024


def fixed(name: str) -> ApiError:
    option = "--max-queue" if name == "max_queue" else f"--set {name}=VALUE"
    message = f"{name}: cannot change while the engine runs: start the server again with {option}."
    return bad_request(message, name, "needs_restart")


def settings(now: Resolved, given: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Every setting with its value, why it has it, and whether it can change now."""
    described = {}
    for name in NAMES:
        if name in changed:
            reason = "changed while running"
        elif name in given:
            reason = "given at the start"
        else:
            reason = now.reasons.get(name, "the default")
        described[name] = {"value": getattr(now, name), "reason": reason, "live": name in LIVE}
    return described


def model(arch: Arch, now: Resolved) -> dict[str, Any]:
    layout = now.layout
    return {
        "arch": arch_document(arch),
        "layout": layout.document(),
    }


def step(one: Step, arch: Arch, now: Resolved, weight_bytes: int, wall: float) -> dict[str, Any]:
    """`wall`: what to add to the engine's clock to get the time of day."""
    reading = sum(piece.count for piece in one.pieces if piece.reading)
    return {
        "number": one.number,
        "time": one.launched + wall,
        "seconds": one.seconds,
        "prefill_tokens": reading,
        "decode_tokens": one.tokens - reading,
        "sampled": one.sampled,
        "running": one.running,
        "waiting": one.waiting,
        "context": sum(piece.start + piece.count for piece in one.pieces),
        "blocks": {"total": now.kv_blocks, **one.blocks._asdict()},
        **step_work(arch, now, weight_bytes, one),
        "lanes": [
            {"request": number, "stage": "prefill" if reading else "decode", "start": start, "tokens": count}
            for number, start, count, reading in one.pieces
        ],
    }


def arrival(one: EndedRequest, wall: float) -> dict[str, Any]:
    timeline = one.timeline
    return {
        "request": one.request,
        "time": timeline.arrival + wall,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": one.output_tokens,
        "max_tokens": one.max_tokens,
        "queue_s": timeline.queue,
        "prefill_s": timeline.prefill,
        "decode_s": timeline.decode,
        "ttft_s": one.ttft,
        "tpot_s": one.tpot,
        "e2e_s": timeline.e2e,
        "preemptions": timeline.preemptions,
        "priority": one.priority,
        "finish_reason": one.reason,
        "parts": one.segments,
    }
