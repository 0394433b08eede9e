"""/v1/models."""

from __future__ import annotations

from typing import Any

from twostroke.serve.base_service import BaseService
from twostroke.serve.transport.http import Exchange


async def models(service: BaseService, exchange: Exchange) -> None:
    await exchange.respond(200, {"object": "list", "data": [document(service)]})


async def model(service: BaseService, exchange: Exchange) -> None:
    service.check_model(exchange.path.removeprefix("/v1/models/"))
    await exchange.respond(200, document(service))


def document(service: BaseService) -> dict[str, Any]:
    return {
        "id": service.name, "object": "model", "created": service.created, "owned_by": "twostroke",
        "max_model_len": service.max_model_len,
    }  # fmt: skip
