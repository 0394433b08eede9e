"""/twostroke/settings, /twostroke/steps and /twostroke/arrivals: for the operator of the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, create_model

from twostroke.cluster.member import Member
from twostroke.config import SETTINGS, Resolved
from twostroke.draft.replay import total
from twostroke.engine.settings import LIVE
from twostroke.errors import ConfigError
from twostroke.metrics import steplog
from twostroke.metrics.steplog import Step
from twostroke.model.arch import Arch
from twostroke.model.document import arch_document
from twostroke.remote.ended import KEPT, EndedRequest, by_arrival
from twostroke.serve.api.workers import pools_of
from twostroke.serve.costs import step_costs
from twostroke.serve.fields import Payload, ShortText, validate_query
from twostroke.serve.off_loop import LARGE
from twostroke.serve.service import Service
from twostroke.serve.transport import errors
from twostroke.serve.transport.http import Exchange, dump_large

FIXED = {*SETTINGS, "max_queue"} - set(LIVE)
JSON_TYPES: dict[type, Any] = {  # `Config` checks the values; these types keep them within what the wire carries
    int: Annotated[int, Field(ge=1, le=1 << 20)],
    float: Annotated[float, Field(gt=0, le=3600)],
    str: Annotated[str, Field(max_length=64)],
    bool: bool,
}


def settings_payload() -> type[Payload]:
    """The settings that can change while the engine runs, with the types of their table. null is refused."""
    given: dict[str, Any] = {name: (JSON_TYPES[SETTINGS[name].kind], None) for name in LIVE}
    return create_model("SettingsRequest", __base__=Payload, **given)


SettingsRequest = settings_payload()


class StepsQuery(Payload):
    since: Annotated[int, Field(ge=0)] = 0
    limit: Annotated[int, Field(ge=1, le=1024)] = 256
    worker: ShortText | None = None  # of a deployment


class ArrivalsQuery(Payload):
    limit: Annotated[int, Field(ge=1, le=1024)] = 1024


# ---- settings ------------------------------------------------------------------------------------------------------


async def settings(service: Service, exchange: Exchange) -> None:
    await exchange.respond(200, settings_document(service))


async def change(service: Service, exchange: Exchange) -> None:
    try:
        request = await service.read(SettingsRequest, exchange)
    except errors.ApiError as error:
        raise needs_restart(error.param) if error.param in FIXED else error from None
    wanted = request.model_dump(exclude_unset=True)
    if not wanted:
        raise errors.bad_request(f"The body names no setting: give one of {', '.join(LIVE)}.")
    try:
        await service.change(wanted)
    except ConfigError as error:
        named = [name for name in wanted if name in str(error)]
        raise errors.bad_request(str(error), named[0] if named else None, "invalid_value") from None
    errors.log.warning("%s changed %s", exchange.caller.name, wanted)
    await exchange.respond(200, settings_document(service))


def needs_restart(name: str) -> errors.ApiError:
    option = "--max-queue" if name == "max_queue" else f"--set {name}=VALUE"
    message = f"{name}: cannot change while the engine runs: start the server again with {option}."
    return errors.bad_request(message, name, "needs_restart")


def settings_document(service: Service) -> dict[str, Any]:
    now = service.settings
    max_queue, why = service.max_queue
    described = {name: setting(service, now, name) for name in SETTINGS}
    described["max_queue"] = {"value": max_queue, "reason": why, "live": False}
    return {
        "model": service.name,
        **service.machine,
        "weight_bytes": service.weight_bytes,
        "arch": arch_document(service.arch),
        "layout": now.layout.document(),
        "settings": described,
        "workers": service.workers,
        "answer_cache": "off" if service.answers is None else service.answers.cache.options.tier,
    }


def setting(service: Service, now: Resolved, name: str) -> dict[str, Any]:
    """A setting's value, the reason for it, and whether it can change while the engine runs."""
    if name in service.changed_settings:
        reason = "changed while running"
    elif name in service.given_settings:
        reason = "given at the start"
    else:
        reason = now.reasons.get(name, "the default")
    return {"value": getattr(now, name), "reason": reason, "live": name in LIVE}


