"""The ASGI application: checks names and the key, finds the route, and turns errors into answers."""

from __future__ import annotations

import logging

from twostroke.serve.base_service import BaseService
from twostroke.serve.route import Route
from twostroke.serve.routes import ROUTES
from twostroke.serve.transport.auth import OPEN_PATHS, PROBES, STATIC
from twostroke.serve.transport.browsers import Browsers, is_preflight, preflight_headers
from twostroke.serve.transport.errors import ApiError, anthropic_error, busy, full, internal, not_found, openai_error
from twostroke.serve.transport.http import AsgiMessage, BodyMemory, Exchange, GoneError, Receive, Send

log = logging.getLogger(__name__)
ANTHROPIC = "/v1/messages"


class App:
    def __init__(self, service: BaseService, routes: tuple[Route, ...] = ROUTES, browsers: Browsers | None = None):
        self.service = service
        self.browsers = browsers or Browsers()
        self.memory = BodyMemory()
        self.routes = routes

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is configured for HTTP only"
        exchange = Exchange(scope, receive, send, self.service.clock(), self.memory)
        if exchange.path.startswith(ANTHROPIC):
            exchange.extra_headers["request-id"] = exchange.extra_headers["x-request-id"]  # the name in that API
        try:
            await self._serve(exchange)
        except GoneError:
            return
        except ApiError as error:
            await self._refuse(exchange, error)
        except Exception:
            await self._refuse(exchange, internal(f"{exchange.method} {exchange.path[:100]!r}"))
        finally:
            exchange.release_body()
            if exchange.weight:
                self.service.threads.trim()

    async def _serve(self, exchange: Exchange) -> None:
        exchange.check_framing()
        if exchange.reserved:
            exchange.extra_headers["connection"] = "close"
            if exchange.path not in PROBES:
                raise full()
        let_in = self.browsers.check(exchange.path, exchange.headers)
        exchange.extra_headers |= let_in
        if let_in and is_preflight(exchange.method, exchange.headers):
            await exchange.respond(204, b"", preflight_headers(exchange.headers))
            return
        exchange.caller = self.service.keys.check(exchange.path, exchange.headers, exchange.peer)
        if exchange.path not in OPEN_PATHS and not exchange.path.startswith(STATIC):
            self._check_place(exchange)
        self.memory.share = self.service.key_share
        route = self.find("GET" if exchange.method == "HEAD" else exchange.method, exchange.path)
        if not route.generates:
            if route.loaded:
                self.service.check_loaded()
            await route.handler(self.service, exchange)
            return
        self.service.check_open(exchange.caller)
        self.service.generating += 1
        try:
            await route.handler(self.service, exchange)
        finally:
            self.service.generating -= 1

    def _check_place(self, exchange: Exchange) -> None:
        """429 for a key that is busy on its share of the connections. This connection is closed: it takes a place."""
        if not exchange.accepted(exchange.caller.number, self.service.key_share):
            exchange.extra_headers["connection"] = "close"
            raise busy(1, "This API key has reached its share of the connections")

    def find(self, method: str, path: str) -> Route:
        known = {route.method: route for route in self.routes if route.matches(path)}
        if not known:
            raise not_found(path)
        if method not in known:
            message = f"{path[:200]} takes {' or '.join(known)}, not {method[:20]}."
            raise ApiError(405, message, code="method_not_allowed", reason="method")
        return known[method]

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        self.service.metrics.refused(error.reason)
        if exchange.started:  # no error answer can follow on this connection; uvicorn closes it
            log.error("%r: failed after its answer had begun", exchange.path[:100])
            return
        headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        took = 1000 * (self.service.clock() - exchange.arrival)
        headers["server-timing"] = f"total;dur={took:.3f}"
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        write = anthropic_error if exchange.path.startswith(ANTHROPIC) else openai_error
        await exchange.respond(error.status, write(error), headers)
