"""The application without a network or an engine: what it says before the model is there, and when it breaks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from twostroke.errors import ConfigError
from twostroke.metrics.registry import Metrics
from twostroke.remote.async_engine import AsyncEngine
from twostroke.serve import sse
from twostroke.serve.app import App
from twostroke.serve.cache_miss import MAX_KEYS, MAX_PROMPTS, RecentPrompts, sentence
from twostroke.serve.route import Route
from twostroke.serve.routes import ROUTES
from twostroke.serve.service import Service, failure
from twostroke.serve.transport.auth import Keys, caller, is_loopback, read_keys
from twostroke.serve.transport.http import Exchange

SECRET = "the password is swordfish"


def ask(folder: Path, method: str, path: str, routes: tuple[Route, ...] = (), **more: object) -> httpx.Response:
    async def whole() -> httpx.Response:
        service = Service(AsyncEngine(folder, {}), "tiny", Keys([]), Metrics("tiny"))
        transport = httpx.ASGITransport(App(service, (*routes, *ROUTES)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(whole())


def test_before_the_model_is_loaded(llama_folder: Path) -> None:
    assert ask(llama_folder, "GET", "/health/live").status_code == 200
    assert ask(llama_folder, "GET", "/health/ready").status_code == 503
    assert ask(llama_folder, "GET", "/health").status_code == 503
    assert ask(llama_folder, "GET", "/metrics").status_code == 200
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        refused = ask(llama_folder, "POST", path, content=b"{}")
        assert refused.status_code == 503 and refused.headers["retry-after"]


def test_an_error_of_ours_is_an_id_and_nothing_else(llama_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def breaks(service: Service, exchange: Exchange) -> None:
        raise ValueError(SECRET)

    response = ask(llama_folder, "GET", "/broken", (Route("GET", "/broken", breaks, "", loaded=False),))
    assert response.status_code == 500
    number = response.json()["error"]["code"].removeprefix("internal_error_")
    assert SECRET not in response.text and "ValueError" not in response.text
    assert number in caplog.text and SECRET in caplog.text


def test_a_failed_answer_shows_an_id_too(caplog: pytest.LogCaptureFixture) -> None:
    error = failure(f"RuntimeError: {SECRET}")
    assert error.status == 500 and SECRET not in error.message
    assert SECRET in caplog.text


def test_every_route_has_a_handler_and_a_line() -> None:
    for route in ROUTES:
        assert route.summary and callable(route.handler)
        assert (route.body is not None) == (route.method == "POST")


def test_keys(tmp_path: Path) -> None:
    keys = Keys(["first-key-here", "second-key-here"])
    assert keys.identify({b"authorization": b"Bearer first-key-here"}) == caller("first-key-here", number=1)
    assert keys.identify({b"x-api-key": b"second-key-here"}) == caller("second-key-here", number=2)
    assert caller("first-key-here").salt != caller("second-key-here").salt
    assert "first" not in caller("first-key-here").name
    for wrong in (b"", b"Bearer", b"Bearer ", b"Bearer first-key-her", b"Bearer first-key-heree", b"first-key-here"):
        assert keys.identify({b"authorization": wrong}) is None
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst-key-here\n\nsecond-key-here  # theirs\n")
    assert read_keys(None, file) == ["first-key-here", "second-key-here"]
    assert read_keys("x", None) == ["x"]  # any length is taken; the server warns of short ones
    for bad in ("", "x" * 513, "has a space in it", "ümlaut-in-the-key"):
        with pytest.raises(ConfigError):
            read_keys(bad, None)
    with pytest.raises(ConfigError):
        read_keys(None, tmp_path / "missing")


def test_the_record_of_prompts_is_bounded() -> None:
    recent = RecentPrompts()
    for number in range(MAX_PROMPTS + 40):
        recent.add(b"a", [number, 1, 2])
    assert recent.nearest(b"a", [3, 1, 2]).common == 0  # the oldest are forgotten
    assert recent.nearest(b"a", [100, 1, 9]).common == 2
    assert recent.nearest(b"b", [100, 1, 2]) is None
    for number in range(2 * MAX_KEYS):
        recent.add(b"%d" % number, [1] * 5000)
    assert len(recent._by_salt) <= MAX_KEYS and recent._tokens <= 1 << 20


def test_the_sentence_says_why() -> None:
    assert "token 40 differs" in sentence(100, 32, 40)
    assert "whole prompt was seen" in sentence(40, 32, 40)
    assert "evicted" in sentence(100, 0, 40)


@pytest.mark.parametrize("text", ["a", '"quoted"\n', "é\u2028", "\ud800 is half a character", "{}", ""])
def test_a_text_filled_in_gives_the_event_written_whole(text: str) -> None:
    def write(choice: int, words: str) -> bytes:
        return sse.data({"id": "x", "choices": [{"index": choice, "text": words}], "usage": None})

    events = sse.TextEvents(write)
    for choice in (0, 3, 0):
        assert events.fill(choice, text) == write(choice, text)


def test_loopback() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("192.168.1.1")


def test_the_server_needs_no_torch() -> None:
    """Its own process neither loads weights nor computes: it starts fast and stays small."""
    code = "import sys, twostroke.serve.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_the_core_needs_no_server() -> None:
    """Without the server's packages everything else imports."""
    code = (
        "import sys\n"
        "for name in ('uvicorn', 'h11', 'pydantic', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "import twostroke, twostroke.engine.llm, twostroke.engine.core\n"
        "from twostroke.cli import bench, diagnose, main, plan\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
