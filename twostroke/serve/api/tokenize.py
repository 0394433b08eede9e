"""/tokenize and /detokenize."""

from __future__ import annotations

from pydantic import model_validator

from twostroke.errors import InputError
from twostroke.serve.api.chat import Messages
from twostroke.serve.body_shape import MAX_ELEMENTS
from twostroke.serve.fields import LongText, Many, Payload, ShortText, TokenId
from twostroke.serve.service import Service
from twostroke.serve.transport.errors import bad_request
from twostroke.serve.transport.http import Exchange, dump, dump_large


class TokenizeRequest(Payload):
    """A prompt, or messages as the chat template writes them."""

    model: ShortText | None = None
    prompt: LongText | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Payload):
    model: ShortText | None = None
    tokens: Many[TokenId]


async def tokenize(service: Service, exchange: Exchange) -> None:
    request = await service.read(TokenizeRequest, exchange)
    service.check_model(request.model)
    tokenizer = service.tokenizer
    if request.messages is not None:
        given = request.messages
        messages = await service.off_loop(
            exchange, exchange.weight, lambda: [message.for_template() for message in given]
        )
        text = await service.render_text(exchange, messages, add_generation_prompt=request.add_generation_prompt)
        special = False
    else:
        text, special = request.prompt or "", request.add_special_tokens
    longest = service.settings.max_model_len

    def write() -> bytes:
        tokens = tokenizer.encode(text, add_special=special, limit=MAX_ELEMENTS)
        texts = [tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None
        document = {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": texts}
        return dump_large(document)

    try:
        document = await service.off_loop(exchange, len(text), write)
    except InputError as error:
        raise bad_request(str(error), "prompt") from None
    await exchange.respond(200, document)


async def detokenize(service: Service, exchange: Exchange) -> None:
    request = await service.read(DetokenizeRequest, exchange)
    service.check_model(request.model)
    tokens, vocabulary = request.tokens, service.arch.vocab

    def write() -> bytes:
        if any(token >= vocabulary for token in tokens):
            raise bad_request(f"tokens: ids must be below {vocabulary}.", "tokens", "invalid_value")
        return dump({"prompt": service.tokenizer.decode(tokens, skip_special=False)})

    await exchange.respond(200, await service.off_loop(exchange, exchange.weight, write))
