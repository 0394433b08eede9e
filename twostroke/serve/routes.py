"""The table of routes."""

from __future__ import annotations

from functools import cache

from twostroke.serve import dashboard
from twostroke.serve.api import (
    admin,
    answers,
    anthropic,
    chat,
    completions,
    diagnosis,
    embeddings,
    health,
    models,
    responses,
    tokenize,
    workers,
)
from twostroke.serve.api.answers import AnswersQuery, WrongRequest
from twostroke.serve.api.anthropic import CountTokensRequest, MessagesRequest
from twostroke.serve.api.chat import ChatRequest
from twostroke.serve.api.completions import CompletionRequest
from twostroke.serve.api.embeddings import EmbeddingsRequest
from twostroke.serve.api.rerank import RerankRequest, ScoreRequest
from twostroke.serve.api.responses import ResponsesRequest
from twostroke.serve.api.tokenize import DetokenizeRequest, TokenizeRequest
from twostroke.serve.fields import Payload
from twostroke.serve.off_loop import LARGE
from twostroke.serve.openapi import document
from twostroke.serve.route import Route
from twostroke.serve.service import Service
from twostroke.serve.transport.http import Exchange, dump_large


@cache
def openapi_text(locked: bool) -> bytes:
    """locked: requests need a key."""
    return dump_large(document(ROUTES, locked))


async def openapi(service: Service, exchange: Exchange) -> None:
    """Runs in a thread: the schemas of all payloads take a tenth of a second the first time."""
    await exchange.respond(200, await service.off_loop(exchange, LARGE, openapi_text, service.keys.required))


REFUSED_HERE: dict[str, type[Payload]] = {
    "/v1/embeddings": EmbeddingsRequest, "/v1/rerank": RerankRequest, "/rerank": RerankRequest, "/score": ScoreRequest,
}  # fmt: skip
ROUTES = (
    Route("POST", "/v1/chat/completions", chat.handle, "Answer a conversation", ChatRequest, True),
    Route("POST", "/v1/completions", completions.handle, "Continue a text", CompletionRequest, True),
    Route("POST", "/v1/responses", responses.handle, "Answer, in OpenAI's newer shapes", ResponsesRequest, True),
    Route("POST", "/v1/messages", anthropic.handle, "Answer, in Anthropic's shapes", MessagesRequest, True),
    Route("POST", "/v1/messages/count_tokens", anthropic.count_tokens, "Tokens of a conversation", CountTokensRequest),
    Route("GET", "/v1/models", models.models, "The model served here"),
    Route("GET", "/v1/models/*", models.model, "One model"),
    Route("POST", "/tokenize", tokenize.tokenize, "Text or messages to token ids", TokenizeRequest),
    Route("POST", "/detokenize", tokenize.detokenize, "Token ids to text", DetokenizeRequest),
    *(
        Route("POST", path, embeddings.refuse, "Refused: a generative model makes no vectors", payload)
        for path, payload in REFUSED_HERE.items()
    ),
    Route("GET", "/twostroke/settings", admin.settings, "Every setting, why, and whether it can change now"),
    Route("POST", "/twostroke/settings", admin.change, "Change settings while running", admin.SettingsRequest),
    Route("GET", "/twostroke/steps", admin.steps, "The last steps of the engine", query=admin.StepsQuery),
    Route("GET", "/twostroke/arrivals", admin.arrivals, "The last requests, for a replay", query=admin.ArrivalsQuery),
    Route("GET", "/twostroke/workers", workers.show, "The workers of a deployment, and transfers between them"),
    Route("POST", "/twostroke/workers", workers.change, "Change the role of a worker", workers.RoleRequest),
    Route("GET", "/twostroke/answers", answers.show, "The answer cache: counts, error, entries", query=AnswersQuery),
    Route("POST", "/twostroke/answers/*", answers.wrong, "/ID/wrong: an answer was wrong", WrongRequest),
    Route("POST", "/twostroke/answers/forget", answers.forget, "Forget answers", answers.ForgetRequest),
    Route("GET", "/twostroke/diagnosis", diagnosis.handle, "Which stroke is slow, why, and what would help"),
    Route("GET", "/", dashboard.page, "The dashboard", loaded=False),
    Route("GET", "/static/*", dashboard.static, "A file of the dashboard", loaded=False),
    Route("GET", "/metrics", health.metrics, "Prometheus metrics", loaded=False),
    Route("GET", "/health", health.health, "Whether the engine moves forward", loaded=False),
    Route("GET", "/health/live", health.live, "Whether the process answers", loaded=False),
    Route("GET", "/health/ready", health.ready, "Whether requests are taken", loaded=False),
    Route("GET", "/openapi.json", openapi, "This description", loaded=False),
)
