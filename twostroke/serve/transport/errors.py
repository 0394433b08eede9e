"""Errors as HTTP answers, and their JSON bodies in OpenAI's and in Anthropic's form."""

from __future__ import annotations

import logging
import secrets
from typing import Any

log = logging.getLogger(__name__)
RESTART_SECONDS = 5  # Retry-After while the engine is not available
OPENAI_TYPES = {
    401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error",
    503: "server_error",
}  # fmt: skip
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(Exception):
    """An error answer: HTTP status, a message for people, and the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        reason: str = "invalid",
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.reason = reason  # the label in the metric that counts refused requests


def openai_error(error: ApiError) -> dict[str, Any]:
    kind = OPENAI_TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message, "param": error.param}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_found(path: str) -> ApiError:
    return ApiError(404, f"{path[:200]}: there is no such route.", code="not_found", reason="not_found")


def busy(retry_after: int, why: str) -> ApiError:
    message = f"{why}: try again in {retry_after} s."
    return ApiError(429, message, code="server_busy", retry_after=retry_after, reason="busy")


def unavailable(message: str, code: str = "engine_unavailable") -> ApiError:
    return ApiError(503, message, code=code, retry_after=RESTART_SECONDS, reason="unavailable")


def full() -> ApiError:
    return ApiError(503, "Too many connections: try again.", code="connections", retry_after=5, reason="connections")


def internal(context: str) -> ApiError:
    """Call it while an exception is handled: the log gets the trace under an error id, the client only the id."""
    number = secrets.token_hex(8)
    log.exception("error %s: %s", number, context)
    return internal_with(number)


def internal_with(number: str) -> ApiError:
    message = f"Something went wrong on the server; its log has the details under error {number}."
    return ApiError(500, message, code=f"internal_error_{number}", reason="internal")
