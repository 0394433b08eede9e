"""/v1/embeddings, /v1/rerank and /score over HTTP, on a server of an embedder."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.embed.checkpoints import TEXTS, tiny_bert, tiny_cross_encoder
from tests.serve.server import KEY, OTHER_KEY, Server
from tests.serve.test_fuzz import QUICK, VALUES
from twostroke.embed.embedder import Embedder
from twostroke.serve.embedding_routes import EMBEDDING_ROUTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Iterator[Server]:
    running = Server(folder).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture
def embedding_client(embedding: Server) -> Iterator[httpx.Client]:
    with embedding.client() as client:
        yield client


def test_openais_client(embedding: Server, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{embedding.url}/v1", api_key=KEY)
    expected = Embedder.open(folder, threads=1).embed(TEXTS)
    found = client.embeddings.create(model=embedding.model, input=TEXTS)  # base64 underneath
    assert (np.array([one.embedding for one in found.data], np.float32) == expected).all()
    plain = client.embeddings.create(model=embedding.model, input=TEXTS[0], encoding_format="float", dimensions=48)
    assert len(plain.data[0].embedding) == 48 and plain.usage.prompt_tokens == plain.usage.total_tokens > 3


def test_every_form_of_input(embedding_client: httpx.Client, folder: Path) -> None:
    embedder = Embedder.open(folder, threads=1)
    ids = [list(embedder.tokenizer.encode(text).ids) for text in TEXTS[:3]]
    bodies = [{"input": TEXTS[:3]}, {"input": ids}, {"input": [TEXTS[0], ids[1], TEXTS[2]]}]
    rows = []
    for body in bodies:
        data = embedding_client.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()["data"]
        rows.append([np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tobytes() for one in data])
    assert rows[0] == rows[1] == rows[2] == [row.tobytes() for row in embedder.embed(TEXTS[:3])]
    answer = embedding_client.post("/v1/embeddings", json={"input": ids[0]}).json()
    assert len(answer["data"]) == 1 and answer["timings"]["prefill_s"] > 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"), ({"input": []}, "input"), ({"input": "x " * 900}, "input"), ({"input": [[10**6]]}, "input"),
        ({"input": "x", "dimensions": 1000}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "model": "other"}, "model"), ({"input": "x", "temperature": 1}, "temperature"),
        ({"input": ["x"] * 3000}, "input"),
    ],
)  # fmt: skip
def test_a_bad_field_is_refused_by_name(embedding_client: httpx.Client, body: dict, field: str) -> None:
    answer = embedding_client.post("/v1/embeddings", json=body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"].startswith(field), answer.text
    if body == {"input": []}:
        assert "is empty: send a text" in answer.json()["error"]["message"]


def test_a_long_text_can_be_cut(embedding_client: httpx.Client) -> None:
    answer = embedding_client.post("/v1/embeddings", json={"input": "the cat " * 900, "truncate": True})
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 128


def test_requests_that_come_together_have_the_same_bits(embedding: Server, folder: Path) -> None:
    expected = Embedder.open(folder, threads=1).embed(TEXTS)

    async def all_at_once() -> list[dict]:
        async with embedding.async_client() as client:
            asked = [client.post("/v1/embeddings", json={"input": [text]}) for text in TEXTS * 8]
            return [answer.json() for answer in await asyncio.gather(*asked)]

    for number, answer in enumerate(asyncio.run(all_at_once())):
        assert (np.array(answer["data"][0]["embedding"], np.float32) == expected[number % len(TEXTS)]).all()


def test_rerank_and_score(embedding_client: httpx.Client, folder: Path) -> None:
    body = {
        "query": TEXTS[1],
        "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]],
        "top_n": 2,
        "return_documents": True,
    }
    for path in ("/v1/rerank", "/rerank"):
        results = embedding_client.post(path, json=body).json()["results"]
        assert len(results) == 2 and results[0]["index"] == 1 and results[0]["document"]["text"] == TEXTS[1]
        assert results[0]["relevance_score"] > results[1]["relevance_score"]
    scores = embedding_client.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS[:3]}).json()["data"]
    assert len(scores) == 3 and scores[0]["score"] == pytest.approx(1.0, abs=1e-5)
    bad = embedding_client.post("/score", json={"text_1": TEXTS[:2], "text_2": TEXTS[:3]})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "text_2"


def test_a_cross_encoder(tmp_path: Path) -> None:
    running = Server(tiny_cross_encoder(tmp_path / "cross")).wait()
    with running.client() as client:
        found = client.post("/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS}).json()["results"]
        expected = Embedder.open(tmp_path / "cross", threads=1).rank(TEXTS[0], TEXTS)
        assert [one["index"] for one in found] == [one.index for one in expected]
        refused = client.post("/v1/embeddings", json={"input": "x"})
        assert refused.status_code == 400 and "scores pairs" in refused.json()["error"]["message"]
    assert running.stop() == 0


def test_keys_and_other_routes(embedding: Server) -> None:
    with embedding.client(headers={}) as client:
        assert client.post("/v1/embeddings", json={"input": "x"}).status_code == 401
        assert client.get("/health/ready").status_code == 200
    with embedding.client(headers={"authorization": f"Bearer {OTHER_KEY}"}) as client:
        assert client.post("/v1/embeddings", json={"input": "x"}).status_code == 200
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 128
        chat = client.post("/v1/chat/completions", json={"messages": []})
        assert chat.status_code == 400 and "writes no text" in chat.json()["error"]["message"]
        assert client.get("/health").json()["status"] == "ok"
        assert "/v1/rerank" in client.get("/openapi.json").json()["paths"]
        assert b"twostroke:embedding_tokens_total" in client.get("/metrics").content


@pytest.mark.parametrize(
    ("path", "good"),
    [
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/rerank", {"query": "hi", "documents": ["a", "b"]}),
        ("/score", {"text_1": "hi", "text_2": "ho"}),
    ],
)
def test_whatever_is_sent_the_answer_is_never_a_500(embedding_client: httpx.Client, path: str, good: dict) -> None:
    fields = {*next(route.body for route in EMBEDDING_ROUTES if route.path == path).model_fields}

    @settings(QUICK, max_examples=60)
    @given(st.dictionaries(st.sampled_from(sorted(fields)), VALUES, max_size=3))
    def run(changes: dict) -> None:
        body = json.dumps(good | changes).encode("utf-8", "surrogatepass")
        answer = embedding_client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code < 500, answer.text

    run()
    assert embedding_client.post(path, json=good).status_code == 200


def test_a_generative_model_refuses(client: httpx.Client) -> None:
    for path in ("/v1/embeddings", "/v1/rerank", "/score"):
        answer = client.post(path, json={"input": "x"})
        assert answer.status_code == 400 and "makes no vectors" in answer.json()["error"]["message"]
