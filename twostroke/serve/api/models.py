"""/v1/models."""

from __future__ import annotations

from typing import Any

from twostroke.serve.service import Service
from twostroke.serve.transport.http import Exchange


async def models(service: Service, exchange: Exchange) -> None:
    await exchange.respond(200, {"object": "list", "data": [document(service)]})


async def model(service: Service, exchange: Exchange) -> None:
    service.check_model(exchange.path.removeprefix("/v1/models/"))
    await exchange.respond(200, document(service))


def document(service: Service) -> dict[str, Any]:
    return {
        "id": service.name, "object": "model", "created": service.created, "owned_by": "twostroke",
        "max_model_len": service.settings.max_model_len,
    }  # fmt: skip
