"""/twostroke/workers: the workers of a deployment, and their roles, for the operator."""

from __future__ import annotations

from typing import Any, Literal

from twostroke.cluster.member import Member
from twostroke.cluster.pools import Pools
from twostroke.cluster.router import Role
from twostroke.errors import ConfigError
from twostroke.serve.fields import Name, Payload
from twostroke.serve.service import Service
from twostroke.serve.transport import errors
from twostroke.serve.transport.http import Exchange


class RoleRequest(Payload):
    """The worker does this from its next request on; what it has it ends."""

    worker: Name
    role: Literal["prefill", "decode", "both"]


def pools_of(service: Service) -> Pools:
    client = service.engine.client
    if not isinstance(client, Pools):
        message = "This server has one engine and no workers: `twostroke cluster` starts several."
        raise errors.ApiError(404, message, code="no_workers", reason="not_found")
    return client


async def show(service: Service, exchange: Exchange) -> None:
    await exchange.respond(200, document(pools_of(service)))


async def change(service: Service, exchange: Exchange) -> None:
    pools = pools_of(service)
    request = await service.read(RoleRequest, exchange)
    try:
        pools.change_role(request.worker, Role(request.role))
    except ConfigError as error:
        raise errors.bad_request(str(error), str(error).split(":")[0], "invalid_value") from None
    errors.log.warning("%s made %s a worker for %s", exchange.caller.name, request.worker, request.role)
    await exchange.respond(200, document(pools))


def document(pools: Pools) -> dict[str, Any]:
    counts, link = pools.counts, pools.link.link
    return {
        "workers": [worker(member) for member in pools.members.values()],
        "transfers": {
            "in_flight": pools.moving,
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
    }


def worker(member: Member) -> dict[str, Any]:
    counts, speed = member.counts, member.speed
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
        "prompt_tokens_s": 1 / speed.token if speed.token else None,
        "step_s": speed.step,
        "losses": member.losses,
    }
