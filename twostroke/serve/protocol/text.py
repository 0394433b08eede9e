"""/tokenize, /detokenize, /v1/models and the health routes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from twostroke.serve.protocol.base import Name, Shape, Text
from twostroke.serve.protocol.chat import MAX_MESSAGES, Message
from twostroke.serve.protocol.sampling import TokenId


class TokenizeRequest(Shape):
    """A prompt, or messages as the chat template writes them."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Shape):
    model: Name | None = None
    tokens: list[TokenId]


def tokenized(tokens: list[int], longest: int, texts: list[str] | None) -> dict[str, Any]:
    return {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": texts}


def detokenized(text: str) -> dict[str, Any]:
    return {"prompt": text}


def model(name: str, created: int, longest: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "twostroke", "max_model_len": longest}


def models(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": documents}


def health(status: str, reason: str | None, more: dict[str, Any]) -> dict[str, Any]:
    return {"status": status, "reason": reason, **more}
