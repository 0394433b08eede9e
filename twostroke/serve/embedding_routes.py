"""The table of routes of an embedder's server."""

from __future__ import annotations

from functools import cache

from twostroke.serve.api import embeddings, health, models, rerank
from twostroke.serve.api.embeddings import EmbeddingsRequest
from twostroke.serve.api.rerank import RerankRequest, ScoreRequest
from twostroke.serve.base_service import BaseService
from twostroke.serve.off_loop import LARGE
from twostroke.serve.openapi import document
from twostroke.serve.route import Route
from twostroke.serve.transport.http import Exchange, dump_large

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@cache
def openapi_text(locked: bool) -> bytes:
    return dump_large(document(EMBEDDING_ROUTES, locked))


async def openapi(service: BaseService, exchange: Exchange) -> None:
    await exchange.respond(200, await service.off_loop(exchange, LARGE, openapi_text, service.keys.required))


EMBEDDING_ROUTES = (
    Route("POST", "/v1/embeddings", embeddings.handle, "Vectors of texts", EmbeddingsRequest, True),
    Route("POST", "/v1/rerank", rerank.rerank, "Documents by relevance for a query", RerankRequest, True),
    Route("POST", "/rerank", rerank.rerank, "The same under Jina's path", RerankRequest, True),
    Route("POST", "/score", rerank.score, "Scores of pairs of texts", ScoreRequest, True),
    *(Route("POST", path, embeddings.refuse_generation, "Refused: an embedder writes no text") for path in GENERATING),
    Route("GET", "/v1/models", models.models, "The model served here"),
    Route("GET", "/v1/models/*", models.model, "One model"),
    Route("GET", "/metrics", health.metrics, "Prometheus metrics", loaded=False),
    Route("GET", "/health", health.health, "Whether the model computes", loaded=False),
    Route("GET", "/health/live", health.live, "Whether the process answers", loaded=False),
    Route("GET", "/health/ready", health.ready, "Whether requests are taken", loaded=False),
    Route("GET", "/openapi.json", openapi, "This description", loaded=False),
)
