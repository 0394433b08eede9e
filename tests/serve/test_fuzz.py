"""Whatever is sent, the answer is never a 500, and the next client is served as if nothing had been."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.serve.server import HEADERS, Server
from twostroke.serve.routes import ROUTES

POSTS = [route.path for route in ROUTES if route.method == "POST"]
QUICK = settings(
    max_examples=25, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
GOOD: dict[str, dict] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "", "messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/twostroke/settings": {"prefix_cache": True},
}


@pytest.fixture(scope="module")
def fuzzed(tooled: Server) -> Iterator[Server]:
    running = tooled
    with running.client() as client:
        right = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 20, "temperature": 0}).json()
        live = {
            name: one["value"]
            for name, one in client.get("/twostroke/settings").json()["settings"].items()
            if one["live"]
        }
        yield running
        client.post("/twostroke/settings", json=live).raise_for_status()
        after = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 20, "temperature": 0}).json()
    assert after["choices"] == right["choices"]
    running.assert_no_blocks_held()
    assert running.health()["restarts"] == 0


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404, 413, 422, 429), response.text
    if response.status_code >= 400:
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", POSTS)
def test_every_field_of_every_route(fuzzed: Server, path: str) -> None:
    """A good request with one field replaced by anything."""
    payload = next(route.body for route in ROUTES if route.path == path and route.method == "POST")
    good = {**GOOD[path], **({"model": fuzzed.model} if "model" in GOOD[path] else {})}
    names = sorted(field.alias or name for name, field in payload.model_fields.items())

    with fuzzed.client() as client:
        assert client.post(path, json=good).status_code == 200

        @QUICK
        @given(st.sampled_from(names) | st.text(max_size=10), VALUES)
        def run(name: str, value: object) -> None:
            body = json.dumps({**good, name: value})
            check(client.post(path, content=body.encode("utf-8", "surrogatepass")))

        run()


def test_anything_at_all(fuzzed: Server) -> None:
    with fuzzed.client() as client:

        @QUICK
        @given(st.sampled_from(POSTS), st.binary(max_size=200))
        def run(path: str, body: bytes) -> None:
            check(client.post(path, content=body))

        run()


@pytest.mark.parametrize("examples", [5, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "not allowed"])
def test_what_the_description_says(fuzzed: Server, mode: GenerationMode, examples: int) -> None:
    """Schemathesis reads the server's own OpenAPI document and sends what it allows, and what it does not."""
    with fuzzed.client() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        for result in schema.get_all_operations():
            operation = result.ok()

            @settings(QUICK, max_examples=examples)
            @given(operation.as_strategy(generation_mode=mode))
            def run(case: schemathesis.Case) -> None:
                response = case.call(base_url=fuzzed.url, headers=HEADERS, timeout=600)
                assert response.status_code < 500 or response.status_code == 503, response.text

            run()
