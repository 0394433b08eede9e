"""A web page in a visitor's browser must not use a server on the visitor's machine, unless it was let in on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.server import Server
from twostroke.errors import ConfigError
from twostroke.serve.routes import ROUTES
from twostroke.serve.transport.auth import PROBES
from twostroke.serve.transport.browsers import Browsers, checked_names
from twostroke.serve.transport.errors import ApiError

EVIL = "https://evil.example"
FRIEND = "https://chat.example"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def open_server(long_folder: Path) -> Iterator[Server]:
    """Without a key: what a user starts on a laptop."""
    running = Server(long_folder, "--allow-origin", FRIEND, "--allowed-host", "llm.example", keys=()).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture
def browser(open_server: Server) -> Iterator[httpx.Client]:
    with open_server.client(headers={}) as client:
        yield client


def test_a_foreign_name_or_site_gets_nothing_from_any_route(browser: httpx.Client) -> None:
    for route in ROUTES:
        path = route.path.replace("*", "x")
        foreign = browser.request(route.method, path, headers={"origin": EVIL})
        rebound = browser.request(route.method, path, headers={"host": "rebind.evil.example"})
        if path in PROBES:
            assert foreign.status_code == rebound.status_code == 200
        else:
            assert (foreign.status_code, foreign.json()["error"]["param"]) == (403, "origin"), path
            assert (rebound.status_code, rebound.json()["error"]["param"]) == (421, "host"), path
            assert f"--allow-origin {EVIL}" in foreign.text
            assert "--allowed-host rebind.evil.example" in rebound.text
        assert not any(name.startswith("access-control") for name in foreign.headers)


@pytest.mark.parametrize("origin", ["null", "http://localhost:1", "http://127.0.0.1", f"{FRIEND}.evil.example", "x"])
def test_a_near_miss_of_an_origin_is_refused(browser: httpx.Client, origin: str) -> None:
    assert browser.post("/v1/chat/completions", json=CHAT, headers={"origin": origin}).status_code == 403


def test_settings_are_not_changed_by_a_page(browser: httpx.Client) -> None:
    """A form or a text is sent by a browser without asking first."""
    before = browser.get("/twostroke/settings").json()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        headers = {"content-type": kind, "origin": EVIL}
        assert browser.post("/twostroke/settings", content=b'{"max_gap": 9.0}', headers=headers).status_code == 403
        del headers["origin"]
        answer = browser.post("/twostroke/settings", content=b'{"max_gap": 9.0}', headers=headers)
        assert answer.status_code == 415 and "Content-Type: application/json" in answer.json()["error"]["message"]
    assert browser.get("/twostroke/settings").json() == before


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_is_taken_as_json(browser: httpx.Client, kind: str) -> None:
    body = b'{"prompt": "a"}'
    assert browser.post("/tokenize", content=body, headers={"content-type": kind}).status_code == 200
    assert browser.post("/tokenize", content=body).status_code == 200  # no content-type at all


def test_own_pages_and_names_are_let_in(open_server: Server, browser: httpx.Client) -> None:
    port = open_server.url.rpartition(":")[2]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "LOCALHOST", f"[::1]:{port}", "llm.example", "localhost."):
        assert browser.get("/v1/models", headers={"host": host}).status_code == 200, host
    assert browser.post("/v1/chat/completions", json=CHAT, headers={"origin": open_server.url}).status_code == 200


def test_a_site_that_was_let_in_can_read_answers_and_errors(browser: httpx.Client) -> None:
    asked = {
        "origin": FRIEND,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    preflight = browser.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 204 and "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    good = browser.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={"origin": FRIEND})
    bad = browser.post("/v1/chat/completions", json={}, headers={"origin": FRIEND})
    assert (good.status_code, bad.status_code) == (200, 400)
    for answer in (preflight, good, bad):
        assert answer.headers["access-control-allow-origin"] == FRIEND and "origin" in answer.headers["vary"]
    refused = browser.options("/v1/chat/completions", headers={**asked, "origin": EVIL})
    assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers


def test_a_server_on_all_addresses_answers_to_addresses_but_not_to_names() -> None:
    everywhere = Browsers("0.0.0.0")
    for host in (b"10.1.2.3:8000", b"[fe80::1]:8000", b"localhost"):
        everywhere.check("/v1/models", {b"host": host})
    for host in (b"rebind.evil.example", b"10.1.2.3.evil.example", b""):
        with pytest.raises(ApiError, match="--allowed-host"):
            everywhere.check("/v1/models", {b"host": host})
    Browsers("0.0.0.0", hosts=["*"]).check("/v1/models", {b"host": b"any.example"})
    with pytest.raises(ApiError):
        Browsers("127.0.0.1").check("/v1/models", {b"host": b"10.1.2.3"})


@pytest.mark.parametrize(
    ("hosts", "origins"),
    [(["http://x"], []), (["x:80"], []), ([""], []), ([], ["chat.example"]), ([], ["https://x/"]), ([], ["a,b"])],
)
def test_values_that_could_never_match_are_refused(hosts: list[str], origins: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--allow"):
        checked_names(hosts, origins)
