"""/tokenize, /detokenize, /v1/models, /metrics and the health routes."""

from __future__ import annotations

from typing import Any

from twostroke.errors import InputError
from twostroke.serve.errors import ApiError, bad_request
from twostroke.serve.http import Call
from twostroke.serve.protocol import text
from twostroke.serve.protocol.base import validate
from twostroke.serve.protocol.text import DetokenizeRequest, TokenizeRequest
from twostroke.serve.service import Service


async def tokenize(service: Service, call: Call) -> None:
    request = validate(TokenizeRequest, await call.body())
    service.check_model(request.model)
    tokenizer = service.engine.tokenizer
    if request.messages is not None:
        messages = [message.plain() for message in request.messages]
        written = await service.render_text(messages, add_generation_prompt=request.add_generation_prompt)
        special = False
    else:
        written, special = request.prompt or "", request.add_special_tokens
    try:
        tokens = await service.off_loop(len(written), lambda: tokenizer.encode(written, add_special=special))
    except InputError as error:
        raise bad_request(str(error), "prompt") from None
    texts = [tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None
    await call.respond(200, text.tokenized(tokens, service.engine.intake.settings.max_model_len, texts))


async def detokenize(service: Service, call: Call) -> None:
    request = validate(DetokenizeRequest, await call.body())
    service.check_model(request.model)
    tokens = request.tokens
    highest = service.engine.arch.vocab
    if any(token >= highest for token in tokens):
        raise bad_request(f"tokens: ids must be below {highest}.", "tokens", "invalid_value")
    decoded = await service.off_loop(len(tokens), lambda: service.engine.tokenizer.decode(tokens, skip_special=False))
    await call.respond(200, text.detokenized(decoded))


async def models(service: Service, call: Call) -> None:
    await call.respond(200, text.models([_model(service)]))


async def model(service: Service, call: Call) -> None:
    service.check_model(call.path.removeprefix("/v1/models/"))
    await call.respond(200, _model(service))


def _model(service: Service) -> dict[str, object]:
    return text.model(service.name, service.created, service.engine.intake.settings.max_model_len)


async def metrics(service: Service, call: Call) -> None:
    service.metrics.up.set(1 if service.engine.client.healthy else 0)
    await call.respond(200, service.metrics.render(), kind=service.metrics.content_type)


async def live(service: Service, call: Call) -> None:
    await call.respond(200, text.health("ok", None, {}))


async def ready(service: Service, call: Call) -> None:
    """Says no more than yes or no: anybody may ask."""
    good = service.engine.client.healthy and not service.draining
    await call.respond(200 if good else 503, text.health("ok" if good else "unavailable", None, {}))


async def health(service: Service, call: Call) -> None:
    """By forward progress: an engine that is stopped, stuck or dead is not healthy, whatever this process thinks."""
    engine = service.engine
    trouble = engine.client.trouble()
    if service.draining:
        trouble = trouble or "the server is shutting down"
    more: dict[str, Any] = {
        "running": engine.counts.running,
        "waiting": engine.counts.waiting,
        "in_flight": engine.in_flight,
        "steps": engine.counts.steps,
        "restarts": engine.client.restarts,
        "blocks": {
            "total": engine.counts.blocks_total,
            "free": engine.counts.blocks_free,
            "cached": engine.counts.blocks_cached,
            "host": engine.counts.blocks_on_host,
            "offloaded": engine.counts.blocks_offloaded,
            "restored": engine.counts.blocks_restored,
        },
    }
    if engine.client.ready is None:
        more["loading"] = {"name": engine.stage.name, "done": engine.stage.done, "total": engine.stage.total}
    await call.respond(503 if trouble else 200, text.health("unavailable" if trouble else "ok", trouble, more))


def needs_engine(service: Service) -> None:
    """Routes that know the model only once it is loaded."""
    if service.engine.client.ready is None:
        raise ApiError(503, "The model is still loading.", code="loading", retry_after=2, reason="unavailable")
