"""Whatever is sent, the answer is never a 500, and the next client is served as if nothing had been."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.serve.server import HEADERS, OTHER_KEY, Server
from twostroke.sampling import RANGES
from twostroke.serve.routes import REFUSED_HERE, ROUTES
from twostroke.serve.transport.auth import ADMIN, OPEN_PATHS, STATIC

# Fuzzed on servers that have them: test_embeddings.py, test_answers.py, tests/cluster/test_command.py.
ELSEWHERE = {*REFUSED_HERE, "/twostroke/answers/*", "/twostroke/answers/forget", "/twostroke/workers"}
POSTS = [route.path for route in ROUTES if route.method == "POST" and route.path not in ELSEWHERE]
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


CALLERS = {"no key": {}, "user key": {"authorization": f"Bearer {OTHER_KEY}"}, "admin key": HEADERS}


def check_access(who: str, response: requests.Response) -> None:
    """A caller without a key sees probes and the dashboard's files only, one with a user key no operator's route."""
    status, path = response.status_code, unquote(urlsplit(response.request.url).path)
    if response.request.headers.get("authorization") != CALLERS[who].get("authorization"):
        who = "no key"  # of what the description says of keys, this case has a wrong one
    assert status < 500 or status == 503, response.text
    is_open = path in OPEN_PATHS or path.startswith(STATIC)
    if who == "no key" and not is_open:
        assert status == 401, response.text
    elif who == "user key" and path.startswith(ADMIN):
        assert status in (403, 405), response.text
    else:
        assert status not in (401, 403) or (who == "user key" and "priority" in response.text), response.text


MODES = {"allowed": GenerationMode.POSITIVE, "not allowed": GenerationMode.NEGATIVE}
MANY = 150  # examples of every operation and mode, each sent by every caller


def send_what_is_described(server: Server, mode: str, examples: int) -> None:
    """Schemathesis reads the server's own OpenAPI document. What it allows, or what it does not, is sent by every
    caller."""
    with server.client() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        for result in schema.get_all_operations():
            operation = result.ok()

            @settings(QUICK, max_examples=examples)
            @given(operation.as_strategy(generation_mode=MODES[mode]))
            def run(case: schemathesis.Case) -> None:
                for who, headers in CALLERS.items():
                    check_access(who, case.call(base_url=server.url, headers=headers, timeout=600))

            run()


@pytest.mark.parametrize("mode", MODES)
def test_what_the_description_says(fuzzed: Server, mode: str) -> None:
    send_what_is_described(fuzzed, mode, 5)


@pytest.mark.slow
def test_much_of_what_is_allowed(fuzzed: Server) -> None:
    """test_fuzz_not_allowed.py has the rest: one process tests each."""
    send_what_is_described(fuzzed, "allowed", MANY)


def test_the_description_has_the_ranges_that_are_checked(fuzzed: Server) -> None:
    """Every bound that the description gives is accepted, and what lies beyond it is refused by name."""
    with fuzzed.client() as client:
        fields = client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
        ranged = {name: fields[name]["anyOf"][0] for name in RANGES if "maximum" in str(fields.get(name))}
        assert set(ranged) >= {"temperature", "top_p", "min_p", "n", "presence_penalty", "repetition_penalty"}
        for name, found in ranged.items():
            low, high = found.get("minimum", found.get("exclusiveMinimum")), found["maximum"]
            good = [low] if name in ("n", "min_tokens") else [high] if "exclusiveMinimum" in found else [low, high]
            for value in good:
                answer = client.post("/v1/completions", json=GOOD["/v1/completions"] | {"echo": True, name: value})
                assert answer.status_code == 200, (name, value, answer.text)
            below = low - 2 if name == "top_k" else low - 1  # -1 is another way to say 0 there
            bad = [below, high + 1, *([low] if "exclusiveMinimum" in found else [])]
            for value in bad:
                answer = client.post("/v1/completions", json=GOOD["/v1/completions"] | {name: value})
                assert answer.status_code == 400 and answer.json()["error"]["param"] == name, (name, value, answer.text)
