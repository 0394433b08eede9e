"""The answer cache over HTTP: hits, streams, coalescing, bypassing, tenants, the operator's routes and commands."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.answers.servers import Redis
from tests.serve.server import KEY, OTHER_KEY, ROOT, Server, events, wait_until
from tests.serve.test_fuzz import QUICK, VALUES

SLOW_DEADLINE = (
    "import twostroke.answers.lookup as c, twostroke.serve.answer_setup as s\n"
    "patient = lambda **given: c.CacheOptions(**given, deadline=60.0)\n"
    "s.CacheOptions = patient\n"
    "import twostroke.answers.redis as r; r.SOCKET = 60.0\n"
)  # the machine may be busy: what is tested is not the deadline


@pytest.fixture(scope="module")
def caching(long_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("answers") / "answers.sqlite"
    arguments = ("--answer-cache", "exact", "--answer-cache-file", str(file))
    running = Server(long_folder, *arguments, code=SLOW_DEADLINE).wait()
    yield running
    assert running.stop() == 0


def ending(client: httpx.Client, **more: object) -> dict:
    """A request whose answer ends with `stop`: its third text is given as a stop string."""
    base = {"prompt": "The quick brown fox", "max_tokens": 40, "temperature": 0, "cache": {"answer": False}} | more
    text = client.post("/v1/completions", json=base).json()["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    body = base | {"stop": [stop]}
    body.pop("cache")
    return body


def stored(client: httpx.Client) -> int:
    return client.get("/twostroke/answers").json()["stored"]


def settle(client: httpx.Client, before: int) -> None:
    wait_until(lambda: stored(client) > before, "the answer was not stored")


def test_an_equal_request_is_not_computed_again(caching: Server) -> None:
    with caching.client() as client:
        body, before = ending(client), stored(client)
        first = client.post("/v1/completions", json=body).json()
        assert first["choices"][0]["finish_reason"] == "stop" and first["answer_cache"] == {"hit": None}
        settle(client, before)
        steps = caching.quiet()["steps"]  # the engine learns a step later that a stop string ended the request
        again = client.post("/v1/completions", json=body).json()
        assert (
            again["choices"] == first["choices"]
            and again["usage"]["completion_tokens"] == first["usage"]["completion_tokens"]
        )
        found = again["answer_cache"]
        assert found["hit"] == "exact" and found["saved_s"] > 0 and found["age_s"] >= 0
        assert again["timings"]["prefill_s"] == 0 and again["timings"]["decode_s"] == 0
        assert again["timings"]["prefill_flops"] == 0 and again["timings"]["decode_bytes"] == 0
        assert client.get("/health").json()["steps"] == steps
        whole = b"".join(client.get("/metrics").iter_bytes())
        assert b'twostroke:answer_cache_hits_total{model_name="' in whole


def test_a_stream_replays_as_a_stream(caching: Server) -> None:
    with caching.client() as client:
        body, before = ending(client, prompt="A stream of"), stored(client)
        computed = client.post("/v1/completions", json=body | {"stream": True}).text
        settle(client, before)
        replayed = client.post("/v1/completions", json=body | {"stream": True}).text
        texts = [
            "".join(choice["text"] for line in events(text)[:-1] for choice in json.loads(line)["choices"])
            for text in (computed, replayed)
        ]
        assert texts[0] == texts[1] and events(replayed)[-1] == "[DONE]" and len(events(replayed)) > 3
        last = json.loads(events(replayed)[-2])
        assert last["answer_cache"]["hit"] == "exact" and last["choices"][0]["finish_reason"] == "stop"


def test_what_is_not_determined_or_asks_for_it_is_computed(caching: Server) -> None:
    with caching.client() as client:
        body, before = ending(client, prompt="Some other beginning"), stored(client)
        client.post("/v1/completions", json=body)
        settle(client, before)
        changes = ({"temperature": 0.9}, {"n": 2}, {"logprobs": 1}, {"max_tokens": 39})
        for change in (*changes, {"cache": {"answer": False}}, {"cache": {"max_age": 0}}):
            answer = client.post("/v1/completions", json=body | change).json()
            assert answer["answer_cache"]["hit"] is None, change
        header = client.post("/v1/completions", json=body, headers={"cache-control": "no-store"}).json()
        assert header["answer_cache"]["hit"] is None
        assert client.post("/v1/completions", json=body).json()["answer_cache"]["hit"] == "exact"
        bad = client.post("/v1/completions", json=body | {"cache": {"max_age": -1}})
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "cache.max_age"


def test_cut_answers_are_not_stored(caching: Server) -> None:
    with caching.client() as client:
        body = {"prompt": "cut off", "max_tokens": 4, "temperature": 0}
        for _ in range(2):
            answer = client.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["finish_reason"] == "length" and answer["answer_cache"]["hit"] is None


def test_another_key_gets_its_own_answer(caching: Server) -> None:
    with caching.client() as client, caching.client(headers={"authorization": f"Bearer {OTHER_KEY}"}) as other:
        body, before = ending(client, prompt="tenants"), stored(client)
        client.post("/v1/completions", json=body)
        settle(client, before)
        assert other.post("/v1/completions", json=body).json()["answer_cache"]["hit"] is None
        assert other.get("/twostroke/answers").status_code == 403


def test_equal_requests_at_once_are_computed_once(caching: Server) -> None:
    body = {"prompt": "all together now", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "speculate": False}

    async def all_at_once() -> list[str]:
        async with caching.async_client() as client:
            asked = [client.post("/v1/completions", json=body | {"stream": number % 2 == 0}) for number in range(8)]
            return [answer.text for answer in await asyncio.gather(*asked)]

    texts, hits = [], []
    for text in asyncio.run(all_at_once()):
        lines = [json.loads(line) for line in events(text)[:-1]] if text.startswith("data:") else [json.loads(text)]
        texts.append("".join(choice["text"] for line in lines for choice in line["choices"]))
        hits.append(lines[-1]["answer_cache"]["hit"])
    assert len(set(texts)) == 1 and len(texts[0]) > 20
    assert hits.count("coalesced") >= 1 and None in hits


def test_a_first_reader_that_leaves_does_not_end_the_others(caching: Server) -> None:
    body = {"prompt": "the first one leaves", "max_tokens": 3000, "temperature": 0, "ignore_eos": True}
    body["stream"] = True

    async def scene() -> str:
        async with caching.async_client() as client:
            async with client.stream("POST", "/v1/completions", json=body) as first:
                lines = first.aiter_lines()
                await anext(lines)
                before = (await client.get("/twostroke/answers")).json()["hits"]["coalesced"]
                second = asyncio.create_task(client.post("/v1/completions", json=body))
                for _ in range(1000):
                    if (await client.get("/twostroke/answers")).json()["hits"]["coalesced"] > before:
                        break
                    await asyncio.sleep(0.01)
            return (await second).text

    last = json.loads(events(asyncio.run(scene()))[-2])
    assert last["choices"][0]["finish_reason"] == "length"


def test_the_operators_routes_and_commands(caching: Server) -> None:
    with caching.client() as client:
        body, before = ending(client, prompt="operators"), stored(client)
        client.post("/v1/completions", json=body)
        settle(client, before)
        hit = client.post("/v1/completions", json=body).json()["answer_cache"]["id"]
        assert client.post(f"/twostroke/answers/{hit}/wrong").json() == {"forgotten": 1}
        assert client.post(f"/twostroke/answers/{hit}/wrong").status_code == 404
        assert client.post("/v1/completions", json=body).json()["answer_cache"]["hit"] is None
        assert client.post("/twostroke/answers/forget", json={}).status_code == 400
        assert client.post("/twostroke/answers/forget", json={"tenant": "zz"}).status_code == 400

        def run(*arguments: str) -> str:
            command = [sys.executable, "-m", "twostroke", "cache", *arguments, "--url", caching.url]
            environment = {**os.environ, "TWOSTROKE_ADMIN_KEY": KEY}
            return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

        settle(client, before + 1)
        assert "tokens" in run("list") and "nothing is shared yet" in run("stats")
        assert "hits             exact " in run("stats")
        assert "forgotten" in run("clear") and run("list") == ""


def test_whatever_the_operator_sends_the_answer_is_never_a_500(caching: Server) -> None:
    with caching.client() as client:

        @settings(QUICK, max_examples=40)
        @given(st.dictionaries(st.sampled_from(["question", "older_than", "tenant", "all"]), VALUES, max_size=3))
        def run(body: dict) -> None:
            for path in ("/twostroke/answers/forget", "/twostroke/answers/x/wrong"):
                content = json.dumps(body).encode("utf-8", "surrogatepass")
                answer = client.post(path, content=content, headers={"content-type": "application/json"})
                assert answer.status_code < 500, answer.text

        run()


def test_without_a_cache_the_routes_say_so(client: httpx.Client) -> None:
    answer = client.get("/twostroke/answers")
    assert answer.status_code == 404 and "--answer-cache" in answer.json()["error"]["message"]
    assert "answer_cache" not in client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).json()


def test_two_servers_share_a_redis_and_go_on_without_it(long_folder: Path, tmp_path: Path) -> None:
    redis = Redis(tmp_path).start()
    arguments = ("--answer-cache", "exact", "--answer-cache-url", redis.url)
    code = SLOW_DEADLINE + "import os; os.environ['TWOSTROKE_ANSWER_CACHE_KEY'] = 'k' * 20\n"
    servers = [Server(long_folder, *arguments, code=code) for _ in range(2)]
    try:
        with servers[0].wait().client() as first, servers[1].wait().client() as second:
            body = ending(first, prompt="shared by two")
            answer = first.post("/v1/completions", json=body).json()
            settle(first, 0)
            shared = second.post("/v1/completions", json=body).json()
            assert shared["answer_cache"]["hit"] == "exact" and shared["choices"] == answer["choices"]
            redis.stop()
            for number in range(5):
                gone = second.post("/v1/completions", json=body | {"max_tokens": 40 + number})
                assert gone.status_code == 200 and gone.json()["answer_cache"]["hit"] is None
            unanswered = [
                second.get("/twostroke/answers"),
                second.post("/twostroke/answers/forget", json={"all": True}),
            ]
            assert all(one.status_code == 503 and "does not answer" in one.text for one in unanswered)
            redis.start()

            def used_again() -> bool:
                return second.post("/v1/completions", json=body).json()["answer_cache"]["hit"] == "exact"

            wait_until(used_again, "Redis is not used again")
    finally:
        for server in servers:
            server.stop()
        redis.stop()
