"""/v1/rerank in Cohere's and Jina's shapes, and /score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from twostroke.embed.embedder import Embedder
from twostroke.embed.texts import Tokens
from twostroke.serve.embedding import EmbeddingService, timings
from twostroke.serve.fields import Count, LongText, Many, Payload, ShortText
from twostroke.serve.sampling import CommonHints
from twostroke.serve.transport.errors import bad_request
from twostroke.serve.transport.http import Exchange, dump_large

MAX_DOCUMENTS = 1000  # Cohere's


class Document(Payload):
    text: LongText


class RerankRequest(CommonHints):
    model: ShortText | None = None
    query: LongText
    documents: Annotated[Many[LongText | Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Count | None = None
    return_documents: bool = False


class ScoreRequest(CommonHints):
    """Scores of pairs: one text with each of several, or two lists of the same length."""

    model: ShortText | None = None
    text_1: LongText | Annotated[Many[LongText], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    text_2: LongText | Annotated[Many[LongText], Field(min_length=1, max_length=MAX_DOCUMENTS)]

    def pairs(self) -> list[tuple[str, str]]:
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            why = f"text_2: has {len(second)} texts and text_1 has {len(first)}: send one, or as many."
            raise bad_request(why, "text_2", "invalid_value")
        return list(zip(first, second, strict=True))


def tokenized(embedder: Embedder, pairs: Sequence[tuple[str, str]]) -> list[tuple[Tokens, ...]]:
    return [embedder.pair(first, second) for first, second in pairs]


async def scored(
    service: EmbeddingService, exchange: Exchange, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], dict[str, Any]]:
    """The scores, and the fields that both routes share."""
    size = sum(len(first) + len(second) for first, second in pairs)
    groups = await service.tokenize(exchange, size, tokenized, service.embedder, pairs)
    texts = [text for group in groups for text in group]
    found = await service.compute(exchange, texts)
    count = sum(len(text.ids) for text in texts)
    scores = await service.off_loop(exchange, found.rows.size, service.embedder.scores_of, found.rows)
    shared = {
        "model": service.name, "usage": {"prompt_tokens": count, "total_tokens": count},
        "timings": timings(found, count),
    }  # fmt: skip
    return scores, shared


async def rerank(service: EmbeddingService, exchange: Exchange) -> None:
    request = await service.read(RerankRequest, exchange)
    service.check_model(request.model)
    documents = [one if isinstance(one, str) else one.text for one in request.documents]
    scores, shared = await scored(service, exchange, [(request.query, one) for one in documents])
    order = sorted(range(len(documents)), key=lambda index: (-scores[index], index))[: request.top_n]

    def write() -> bytes:
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if request.return_documents:
            results = [one | {"document": {"text": documents[one["index"]]}} for one in results]
        return dump_large({"results": results, **shared})

    await exchange.respond(200, await service.off_loop(exchange, exchange.weight, write))


async def score(service: EmbeddingService, exchange: Exchange) -> None:
    request = await service.read(ScoreRequest, exchange)
    service.check_model(request.model)
    scores, shared = await scored(service, exchange, request.pairs())
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
    await exchange.respond(200, {"object": "list", "data": data, **shared})
