"""What a client is told when something is wrong. Each API writes it in its own shape: see protocol/problems.py."""

from __future__ import annotations

import logging
import secrets

from twostroke.remote.admission import BusyError
from twostroke.remote.client import EngineError

log = logging.getLogger(__name__)
RESTART_SECONDS = 5  # after which it is worth asking again when the engine is not there


class ApiError(Exception):
    """An answer that is an error: status, a sentence for people, and the field it is about."""

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
        self.reason = reason  # one word for the counter of refusals


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_found(path: str) -> ApiError:
    return ApiError(404, f"{path[:200]}: there is no such route.", code="not_found", reason="not_found")


def busy(retry_after: int) -> ApiError:
    message = f"The server is at capacity: try again in {retry_after} s."
    return ApiError(429, message, code="server_busy", retry_after=retry_after, reason="busy")


def unavailable(message: str, code: str = "engine_unavailable") -> ApiError:
    return ApiError(503, message, code=code, retry_after=RESTART_SECONDS, reason="unavailable")


def internal(context: str) -> ApiError:
    """Details go to the log under an id, and only the id to the client."""
    number = secrets.token_hex(8)
    log.exception("error %s: %s", number, context)
    return internal_with(number)


def internal_with(number: str) -> ApiError:
    message = f"Something went wrong on the server; its log has the details under error {number}."
    return ApiError(500, message, code=f"internal_error_{number}", reason="internal")


def from_engine(error: BusyError | EngineError) -> ApiError:
    """What keeps the engine from taking a request, as an answer."""
    if isinstance(error, BusyError):
        return busy(error.retry_after)
    return unavailable(f"The engine is not available: {error}.")
