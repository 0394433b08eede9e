"""Servers of other makes: what is asked of one that names its models, names others, or names none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from twostroke.bench.client import Target, measure
from twostroke.bench.remote import Admin
from twostroke.bench.workload import Load
from twostroke.cli.main import app
from twostroke.cost.simulation.trace import Arrival, PromptPart
from twostroke.errors import InputError

ONE = Load("one", [Arrival(0.0, (PromptPart(1, 8),), 3)])


@contextmanager
def serving(models: list[str] | None, status: int = 404) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the model that each request named. With None it answers /v1/models with `status`,
    and with 503 as a twostroke does that has not loaded its model."""
    asked: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/twostroke/settings" and status == 503:
                self.answer(503, b'{"error": {"code": "loading", "message": "The model is still loading."}}')
            elif self.path != "/v1/models" or models is None:
                self.answer(404 if self.path != "/v1/models" else status, b"")
            else:
                self.answer(200, json.dumps({"data": [{"id": name} for name in models]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body["model"])
            pieces = [{"choices": [{"text": " word"}]}] * body["max_tokens"]
            usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
            events = [*pieces, {"choices": [], "usage": usage}]
            self.answer(200, "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())

        def answer(self, code: int, data: bytes) -> None:
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            """No log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_diagnose_asks_for_its_model_where_a_server_names_none():
    with serving(None) as (url, asked):
        options = ["--url", url, "--model", "llama-3.1-8b", "--hardware", "h200", "--rate", "1000", "-n", "4"]
        result = CliRunner().invoke(app, ["diagnose", *options])
        assert result.exit_code == 0, f"{result.output} {result.exception!r}"
        assert len(asked) > 20 and set(asked) == {"llama-3.1-8b"}
        assert "replay without any lever: TTFT" in result.output


@pytest.mark.parametrize(
    ("models", "likely", "named"),
    [
        (["first", "second"], "second", "second"),
        (["first", "second"], "llama-3.1-8b", "first"),  # a shape to reckon with, not a name that they have there
        (["first"], None, "first"),
        ([], "mine", "mine"),
        (None, "mine", "mine"),
    ],
)
def test_which_model_is_asked_for(models, likely, named):
    with serving(models) as (url, asked):
        run = measure(Target(url, likely=likely), ONE)
        assert asked == [named] and run.model == named and run.records[0].error is None


def test_a_refused_key_is_no_server_without_names():
    with serving(None, status=401) as (url, _), pytest.raises(InputError, match="--api-key"):
        measure(Target(url, likely="mine"), ONE)
    with serving(None) as (url, _), pytest.raises(InputError, match="--model"):
        measure(Target(url), ONE)


def test_a_twostroke_that_still_loads_is_not_taken_for_another_server():
    with serving(None, status=503) as (url, _), pytest.raises(InputError, match="still loading its model"):
        _ = Admin(Target(url)).known
    with serving(None) as (url, _):
        assert not Admin(Target(url)).known
