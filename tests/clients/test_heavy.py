"""Clients that others wrote, each in its own environment, against a real server. docs/clients.md has their versions.

A client is a script under `scripts/`; it prints its version and what it ran. `environments.py` makes the environments.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients import environments
from tests.serve.server import KEY, Server

SCRIPTS = Path(__file__).parent / "scripts"
SECONDS = 500
CLIENTS = {  # script: environment
    "langchain_client": "langchain",
    "llamaindex_client": "llamaindex",
    "litellm_client": "dspy",
    "dspy_client": "dspy",
    "pydantic_ai_client": "pydantic-ai",
    "agents_sdk_client": "agents",
    "instructor_client": "agents",
    "smolagents_client": "smolagents",
}
pytestmark = pytest.mark.clients


def settings(server: Server, **more: str) -> dict[str, str]:
    """The environment variables of a client. It must not find another server, nor send anything elsewhere."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    mine = {"TWOSTROKE_URL": server.url, "TWOSTROKE_KEY": KEY, "TWOSTROKE_MODEL": server.model}
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return {**kept, **mine, **quiet, "OPENAI_API_KEY": KEY, "NO_PROXY": "127.0.0.1,localhost", **more}


def run(command: list[str | Path], env: dict[str, str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def check_report(output: str) -> None:
    report = json.loads(output.strip().splitlines()[-1])
    print(f"version {report['version']}: {', '.join(report['ran'])}")
    assert report["version"] and report["ran"]


def interpreter(environment: str) -> Path:
    found = environments.program(environment)
    if found is None:
        pytest.skip(f"{environment}: its environment is not there; make it with tests/clients/environments.py")
    return found


@pytest.mark.parametrize("script", CLIENTS)
def test_client(script: str, tool_server: Server) -> None:
    python = interpreter(CLIENTS[script])
    check_report(run([python, SCRIPTS / f"{script}.py"], settings(tool_server)))


def test_langchains_embeddings(embedding_server: Server) -> None:
    python = interpreter("langchain")
    check_report(run([python, SCRIPTS / "langchain_embeddings_client.py"], settings(embedding_server)))


@pytest.mark.parametrize("script", ["openai_js", "ai_sdk"])
def test_javascript(script: str, tool_server: Server) -> None:
    folder = environments.folder()
    if folder is None or not (folder / "js" / "node_modules").is_dir():
        pytest.skip("js: its environment is not there; make it with tests/clients/environments.py")
    env = settings(tool_server, TWOSTROKE_NODE=str(folder / "js"))
    check_report(run(["node", SCRIPTS / f"{script}.mjs"], env))


def test_the_text_between(tool_server: Server) -> None:
    """`suffix`, with a model that has tokens for filling in the middle."""
    with tool_server.client() as client:
        body = {"prompt": "def add(a, b):\n    return ", "suffix": "\n\nprint(add(1, 2))\n", "temperature": 0}
        text = client.post("/v1/completions", json={**body, "max_tokens": 20}).json()["choices"][0]
    assert text["text"].startswith("a + b"), text
