"""/health, /health/live, /health/ready and /metrics."""

from __future__ import annotations

from twostroke.serve.base_service import BaseService
from twostroke.serve.transport.http import Exchange


async def live(service: BaseService, exchange: Exchange) -> None:
    await exchange.respond(200, {"status": "ok", "reason": None})


async def ready(service: BaseService, exchange: Exchange) -> None:
    """This route needs no key, so it gives no reason."""
    good = service.healthy and not service.draining
    await exchange.respond(200 if good else 503, {"status": "ok" if good else "unavailable", "reason": None})


async def health(service: BaseService, exchange: Exchange) -> None:
    """Judged by the engine's progress: one that is stopped, stuck, dead or far too slow is not healthy."""
    trouble = service.trouble() or service.slow()
    if service.draining:
        trouble = trouble or "the server is shutting down"
    document = {"status": "unavailable" if trouble else "ok", "reason": trouble, **service.state()}
    await exchange.respond(503 if trouble else 200, document)


async def metrics(service: BaseService, exchange: Exchange) -> None:
    service.metrics.up.set(1 if service.healthy else 0)
    await exchange.respond(200, service.metrics.render(), kind=service.metrics.content_type)
