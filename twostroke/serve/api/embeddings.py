"""/v1/embeddings, in OpenAI's shapes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from twostroke.embed.embedder import Embedder, shortened
from twostroke.embed.texts import Tokens
from twostroke.serve.base_service import BaseService
from twostroke.serve.embedding import EmbeddingService, timings
from twostroke.serve.fates import Hint, refusal
from twostroke.serve.fields import Count, LongText, Many, ShortText, TokenIds
from twostroke.serve.sampling import CommonHints
from twostroke.serve.transport.errors import ApiError, bad_request
from twostroke.serve.transport.http import Exchange, dump_large

MAX_INPUTS = 2048  # OpenAI's
NUMBER = 22  # characters that a number takes as JSON
Several = Annotated[Many[LongText | TokenIds], Field(min_length=1, max_length=MAX_INPUTS)]


def _something(value: Any) -> Any:
    if value == []:
        raise refusal("is empty: send a text, a list of texts or token ids")
    return value


class EmbeddingsRequest(CommonHints):
    model: ShortText | None = None
    input: Annotated[LongText | TokenIds | Several, BeforeValidator(_something)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    truncate: bool = False  # extension: a text beyond the model's length loses its end
    input_type: Hint = None

    def inputs(self) -> Sequence[str | list[int]]:
        """One or several: a flat list of numbers is one text of token ids."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return self.input


def tokenized(embedder: Embedder, inputs: Sequence[str | list[int]], cut: bool) -> list[Tokens]:
    embedder.check_vectors()
    tokenizer = embedder.tokenizer
    return [tokenizer.encode(one, cut) if isinstance(one, str) else tokenizer.given(one) for one in inputs]


async def handle(service: EmbeddingService, exchange: Exchange) -> None:
    request = await service.read(EmbeddingsRequest, exchange)
    service.check_model(request.model)
    embedder, inputs = service.embedder, request.inputs()
    if request.dimensions is not None and request.dimensions > embedder.width:
        why = f"dimensions: this model's vectors have {embedder.width} numbers."
        raise bad_request(why, "dimensions", "invalid_value")
    size = sum(len(one) for one in inputs)
    texts = await service.tokenize(exchange, size, tokenized, embedder, inputs, request.truncate)
    found = await service.compute(exchange, texts)
    count = sum(len(text.ids) for text in texts)
    written = NUMBER * len(texts) * (request.dimensions or embedder.width)
    exchange.weight = max(exchange.weight, written)

    def write() -> bytes:
        vectors = shortened(found.rows, request.dimensions)
        data = [
            {"object": "embedding", "index": index, "embedding": encoded(vector, request.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        return dump_large(
            {
                "object": "list", "data": data, "model": service.name, "timings": timings(found, count),
                "usage": {"prompt_tokens": count, "total_tokens": count},
            }
        )  # fmt: skip

    await exchange.respond(200, await service.off_loop(exchange, written, write))


def encoded(vector: np.ndarray, form: str) -> Any:
    """The numbers, or the bytes of float32 numbers in base64."""
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
    return vector.astype(np.float64).tolist()


async def refuse(service: BaseService, exchange: Exchange) -> None:
    """The refusal of a server with a generative model."""
    message = (
        f"{exchange.path}: {service.name!r} writes text and makes no vectors or scores: start a server of an embedder, "
        "as in `twostroke serve all-minilm-l6-v2`."
    )
    raise ApiError(400, message, param="model", code="not_an_embedder", reason="model")


async def refuse_generation(service: BaseService, exchange: Exchange) -> None:
    """The refusal of a server with an embedder."""
    message = f"{exchange.path}: {service.name!r} makes vectors and writes no text: start a server of another model."
    raise ApiError(400, message, param="model", code="not_generative", reason="model")
