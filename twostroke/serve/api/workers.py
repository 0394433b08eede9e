"""/twostroke/workers: the workers of a deployment, and their roles, for the operator."""

from __future__ import annotations

from typing import Any, Literal

from twostroke.cluster.flight import Flight
from twostroke.cluster.journal import EndedTransfer
from twostroke.cluster.member import Member
from twostroke.cluster.pools import Pools
from twostroke.cluster.router import Role
from twostroke.errors import ConfigError
from twostroke.serve.fields import Payload, ShortText
from twostroke.serve.service import Service
from twostroke.serve.transport import errors
from twostroke.serve.transport.http import Exchange

SHOWN = 64  # requests on their way


class RoleRequest(Payload):
    """The worker does this from its next request on; what it has it ends."""

    worker: ShortText
    role: Literal["prefill", "decode", "both"]


def pools_of(service: Service) -> Pools:
    client = service.engine.client
    if not isinstance(client, Pools):
        message = "This server has one engine and no workers: `twostroke cluster` starts several."
        raise errors.ApiError(404, message, code="no_workers", reason="not_found")
    return client


async def show(service: Service, exchange: Exchange) -> None:
    await exchange.respond(200, document(pools_of(service), service.wall))


async def change(service: Service, exchange: Exchange) -> None:
    pools = pools_of(service)
    request = await service.read(RoleRequest, exchange)
    try:
        pools.change_role(request.worker, Role(request.role))
    except ConfigError as error:
        raise errors.bad_request(str(error), str(error).split(":")[0], "invalid_value") from None
    errors.log.warning("%s made %s a worker for %s", exchange.caller.name, request.worker, request.role)
    await exchange.respond(200, document(pools, service.wall))


def document(pools: Pools, wall: float) -> dict[str, Any]:
    """wall: added to the engine's clock, it gives unix time."""
    counts, link = pools.counts, pools.link.link
    return {
        "workers": [worker(pools, member) for member in pools.members.values()],
        "transfers": {
            "in_flight": len(pools.moving),
            "now": [moving(flight, wall) for flight in pools.moving[:SHOWN]],
            "last": [travelled(entry, wall) for entry in pools.journal.last],
            "done": counts.done,
            "failed": dict(counts.failed),
            "blocks": counts.blocks,
            "early_blocks": counts.early,
            "shared_blocks": counts.shared,
            "bytes": counts.bytes,
            "seconds": counts.seconds,
            "bandwidth": link.bandwidth,
            "latency": link.latency,
        },
        "resumed": pools.resumed,
        "route": "apart" if pools.apart else "cost",
        "ttft": pools.ttft,
    }


def moving(flight: Flight, wall: float) -> dict[str, Any]:
    """A request on its way."""
    to = "" if flight.member is None else flight.member.name
    return {"request": flight.request.id, "to": to, "since": flight.moving + wall}


def travelled(entry: EndedTransfer, wall: float) -> dict[str, Any]:
    moved = entry.moved
    return {
        "time": entry.at + wall,
        "kind": entry.kind,
        "request": entry.request,
        "from": entry.source,
        "to": entry.to,
        "blocks": moved.blocks,
        "bytes": moved.bytes,
        "seconds": moved.on_way,
        "waited_s": moved.waited,
        "failed": moved.failed,
    }


def worker(pools: Pools, member: Member) -> dict[str, Any]:
    counts, speed, journal = member.counts, member.speed, pools.journal
    return {
        "name": member.name,
        "role": member.role.value,
        "healthy": member.usable,
        "trouble": member.worker.trouble(),
        "machine": member.machine,
        "running": counts.running,
        "waiting": counts.waiting,
        "queued_tokens": member.queued,
        "streams": member.streams,
        "blocks": {"total": counts.blocks_total, "free": counts.blocks_free, "cached": counts.blocks_cached},
        "leases": member.worker.held.leases,
        "sent_bytes": journal.sent[member.name],
        "received_bytes": journal.received[member.name],
        "received_s": journal.seconds[member.name],
        "prompt_tokens_s": 1 / speed.token if speed.token else None,
        "step_s": speed.step,
        "losses": member.losses,
    }