# ---- steps ---------------------------------------------------------------------------------------------------------


async def steps(service: Service, exchange: Exchange) -> None:
    query = validate_query(StepsQuery, exchange.query)
    document = await steps_document(service, query.since, query.limit, query.worker)
    await exchange.respond(200, await service.off_loop(exchange, LARGE, lambda: dump_large(document())))


async def steps_document(
    service: Service, since: int, limit: int, worker: str | None = None
) -> Callable[[], dict[str, Any]]:
    """Asks the engine for its steps; in a deployment that of one worker. The function that is returned makes the
    document and may run in a thread."""
    member = member_of(service, worker)
    found = await service.steps(since, limit, None if member is None else member.worker)
    now, restarts, wall = service.settings, service.restarts, service.wall
    if member is not None:
        now, restarts = member.settings, member.losses
    return lambda: {
        "worker": None if member is None else member.name,
        "restarts": restarts,
        "kept": steplog.KEPT,
        "now": service.clock() + wall,
        "last": found[-1].number if found else since,
        "steps": [step_document(one, service.arch, now, service.weight_bytes, wall) for one in found],
    }


def member_of(service: Service, name: str | None) -> Member | None:
    """The worker of a deployment that is asked for; without a name, the one that stands for all. None: there is one
    engine."""
    if name is None and not service.workers:
        return None
    try:
        return pools_of(service).named(name)
    except ConfigError as error:
        raise errors.bad_request(str(error), "worker", "invalid_value") from None


def step_document(step: Step, arch: Arch, now: Resolved, weight_bytes: int, wall: float) -> dict[str, Any]:
    """wall: added to the engine's clock, it gives unix time."""
    reading = sum(work.count for work in step.works if work.kind == "read")
    return {
        "number": step.number,
        "time": step.launched + wall,
        "seconds": step.seconds,
        "prefill_tokens": reading,
        "decode_tokens": step.tokens - reading,
        "sampled": step.sampled,
        "running": step.running,
        "waiting": step.waiting,
        "context": sum(work.start + work.count for work in step.works),
        "blocks": {"total": now.kv_blocks, **step.blocks._asdict()},
        **step_costs(arch, now, weight_bytes, step),
        "lanes": [
            {"request": number, "stage": "prefill" if kind == "read" else "decode", "start": start, "tokens": count}
            for number, start, count, kind in step.works
        ],
    }


# ---- arrivals ------------------------------------------------------------------------------------------------------


async def arrivals(service: Service, exchange: Exchange) -> None:
    query = validate_query(ArrivalsQuery, exchange.query)
    document = arrivals_document(service, query.limit)
    await exchange.respond(200, await service.off_loop(exchange, LARGE, lambda: dump_large(document())))


def arrivals_document(service: Service, limit: int) -> Callable[[], dict[str, Any]]:
    """The function that is returned makes the document and may run in a thread."""
    ended, recorder = service.ended_requests(limit), service.topics

    def topic_of(request: int) -> int | None:
        return None if recorder is None else recorder.topics.of(request)

    return lambda: {
        "now": service.clock() + service.wall,
        "kept": KEPT,
        "arrivals": [arrival_document(one, service.wall, topic_of(one.request)) for one in by_arrival(ended)],
        "lookup": total(one.lookup for one in ended if one.lookup is not None)._asdict(),
    }


def arrival_document(one: EndedRequest, wall: float, topic: int | None) -> dict[str, Any]:
    """topic: equal for questions that ask the same; None: not recorded."""
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
        "transfer_s": timeline.transfer,
        "decode_queue_s": timeline.decode_queue,
        "ttft_s": one.ttft,
        "tpot_s": one.tpot,
        "e2e_s": timeline.e2e,
        "preemptions": timeline.preemptions,
        "priority": one.priority,
        "determined": one.determined,
        "topic": topic,
        "finish_reason": one.reason,
        "parts": one.segments,
    }
