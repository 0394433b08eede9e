"""The dashboard's files and its verdict, without a browser: tests/browser looks at it with one."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch

import httpx

from tests.serve.server import ROOT, Server, wait_until
from twostroke.serve.dashboard import FILES, KINDS, PAGE, PAGES


def test_files_load_without_a_key_and_tell_nothing(server: Server):
    with server.client(headers={}) as client:
        page = client.get("/")
        assert page.status_code == 200 and page.content == PAGES["admin"].data and b'data-key="admin"' in page.content
        for name, file in FILES.items():
            answer = client.get(f"/static/{name}")
            assert answer.content == file.data and answer.headers["content-type"] == file.kind
        for path in (
            "/static/",
            "/static/none.js",
            "/static/..%2fmetrics",
            "/static/..%2fapp.py",
            "/static//style.css",
        ):
            assert client.get(path).status_code == 404, path
        assert client.get("/twostroke/diagnosis").status_code == 401
        assert client.post("/").status_code == 405


def test_nothing_but_its_own_files_may_run(server: Server):
    with server.client(headers={}) as client:
        policy = client.get("/").headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert client.get("/static/main.js").headers["x-content-type-options"] == "nosniff"
    text = PAGE.data.decode()
    assert not re.search(r"\son\w+=|style=|<script>|<style|https?://", text)
    named = re.findall(r'(?:src|href)="/static/([^"]+)"', text)
    assert len(named) >= 5 and set(named) <= set(FILES)
    for name, file in FILES.items():
        if name.endswith(".js") and "vendor" not in name:
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.data.decode()
            ), name


def test_a_file_that_is_known_is_not_sent_again(server: Server):
    with server.client(headers={}) as client:
        first = client.get("/static/style.css")
        again = client.get("/static/style.css", headers={"if-none-match": first.headers["etag"]})
        assert again.status_code == 304 and not again.content
        assert client.head("/").headers["content-length"] == str(len(PAGES["admin"].data))


def test_every_file_is_in_the_wheel():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "twostroke.serve"
    ]
    folder = ROOT / "twostroke" / "serve"
    files = [path for path in (folder / "static").rglob("*") if path.is_file()]
    for path in files:
        name = str(path.relative_to(folder))
        assert any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns), name
        assert path.suffix[1:] in KINDS, name


def test_a_verdict_appears_once_there_are_answers(server: Server, client: httpx.Client):
    body = {"model": server.model, "prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True}
    for _ in range(5):
        assert client.post("/v1/completions", json=body).status_code == 200
    found: dict = {}

    def made() -> bool:
        found.update(client.get("/twostroke/diagnosis").json())
        assert found["trouble"] is None, found
        return found["verdict"] is not None

    wait_until(made, "no verdict", 600)
    verdict = found["verdict"]
    assert verdict["sentence"].endswith(".") and verdict["phase"] in ("prefill", "decode")
    assert verdict["requests"] >= 5 and verdict["measured"]["ttft"] > 0 and len(verdict["evidence"]) > 4
    assert len(verdict["levers"]) + len(verdict["useless"]) > 15
    assert not client.get("/twostroke/diagnosis").json()["working"], "one is enough until something new happens"
