"""Raw HTTP: shapes, refusals by name, keys on every route, limits, timings, metrics, the explanation of a miss."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import httpx
import pytest

from tests.serve.server import HEADERS, OTHER_KEY, PATIENT, Server, events
from twostroke.serve.fates import REFUSED
from twostroke.serve.routes import ROUTES
from twostroke.serve.transport.connection import HEADER_SECONDS

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
PHASES = ("queue_s", "prefill_s", "decode_s")


def refused(response: httpx.Response, status: int, param: str | None = None) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"] and error["param"] == param, error
    return error


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", "1", "temperature"),
        ("temperature", -0.1, "temperature"),
        ("temperature", 1e999, "temperature"),
        ("top_p", 0, "top_p"),
        ("n", 0, "n"),
        ("n", 10**30, "n"),
        ("n", 1.5, "n"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("min_tokens", 9, "min_tokens"),
        ("seed", 2**70, "seed"),
        ("stop", ["x"] * 65, "stop"),
        ("stop", ["x" * 2000], "stop[0]"),
        ("logprobs", 3, "logprobs"),
        ("top_logprobs", 21, "top_logprobs"),
        ("top_logprobs", 2, "top_logprobs"),
        ("logit_bias", {"a": 1}, "logit_bias"),
        ("logit_bias", {"3": 101}, "logit_bias.3"),
        ("logit_bias", {"999999": 1}, "logit_bias"),
        ("stop_token_ids", [-1], "stop_token_ids[0]"),
        ("stop_token_ids", [10**6], "stop_token_ids"),
        ("presence_penalty", 2.5, "presence_penalty"),
        ("priority", 2**31, "priority"),
        ("messages", [], "messages"),
        ("messages", "hi", "messages"),
        ("messages", [{"role": "king", "content": "hi"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ("messages", [{"role": "user", "content": None}], "messages[0].content"),
        ("messages", [{"role": "user", "content": "x " * 9000}], "messages"),
        ("best_of", 2, "best_of"),
        ("tempratur", 1, "tempratur"),
        ("prefix_cache", {"explain": 1}, "prefix_cache.explain"),
        ("chat_template", "{{ 1 }}", "chat_template"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs"),
        ("chat_template_kwargs", {"date_string": "today"}, "date_string"),
        ("functions", [{"name": "f"}], "functions"),
        ("web_search_options", {"search_context_size": "low"}, "web_search_options"),
        ("tools", [{"type": "web_search"}], "tools[0].type"),
        ("max_completion_tokens", 5, "max_completion_tokens"),
        ("continue_final_message", True, "messages"),
    ],
)  # fmt: skip
def test_a_bad_field_is_refused_by_name(client: httpx.Client, field: str, value: object, param: str) -> None:
    body = json.dumps({**CHAT, field: value})
    refused(client.post("/v1/chat/completions", content=body), 400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        ('{"messages": [{"role": "user", "content": "a", "content": "a"}], "max_tokens": 1}', "messages[0].content"),
        ('{"messages": [{"role": "user", "content": "a", "\\u0072ole": "user"}], "max_tokens": 1}', "messages[0].role"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "response_format": {'
            '"type": "json_schema", "json_schema": {"name": "n", "schema": {'
            '"type": "object", "properties": {"a": {}, "a": {}}}}}}',
            "response_format.json_schema.schema.properties.a",
        ),
    ],
)
def test_a_name_that_stands_twice_is_refused(client: httpx.Client, body: str, param: str) -> None:
    """Others may have read the one that we would not."""
    answer = client.post("/v1/chat/completions", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "repeated_field")
    assert error["message"] == f"{param}: occurs twice in one object; send it once."
    assert client.get("/twostroke/steps?limit=1&limit=2").json()["error"]["param"] == "limit"


def test_a_refusal_shows_what_was_sent(client: httpx.Client) -> None:
    for value, got in ((0, "0"), (-1, "-1"), ("5", '"5"'), (True, "true")):
        error = refused(client.post("/v1/chat/completions", json={**CHAT, "max_tokens": value}), 400, "max_tokens")
        assert error["message"].endswith(f", got {got}.")
    error = refused(client.post("/v1/chat/completions", json={"max_tokens": 1}), 400, "messages")
    assert error["message"] == "messages: is required: add it."


def test_a_misspelt_field_gets_a_hint(client: httpx.Client) -> None:
    error = refused(client.post("/v1/chat/completions", json={**CHAT, "max_token": 3}), 400, "max_token")
    assert "'max_tokens'" in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"a":' * 5000, b'{"messages":"\\ud800"}', b"null"]
)
def test_what_is_no_request_is_refused(client: httpx.Client, body: bytes) -> None:
    assert client.post("/v1/chat/completions", content=body).status_code == 400


def test_what_is_not_built_is_named_with_a_way_out(client: httpx.Client) -> None:
    for field, value in (("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("background", True)):
        error = refused(client.post("/v1/responses", json={"input": "hi", field: value}), 400, field)
        assert error["message"] == f"{field}: {REFUSED[field]}."


def test_half_a_character_is_refused_or_answered(client: httpx.Client) -> None:
    body = b'{"messages":[{"role":"user","content":"\\ud800"}],"max_tokens":2}'
    assert client.post("/v1/chat/completions", content=body).status_code in (200, 400)


@pytest.mark.parametrize("prompt", ["", [], [[]], [-1], [10**9], [1, "a"], ["a", [1]], {"a": 1}, [0.5]])
def test_prompts(client: httpx.Client, prompt: object) -> None:
    response = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    good = prompt == ["a", [1]]
    assert response.status_code == (200 if good else 400), response.text


def test_prompts_times_samples_is_bounded(client: httpx.Client) -> None:
    body = {"prompt": ["a"] * 65, "n": 2, "max_tokens": 1}
    refused(client.post("/v1/completions", json=body), 400, "prompt")


def test_every_route_needs_a_key(server: Server) -> None:
    with httpx.Client(base_url=server.url) as anonymous:
        paths = [(route.method, route.path.replace("*", "x")) for route in ROUTES]
        more = [("GET", "/nothing"), ("PUT", "/v1/models")]
        is_open = {"/": 200, "/health/live": 200, "/health/ready": 200, "/static/x": 404}  # files tell nothing of it
        for method, path in [*paths, *more, ("GET", "/static"), ("GET", "//static/x"), ("GET", "/health/live/")]:
            for headers in ({}, {"authorization": "Bearer wrong-key"}, {"authorization": "Basic x"}, {"x-api-key": ""}):
                response = anonymous.request(method, path, headers=headers)
                assert response.status_code == is_open.get(path, 401), (method, path, headers)
        for headers in (HEADERS, {"x-api-key": OTHER_KEY}, {"authorization": f"bearer {OTHER_KEY}"}):
            assert anonymous.get("/v1/models", headers=headers).status_code == 200


def test_unknown_routes_and_methods(client: httpx.Client) -> None:
    refused(client.get("/v2/models"), 404)
    refused(client.get("/v1/chat/completions"), 405)
    assert client.head("/health").status_code == 200


def test_the_description_names_every_route(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert {route.path.replace("*", "{name}") for route in ROUTES} <= set(document["paths"])
    shape = document["components"]["schemas"]["ChatRequest"]
    assert shape["additionalProperties"] is False and "messages" in shape["required"]


def test_a_body_over_the_limit(client: httpx.Client) -> None:
    body = b'{"messages":"' + b"x" * (5 << 20) + b'"}'
    refused(client.post("/v1/chat/completions", content=body), 413)

    def parts():  # the same without a length
        for _ in range(80):
            yield b"x" * (1 << 16)

    with contextlib.suppress(httpx.TransportError):  # it may close while we still send
        assert client.post("/v1/chat/completions", content=parts()).status_code == 413


def test_headers_over_the_limit(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n" + b"a: " + b"b" * 100_000)
        sock.settimeout(PATIENT)
        assert b" 431 " in sock.recv(1000)


def test_timings_add_up(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, "n": 2, "max_tokens": 7})
    document = response.json()
    for timings in (document["timings"], *(choice["timings"] for choice in document["choices"])):
        assert sum(timings[name] for name in PHASES) == pytest.approx(timings["e2e_s"], abs=1e-6)
        assert timings["ttft_s"] == pytest.approx(timings["queue_s"] + timings["prefill_s"], abs=1e-6)
        assert timings["output_tokens"] == 7 and timings["preemptions"] == 0
        for name in ("prefill_flops", "prefill_bytes", "decode_flops", "decode_bytes"):
            assert timings[name] > 0
    assert response.headers["server-timing"].startswith("queue;dur=")
    assert document["usage"]["prompt_tokens"] == document["timings"]["prompt_tokens"]


def test_timings_are_in_the_last_chunk(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    lines = events(response.text)
    assert lines[-1] == "[DONE]"
    last = json.loads(lines[-2])
    assert last["choices"][0]["finish_reason"] == "length"
    assert sum(last["timings"][name] for name in PHASES) == pytest.approx(last["timings"]["e2e_s"], abs=1e-6)
    assert not any("timings" in json.loads(line) for line in lines[:-2])


def test_explain_a_miss(client: httpx.Client, server: Server) -> None:
    start = "No other prompt begins like this, over the lazy dog. " * 3 + "So"
    body = {"max_tokens": 1, "temperature": 0, "prefix_cache": {"explain": True}}

    def ask(prompt: str, **more: object) -> dict:
        response = client.post("/v1/completions", json={**body, "prompt": prompt}, **more)
        assert response.status_code == 200, response.text
        return response.json()["prefix_cache"]

    assert ask(start + ",0123 and more of it")["cached_tokens"] == 0
    second = ask(start + ",9876 and more of it")
    tokens = client.post("/tokenize", json={"prompt": start + ","}).json()["count"]
    assert second["nearest"]["first_difference"] == tokens
    assert second["cached_tokens"] == tokens // 16 * 16
    assert second["nearest"]["text_here"].startswith("9876") and second["nearest"]["text_there"].startswith("0123")
    assert (start + ",").endswith(second["nearest"]["text_before"])
    other = ask(start + ",9876 and more of it", headers={"authorization": f"Bearer {OTHER_KEY}"})
    nearest = other["nearest"] or {"first_difference": 0}  # another key sees nothing of it
    assert other["cached_tokens"] == nearest["first_difference"] == 0


def test_tokenize_and_back(client: httpx.Client) -> None:
    text = "Once upon a time, ünïcödé"
    tokens = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == text
    chat = client.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    assert chat["count"] == client.post("/v1/chat/completions", json=CHAT).json()["usage"]["prompt_tokens"]
    refused(client.post("/detokenize", json={"tokens": [10**6]}), 400, "tokens")
    refused(client.post("/tokenize", json={}), 400)


def test_metrics(client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json=CHAT)
    text = client.get("/metrics").text
    for name in (
        "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_sum", "vllm:request_queue_time_seconds_sum",
        "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum", "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:num_requests_running",
        "vllm:num_requests_waiting", "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
        "vllm:request_success_total", "vllm:num_preemptions_total", "twostroke:engine_up", "vllm:cache_config_info",
        "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:gpu_cache_usage_perc", "vllm:prompt_tokens_cached_total", "vllm:request_params_n_bucket",
        "vllm:request_params_max_tokens_bucket", "vllm:request_prefill_kv_computed_tokens_sum",
        "vllm:time_per_output_token_seconds_sum", "vllm:request_max_num_generation_tokens_bucket",
    ):  # fmt: skip
        assert f"\n{name}" in text, name


def test_metrics_agree_with_each_other(client: httpx.Client, server: Server) -> None:
    """E2E = queue + prefill + decode, summed over every request so far."""
    server.quiet()
    values = {}
    for line in client.get("/metrics").text.splitlines():
        if "_sum{" in line:
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0]] = float(value)
    phases = sum(values[f"vllm:request_{phase}_time_seconds_sum"] for phase in ("queue", "prefill", "decode"))
    assert phases == pytest.approx(values["vllm:e2e_request_latency_seconds_sum"], abs=1e-3)


def test_priorities_and_extensions_are_taken(client: httpx.Client) -> None:
    more = {
        "priority": 3, "user": "a-user", "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [5], "presence_penalty": 0.5, "frequency_penalty": 0.5, "deadline": 1.0,
        "service_tier": "auto", "modalities": ["text"], "store": False, "response_format": {"type": "text"},
    }  # fmt: skip
    assert client.post("/v1/chat/completions", json={**CHAT, **more}).status_code == 200


def test_the_server_does_not_wait_for_slow_headers(server: Server) -> None:
    """Connections that say nothing do not keep others out."""
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(50)]
    began = time.monotonic()
    assert server.health()["status"] == "ok"
    assert time.monotonic() - began < HEADER_SECONDS / 2
    for sock in idle:
        sock.close()


def test_a_compressed_body_is_refused_not_misread(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"content-encoding": "gzip"})
    assert "compressed" in refused(answer, 415, "content-encoding")["message"]


def test_a_sentence_names_the_field_that_was_sent(client: httpx.Client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}
    error = refused(
        client.post("/v1/chat/completions", json={**CHAT, "response_format": schema}), 400, "response_format"
    )
    assert error["message"].startswith("response_format: ")
    error = refused(client.post("/v1/completions", json={"prompt": "a", "regex": "("}), 400, "regex")
    assert error["message"].startswith("regex: ")
    assert refused(client.post("/tokenize", json={}), 400)["message"] == "The body: give either prompt or messages."
