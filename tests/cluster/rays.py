"""A real Ray for tests, started and ended by them, and deployments on it behind the front end that the server uses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.pairs import SETTINGS, all_back
from twostroke.cluster import placement
from twostroke.cluster.deployment import Deployment, Shape
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.client import EngineError

START = "from ray.scripts.scripts import main; main()"
SHAPES = {"1+1": {"prefill": 1, "decode": 1}, "2+2": {"prefill": 2, "decode": 2}}
Scenario = Callable[[AsyncEngine, Deployment], Awaitable[None]]


def free_port() -> int:
    """Below the ports that Ray gives to workers."""
    for port in range(6400, 10000):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@contextlib.contextmanager
def running_ray(cores: int = 8) -> Iterator[str]:
    """Its address. It has no more than the processes that it has started, and ends them."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'twostroke[cluster]'")
    port = free_port()
    options = ["--num-cpus", str(cores), "--include-dashboard", "false", "--disable-usage-stats", "--block"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, "start", "--head", "--port", str(port), *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        time.sleep(3.0)  # its raylet joins
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    before = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    try:
        with running_ray() as address:
            yield address
    finally:
        os.environ.pop("RAY_AUTH_MODE")
        if before is not None:
            os.environ["RAY_AUTH_MODE"] = before


def run_deployment(folder: Path, shape: Shape, scenario: Scenario, seconds: float = 400) -> None:
    """Afterwards every block and lease is back."""

    async def whole() -> None:
        placement.CONNECT_SECONDS = 300.0  # the machine of the tests may be slow and busy
        deployment = Deployment(folder, shape, print)
        engine = AsyncEngine(folder, SETTINGS, client=deployment, max_queue=200)
        try:
            await asyncio.wait_for(engine.start(), 400)
            try:
                await asyncio.wait_for(scenario(engine, deployment), seconds)
            except TimeoutError:
                print(engine.in_flight, deployment.flights, deployment._moves)
                print([(one.name, one.up, one.worker.trouble(), one.counts) for one in deployment.members.values()])
                raise
            await asyncio.wait_for(all_back(engine, deployment), 60)
        finally:
            await engine.stop()

    asyncio.run(whole())


def agent_pid(deployment: Deployment, name: str) -> int:
    joined = deployment.members[name].worker.joined  # type: ignore[attr-defined]
    assert joined is not None
    return joined.pid


def engine_pid(deployment: Deployment, name: str) -> int:
    """The child process of the worker's agent."""
    agent = agent_pid(deployment, name)
    for task in Path(f"/proc/{agent}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"child_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise EngineError("there is no engine process")


async def all_up(deployment: Deployment) -> None:
    while not all(member.usable for member in deployment.members.values()):
        await asyncio.sleep(0.05)
