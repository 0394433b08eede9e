"""The table of routes, and the one way in: who calls, which route, what went wrong."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from twostroke.serve import admin, anthropic, chat, completions, dashboard, responses, text
from twostroke.serve.diagnosis import Verdicts
from twostroke.serve.errors import ApiError, internal, not_found
from twostroke.serve.http import Bodies, Call, GoneError, Message, Receive, Send
from twostroke.serve.openapi import document
from twostroke.serve.protocol import problems
from twostroke.serve.protocol.admin import ArrivalsQuery, SettingsRequest, StepsQuery
from twostroke.serve.protocol.anthropic import CountTokensRequest, MessagesRequest
from twostroke.serve.protocol.base import Shape
from twostroke.serve.protocol.chat import ChatRequest
from twostroke.serve.protocol.completions import CompletionRequest
from twostroke.serve.protocol.responses import ResponsesRequest
from twostroke.serve.protocol.text import DetokenizeRequest, TokenizeRequest
from twostroke.serve.service import Service

log = logging.getLogger(__name__)
Handler = Callable[[Service, Call], Awaitable[None]]


class Route(NamedTuple):
    method: str
    path: str  # a trailing * takes the rest of the path
    handler: Handler
    summary: str
    shape: type[Shape] | None = None  # of the body
    generates: bool = False  # refused when the engine is not there or its queue is full
    loaded: bool = True  # needs the model's description
    query: type[Shape] | None = None  # of what follows the question mark


ROUTES = (
    Route("POST", "/v1/chat/completions", chat.handle, "Answer a conversation", ChatRequest, True),
    Route("POST", "/v1/completions", completions.handle, "Continue a text", CompletionRequest, True),
    Route("POST", "/v1/responses", responses.handle, "Answer, in OpenAI's newer shapes", ResponsesRequest, True),
    Route("POST", "/v1/messages", anthropic.handle, "Answer, in Anthropic's shapes", MessagesRequest, True),
    Route("POST", "/v1/messages/count_tokens", anthropic.count_tokens, "Tokens of a conversation", CountTokensRequest),
    Route("GET", "/v1/models", text.models, "The model served here"),
    Route("GET", "/v1/models/*", text.model, "One model"),
    Route("POST", "/tokenize", text.tokenize, "Text or messages to token ids", TokenizeRequest),
    Route("POST", "/detokenize", text.detokenize, "Token ids to text", DetokenizeRequest),
    Route("GET", "/twostroke/settings", admin.settings, "Every setting, why, and whether it can change now"),
    Route("POST", "/twostroke/settings", admin.change, "Change settings while running", SettingsRequest),
    Route("GET", "/twostroke/steps", admin.steps, "The last steps of the engine", query=StepsQuery),
    Route("GET", "/twostroke/arrivals", admin.arrivals, "The last requests, for a replay", query=ArrivalsQuery),
    Route("GET", "/", dashboard.page, "The dashboard", loaded=False),
    Route("GET", "/static/*", dashboard.static, "A file of the dashboard", loaded=False),
    Route("GET", "/metrics", text.metrics, "Prometheus metrics", loaded=False),
    Route("GET", "/health", text.health, "Whether the engine moves forward", loaded=False),
    Route("GET", "/health/live", text.live, "Whether the process answers", loaded=False),
    Route("GET", "/health/ready", text.ready, "Whether requests are taken", loaded=False),
)


class App:
    """An ASGI application."""

    def __init__(self, service: Service):
        self.service = service
        self.bodies = Bodies()
        openapi = Route("GET", "/openapi.json", self.openapi, "This description", loaded=False)
        verdict = "Which stroke is slow, why, and what would help"
        diagnosis = Route("GET", "/twostroke/diagnosis", Verdicts(service).handle, verdict)
        self.routes = (*ROUTES, diagnosis, openapi)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "only HTTP is spoken here"
        call = Call(scope, receive, send, self.service.engine.clock(), self.bodies)
        try:
            await self._serve(call)
        except GoneError:
            return
        except ApiError as error:
            await self._refuse(call, error)
        except Exception:
            await self._refuse(call, internal(f"{call.method} {call.path[:100]}"))

    async def _serve(self, call: Call) -> None:
        call.caller = self.service.keys.check(call.path, call.headers)
        route = self.find("GET" if call.method == "HEAD" else call.method, call.path)
        if route.generates:
            self.service.check_open()
        elif route.loaded:
            text.needs_engine(self.service)
        if not route.generates:
            await route.handler(self.service, call)
            return
        self.service.calls += 1
        try:
            await route.handler(self.service, call)
        finally:
            self.service.calls -= 1

    def find(self, method: str, path: str) -> Route:
        known = {route.method: route for route in self.routes if matches(route, path)}
        if not known:
            raise not_found(path)
        if method not in known:
            message = f"{path[:200]} takes {' or '.join(known)}, not {method[:20]}."
            raise ApiError(405, message, code="method_not_allowed", reason="method")
        return known[method]

    async def _refuse(self, call: Call, error: ApiError) -> None:
        self.service.metrics.refused(error.reason)
        if call.started:
            log.error("%s: failed after its answer had begun", call.path[:100])
            return  # the connection is closed by whoever called us: nothing else can be said on it
        headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        took = 1000 * (self.service.engine.clock() - call.arrival)
        headers["server-timing"] = f"total;dur={took:.3f}"
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        write = problems.anthropic_error if call.path.startswith("/v1/messages") else problems.openai_error
        await call.respond(error.status, write(error), headers)

    async def openapi(self, service: Service, call: Call) -> None:
        await call.respond(200, document(self.routes, service.keys.required))


def matches(route: Route, path: str) -> bool:
    if route.path.endswith("*"):
        return path.startswith(route.path[:-1]) and len(path) >= len(route.path)
    return path == route.path
