"""/twostroke/answers: the answer cache, for the operator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import Field

from twostroke.answers.cache import AnswerCache
from twostroke.answers.store import StoreError
from twostroke.serve.fields import LongText, Payload, ShortText, validate, validate_query
from twostroke.serve.service import Service
from twostroke.serve.transport.errors import ApiError, bad_request
from twostroke.serve.transport.http import Exchange, dump_large

T = TypeVar("T")
PREFIX, WRONG = "/twostroke/answers/", "/wrong"


class AnswersQuery(Payload):
    limit: Annotated[int, Field(ge=0, le=1000)] = 100


class ForgetRequest(Payload):
    """Entries that fulfil all conditions that are given; `all` for those without any condition."""

    question: LongText | None = None  # a part of it
    older_than: Annotated[float, Field(ge=0)] | None = None  # seconds
    tenant: ShortText | None = None  # as the list shows it
    all: bool = False


class WrongRequest(Payload):
    """The body has no field, and may be empty: the address names the answer."""


def cache_of(service: Service) -> AnswerCache:
    if service.answers is None:
        message = "This server has no answer cache: start it with --answer-cache exact or --answer-cache semantic."
        raise ApiError(404, message, code="no_answer_cache", reason="not_found")
    return service.answers.cache


async def asked(function: Callable[[], T]) -> T:
    """What the store answers; a 503 where it does not."""
    try:
        return await asyncio.to_thread(function)
    except (StoreError, TimeoutError):
        message = "The store of the answer cache does not answer: see whether it runs, then try again."
        raise ApiError(503, message, code="store_unavailable", retry_after=2, reason="unavailable") from None


async def show(service: Service, exchange: Exchange) -> None:
    cache = cache_of(service)
    query = validate_query(AnswersQuery, exchange.query)

    def write() -> bytes:
        document = cache.statistics() | {"borderline": list(cache.borderline), "answers": cache.listed(query.limit)}
        return dump_large(document)

    await exchange.respond(200, await asked(write))


async def forget(service: Service, exchange: Exchange) -> None:
    cache = cache_of(service)
    request = await service.read(ForgetRequest, exchange)
    conditions = (request.question, request.older_than, request.tenant)
    if request.all == any(one is not None for one in conditions):
        raise bad_request("all: send it, or at least one of question, older_than and tenant.", "all", "invalid_value")
    try:
        tenant = None if request.tenant is None else bytes.fromhex(request.tenant)
    except ValueError:
        raise bad_request("tenant: must be one that GET /twostroke/answers shows.", "tenant", "invalid_value") from None
    gone = await asked(lambda: cache.forget(request.question, request.older_than, tenant))
    await exchange.respond(200, {"forgotten": gone})


async def wrong(service: Service, exchange: Exchange) -> None:
    cache = cache_of(service)
    body = await exchange.body()
    if body:
        validate(WrongRequest, body)
    name = exchange.path.removeprefix(PREFIX)
    if not name.endswith(WRONG) or not await asked(lambda: cache.wrong(name.removesuffix(WRONG))):
        raise ApiError(404, f"{exchange.path[:200]}: there is no such answer.", code="not_found", reason="not_found")
    await exchange.respond(200, {"forgotten": 1})
