"""A deployment as a Ray Serve application, started by `serve run` as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.one_server import BODY, SPLIT
from tests.cluster.rays import RunningRay, free_port
from tests.serve.server import ROOT, wait_until
from twostroke.errors import ConfigError

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'twostroke[ray-serve]'")
# A job of a shell that has put it into the background ignores SIGINT, and so do its children.
RUN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from ray.serve.scripts import cli; cli()"
)
KEY = {"authorization": "Bearer key-of-the-admin"}
SETTINGS = [one for one in SPLIT[6:] if one != "-s"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"port": 80}, "port: no such argument; they are the options of `twostroke cluster`"),
        ({"prefil": 1}, "prefil: no such argument"),
        ({"prefill": "many"}, "prefill.*valid integer"),
        ({"share_cores": "perhaps"}, "share_cores: 'perhaps' is neither true nor false"),
    ],
)
def test_arguments_that_are_none(arguments: dict, words: str) -> None:
    from twostroke.cluster.app import command_line

    with pytest.raises(ConfigError, match=words):
        command_line(arguments)


def test_arguments_are_what_would_be_typed() -> None:
    from twostroke.cluster.app import command_line

    given = {"model": "m", "prefill": 1, "decode": "2", "set": "threads=1,kv_blocks=80", "share_cores": "false"}
    typed = ["m", "--prefill", "1", "--decode", "2", "--set", "threads=1", "--set", "kv_blocks=80"]
    assert command_line(given) == typed
    assert command_line({"prefill_set": ["threads=1"], "share_cores": True}) == [
        "--prefill-set", "threads=1", "--share-cores",
    ]  # fmt: skip


def healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", headers=KEY).status_code == 200
    return False


@contextlib.contextmanager
def serve_run(address: str, folder: Path, where: Path, **arguments: object) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    application = {
        "name": "llm", "route_prefix": "/", "import_path": "twostroke.cluster.app:app",
        "args": {"model": str(folder), "prefill": 1, "decode": 1, "route": "apart", "set": SETTINGS, **arguments},
    }  # fmt: skip
    file = where / "serve.json"  # which is YAML
    file.write_text(json.dumps({"http_options": {"port": port}, "applications": [application]}))
    said = where / "said"
    command = [sys.executable, "-c", RUN, "run", "--address", address, str(file)]
    with said.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until(lambda: process.poll() is not None or healthy(url), said.read_text(errors="replace"))
        assert process.poll() is None, said.read_text(errors="replace")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(600)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_answer_of_one_engine(llama_folder: Path, running_ray: RunningRay, expected: dict, tmp_path: Path) -> None:
    want = expected["choices"]
    with (
        serve_run(running_ray.address, llama_folder, tmp_path, admin_key="key-of-the-admin") as url,
        httpx.Client(base_url=url, timeout=600, headers=KEY) as client,
    ):
        assert client.post("/v1/completions", json=BODY, headers={"authorization": ""}).status_code == 401
        found = client.post("/v1/completions", json=BODY).raise_for_status().json()
        assert found["choices"] == want and found["timings"]["transfer_s"] > 0
        text = ""
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == want[0]["text"]
        assert client.get("/metrics").text.count("twostroke:worker_up{") == 2
        assert len(running_ray.engines()) == 2
    wait_until(lambda: not running_ray.engines(), "workers are left")
