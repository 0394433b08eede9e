"""A real Ray for tests, started and ended by them, and deployments on it behind the front end that the server uses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from tests.cluster.pairs import SETTINGS, all_back
from tests.serve.server import children, command_line, wait_until
from tests.waiting import until
from twostroke.cluster import placement
from twostroke.cluster.deployment import Deployment, DeploymentPlan
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.client import EngineError

START = "from ray.scripts.scripts import main; main()"
SHAPES = {"1+1": {"prefill": 1, "decode": 1}, "2+2": {"prefill": 2, "decode": 2}}
Scenario = Callable[[AsyncEngine, Deployment], Awaitable[None]]
D = TypeVar("D", bound=Deployment)


def free_port() -> int:
    """Below the ports that Ray gives to workers; any of them, as others look for one too."""
    for port in random.sample(range(6400, 10000), 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class RunningRay:
    """It has no more than the processes that it has started, and ends them."""

    def __init__(self, port: int, cores: int = 8):
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'twostroke[cluster]'")
        self.address = f"127.0.0.1:{port}"
        options = ["--num-cpus", str(cores), "--include-dashboard", "false", "--disable-usage-stats", "--block"]
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `stop`)
        usual = {name: value for name, value in os.environ.items() if name != "RAY_TMPDIR"}  # a test's own ends with it
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", START, "start", "--head", "--port", str(port), *options],
            stdout=self.said, stderr=subprocess.DEVNULL, start_new_session=True, env=usual,
        )  # fmt: skip
        wait_until(lambda: self.process.poll() is not None or self._started(), "Ray did not start")
        assert self.process.poll() is None, "Ray did not start"

    def _started(self) -> bool:
        """It says so when its raylet has joined."""
        return b"Ray runtime started" in os.pread(self.said.fileno(), 1 << 16, 0)

    def pids(self, name: str) -> list[int]:
        """Of its own processes: gcs_server, raylet."""
        return [pid for pid in children(self.process.pid) if f"/{name}\0".encode() in command_line(pid)]

    def engines(self) -> list[int]:
        """The engine processes of all workers on it."""
        return [pid for pid in tree(self.process.pid) if is_engine(pid)]

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.said.close()


@pytest.fixture(scope="session")
def running_ray() -> Iterator[RunningRay]:
    """One for all tests."""
    with without_tokens():
        ray = RunningRay(free_port())
        yield ray
        ray.stop()


@pytest.fixture(scope="session")
def ray_address(running_ray: RunningRay) -> str:
    return running_ray.address


@contextlib.contextmanager
def without_tokens() -> Iterator[None]:
    before = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    try:
        yield
    finally:
        os.environ.pop("RAY_AUTH_MODE")
        if before is not None:
            os.environ["RAY_AUTH_MODE"] = before


@contextlib.contextmanager
def without_other_rays() -> Iterator[None]:
    """A Ray of other tests, or of another program, is not noted where a deployment looks that is started here."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", place)  # paths of sockets are short
        yield


class Standing(Generic[D]):
    """A deployment that runs until it is closed, for one scenario after the other."""

    def __init__(self, kind: type[D], folder: Path, shape: DeploymentPlan):
        self.runner = asyncio.Runner()
        self.engine: AsyncEngine | None = None
        try:
            self.runner.run(self._start(kind, folder, shape))
        except BaseException:
            self.close()
            raise

    async def _start(self, kind: type[D], folder: Path, shape: DeploymentPlan) -> None:
        placement.CONNECT_SECONDS = 300.0  # the machine of the tests may be slow and busy
        self.deployment = kind(folder, shape, print)
        self.engine = AsyncEngine(folder, SETTINGS, client=self.deployment, max_queue=200)
        await asyncio.wait_for(self.engine.start(), 900)

    def run(self, scenario: Callable[[AsyncEngine, D], Awaitable[None]], seconds: float = 900) -> None:
        """Afterwards every block and lease is back."""
        self.runner.run(self._run(scenario, seconds))

    async def _run(self, scenario: Callable[[AsyncEngine, D], Awaitable[None]], seconds: float) -> None:
        engine, deployment = self.engine, self.deployment
        assert engine is not None
        await all_up(deployment, 600)
        try:
            await asyncio.wait_for(scenario(engine, deployment), seconds)
        except TimeoutError:
            print(engine.in_flight, deployment.flights, deployment._moves)
            print([(one.name, one.up, one.worker.trouble(), one.counts) for one in deployment.members.values()])
            raise
        await all_back(engine, deployment)

    def close(self) -> None:
        with self.runner:
            if self.engine is not None:
                self.runner.run(self.engine.stop())


def run_deployment(folder: Path, shape: DeploymentPlan, scenario: Scenario, seconds: float = 900) -> None:
    with contextlib.closing(Standing(Deployment, folder, shape)) as standing:
        standing.run(scenario, seconds)


def agent_pid(deployment: Deployment, name: str) -> int:
    joined = deployment.members[name].worker.joined  # type: ignore[attr-defined]
    assert joined is not None
    return joined.pid


def engine_pid(deployment: Deployment, name: str) -> int:
    """The child process of the worker's agent."""
    for child in children(agent_pid(deployment, name)):
        if is_engine(child):
            return child
    raise EngineError("there is no engine process")


async def all_up(deployment: Deployment, seconds: float = 300) -> None:
    await until(lambda: all(one.usable for one in deployment.members.values()), "workers are not back", seconds)


def tree(pid: int) -> set[int]:
    """The process and all that it has started."""
    return {pid}.union(*map(tree, children(pid)))


def is_engine(pid: int) -> bool:
    return b"remote.child_main" in command_line(pid)
