"""/tokenize and /detokenize."""

from __future__ import annotations

from pydantic import model_validator

from twostroke.errors import InputError
from twostroke.serve.api.chat import Messages
from twostroke.serve.fields import Name, Payload, Text, TokenId, validate
from twostroke.serve.service import Service
from twostroke.serve.transport.errors import bad_request
from twostroke.serve.transport.http import Exchange


class TokenizeRequest(Payload):
    """A prompt, or messages as the chat template writes them."""

    model: Name | None = None
    prompt: Text | None = None
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
    model: Name | None = None
    tokens: list[TokenId]


async def tokenize(service: Service, exchange: Exchange) -> None:
    request = validate(TokenizeRequest, await exchange.body())
    service.check_model(request.model)
    tokenizer = service.tokenizer
    if request.messages is not None:
        messages = [message.for_template() for message in request.messages]
        text = await service.render_text(messages, add_generation_prompt=request.add_generation_prompt)
        special = False
    else:
        text, special = request.prompt or "", request.add_special_tokens
    try:
        tokens = await service.off_loop(len(text), lambda: tokenizer.encode(text, add_special=special))
    except InputError as error:
        raise bad_request(str(error), "prompt") from None
    texts = [tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None
    longest = service.settings.max_model_len
    document = {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": texts}
    await exchange.respond(200, document)


async def detokenize(service: Service, exchange: Exchange) -> None:
    request = validate(DetokenizeRequest, await exchange.body())
    service.check_model(request.model)
    tokens, vocabulary = request.tokens, service.arch.vocab
    if any(token >= vocabulary for token in tokens):
        raise bad_request(f"tokens: ids must be below {vocabulary}.", "tokens", "invalid_value")
    text = await service.off_loop(len(tokens), lambda: service.tokenizer.decode(tokens, skip_special=False))
    await exchange.respond(200, {"prompt": text})
