"""The routes of those who run the server: settings that can change while it runs, its last steps and requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twostroke.errors import ConfigError
from twostroke.metrics import steplog
from twostroke.remote import ended as records
from twostroke.remote.client import EngineError
from twostroke.serve import errors
from twostroke.serve.http import Call, dump
from twostroke.serve.protocol import admin
from twostroke.serve.protocol.base import validate, validate_query
from twostroke.serve.service import Service

LARGE = 1 << 20  # these documents are written in a thread: streams keep their pace


async def settings(service: Service, call: Call) -> None:
    await call.respond(200, settings_document(service))


async def change(service: Service, call: Call) -> None:
    try:
        request = validate(admin.SettingsRequest, await call.body())
    except errors.ApiError as error:
        raise admin.fixed(error.param) if error.param in admin.FIXED else error from None
    wanted = request.model_dump(exclude_unset=True)
    if not wanted:
        raise errors.bad_request(f"The body names no setting: give one of {', '.join(admin.LIVE)}.")
    try:
        await service.engine.change(wanted)
    except ConfigError as error:
        named = [name for name in wanted if name in str(error)]
        raise errors.bad_request(str(error), named[0] if named else None, "invalid_value") from None
    except EngineError as error:
        raise errors.from_engine(error) from None
    errors.log.warning("%s changed %s", call.caller.name, wanted)
    await call.respond(200, settings_document(service))


def settings_document(service: Service) -> dict[str, Any]:
    engine = service.engine
    client, now = engine.client, engine.intake.settings
    assert client.ready is not None
    described = admin.settings(now, client.settings, engine.changed)
    described["max_queue"] = {"value": engine.max_queue, "reason": engine.queue_reason, "live": False}
    return {
        "model": service.name,
        "machine": client.ready.machine,
        "restarts": client.restarts,
        "rows": client.ready.settings.max_requests,
        "weight_bytes": engine.weight_bytes,
        **admin.model(engine.arch, now),
        "settings": described,
    }


async def steps(service: Service, call: Call) -> None:
    query = validate_query(admin.StepsQuery, call.query)
    try:
        document = await steps_document(service, query.since, query.limit)
    except EngineError as error:
        raise errors.from_engine(error) from None
    await call.respond(200, await service.off_loop(LARGE, lambda: dump(document())))


async def steps_document(service: Service, since: int, limit: int) -> Callable[[], dict[str, Any]]:
    """Asks the engine now; what is returned writes the answer, in whatever thread."""
    engine, wall = service.engine, service.wall
    found = await engine.steps(since, limit)
    now, restarts = engine.intake.settings, engine.client.restarts
    return lambda: {
        "restarts": restarts,
        "kept": steplog.KEPT,
        "now": engine.clock() + wall,
        "last": found[-1].number if found else since,
        "steps": [admin.step(one, engine.arch, now, engine.weight_bytes, wall) for one in found],
    }


async def arrivals(service: Service, call: Call) -> None:
    query = validate_query(admin.ArrivalsQuery, call.query)
    document = arrivals_document(service, query.limit)
    await call.respond(200, await service.off_loop(LARGE, lambda: dump(document())))


def arrivals_document(service: Service, limit: int) -> Callable[[], dict[str, Any]]:
    kept = service.engine.ended.latest(limit)
    return lambda: {
        "now": service.engine.clock() + service.wall,
        "kept": records.KEPT,
        "arrivals": [admin.arrival(one, service.wall) for one in records.by_arrival(kept)],
    }
