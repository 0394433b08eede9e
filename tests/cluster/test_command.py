"""`twostroke cluster` as a user starts it: one server over workers on a local Ray that it starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests import tiny
from tests.bench.test_apply import command
from tests.cluster.one_server import BODY, SPLIT
from tests.cluster.rays import RunningRay, is_engine, tree, without_other_rays
from tests.serve.server import KEY, OTHER_KEY, Server, wait_until
from twostroke.bench.client import Target
from twostroke.bench.remote import Admin
from twostroke.cli.main import app
from twostroke.cluster.deployment import Deployment, DeploymentPlan, check_shape
from twostroke.cluster.placing import Connected
from twostroke.cost.answers.split import Verdict, divide
from twostroke.cost.simulation.clustered import pools_of
from twostroke.errors import ConfigError


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (DeploymentPlan(), "give --prefill P and --decode D, both 1 or more, or --workers N"),
        (DeploymentPlan(prefill=2), "give --prefill P and --decode D"),
        (DeploymentPlan(workers=1, decode=1), "give it without --prefill and --decode"),
        (DeploymentPlan(workers=1, decode_settings={"threads": 1}), "need --prefill and --decode"),
        (DeploymentPlan(workers=1, apart=True), "--route apart needs"),
        (DeploymentPlan(workers=1, transport="rdma"), "--transport: 'rdma' is not known; use auto, tcp, nixl"),
    ],
)
def test_shapes_that_are_none(shape: DeploymentPlan, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_shape(shape)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("--prefill-set", "max_batch=64"), "unknown setting 'max_batch'"),
        (("--decode-set", "kv_dtype=int5"), "kv_dtype"),
        (("--prefill-set", "threads"), "threads"),
    ],
)
def test_settings_of_a_pool_are_checked(typed: tuple[str, ...], words: str, llama_folder: Path) -> None:
    result = CliRunner().invoke(app, ["cluster", str(llama_folder), "--prefill", "1", "--decode", "1", *typed])
    assert result.exit_code and words in result.output + str(result.exception)


def test_each_pool_has_its_own_settings(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any setting of `serve`, as it is typed. Each worker takes as many cores as its threads."""
    made: list[DeploymentPlan] = []
    monkeypatch.setattr("twostroke.cli.cluster.in_front_of", lambda shape, model, given: made.append(shape))
    monkeypatch.setattr("twostroke.cli.cluster.run_server", lambda options, run: None)
    of_all = {"max_model_len": 512, "kv_blocks": 90}
    of_one = {
        "prefill": {"max_batch_tokens": 64, "threads": 3, "quantize": "int8", "device": "cpu", "kv_blocks": 70},
        "decode": {"max_batch_tokens": 32, "threads": 1, "speculate": "off", "policy": "priority", "max_requests": 4},
    }
    typed = [f"--set={name}={value}" for name, value in of_all.items()]
    typed += [f"--{pool}-set={name}={value}" for pool, own in of_one.items() for name, value in own.items()]
    result = CliRunner().invoke(app, ["cluster", str(llama_folder), "--prefill", "2", "--decode", "1", *typed])
    assert result.exit_code == 0, result.output

    async def placed() -> tuple[list[dict], tuple[float, ...]]:
        deployment = Deployment(llama_folder, made[0], print)
        connected = Connected(False, "", "", (8.0,), 0.0)
        cores = deployment._cores(connected, deployment._devices(connected))
        return [worker.settings for worker in deployment.numbered.values()], cores

    settings, cores = asyncio.run(placed())
    assert cores == (3.0, 3.0, 1.0)
    for pool, worker in zip(("prefill", "prefill", "decode"), settings, strict=True):
        wanted = of_all | of_one[pool]
        assert {name: worker.get(name) for name in wanted} == wanted
    assert "policy" not in settings[0] and "quantize" not in settings[2]


def alive(pids: set[int]) -> list[str]:
    living = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                living.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100])
    return living


@pytest.fixture(scope="module")
def deployment(llama_folder: Path) -> Iterator[Server]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'twostroke[cluster]'")
    with without_other_rays():
        running = Server(llama_folder, *SPLIT, command="cluster").wait()
        processes = tree(running.process.pid)
        yield running
        assert running.stop() == 0
        wait_until(lambda: not alive(processes), "processes are left")


@pytest.mark.slow
def test_the_answer_of_one_engine(deployment: Server, expected: dict) -> None:
    assert any("a local Ray was started, and ends with this server" in line for line in deployment.lines)
    with deployment.client() as client:
        found = client.post("/v1/completions", json=BODY).raise_for_status().json()
        assert found["choices"] == expected["choices"]
        timings = found["timings"]
        assert 0 < timings["transfer_s"] < timings["decode_s"]
        assert sum(timings[name] for name in ("queue_s", "prefill_s", "decode_s")) == pytest.approx(timings["e2e_s"])
        arrived = client.get("/twostroke/arrivals").json()["arrivals"][-1]
        for name in ("transfer_s", "decode_queue_s"):
            assert arrived[name] == timings[name]
        for name in ("transfer_time_seconds", "transfer_size_bytes", "request_decode_queue_time_seconds"):
            counted = re.compile(rf"^twostroke:{name}_count{{.*}} [1-9]", re.MULTILINE)
            wait_until(lambda counted=counted: counted.search(client.get("/metrics").text), f"{name} has no count")
        metrics = client.get("/metrics").text
        assert "twostroke:transfers_done_total{model_name=" in metrics
        assert metrics.count("twostroke:worker_up{") == 2
        settings = client.get("/twostroke/settings").json()
        assert settings["workers"] == 2 and settings["settings"]["max_requests"]["value"] == 32
        refused = client.post("/twostroke/settings", json={"max_requests": 3})
        assert refused.status_code == 400 and "sum over its workers" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_workers_are_shown_and_change_their_roles(deployment: Server, expected: dict) -> None:
    with deployment.client() as client:

        def workers() -> dict:
            return client.get("/twostroke/workers").raise_for_status().json()

        client.post("/v1/completions", json=BODY).raise_for_status()
        wait_until(lambda: workers()["transfers"]["done"] >= 1, "nothing moved")  # it is counted after the answer
        document = workers()
        assert [(one["name"], one["role"], one["healthy"]) for one in document["workers"]] == [
            ("prefill-0", "prefill", True), ("decode-0", "decode", True),
        ]  # fmt: skip
        assert (document["route"], document["ttft"]) == ("apart", None)
        transfers = document["transfers"]
        assert transfers["failed"] == {}
        assert sum(one["bytes"] for one in transfers["last"]) == transfers["bytes"]
        assert all(one["from"] == "prefill-0" and one["seconds"] > 0 for one in transfers["last"])
        assert [one["received_bytes"] for one in document["workers"]] == [0, transfers["bytes"]]
        wrong = {"worker": "decode-0", "role": "prefill"}
        refused = client.post("/twostroke/workers", json=wrong)
        assert refused.status_code == 400 and "last worker that writes answers" in refused.json()["error"]["message"]
        assert client.post("/twostroke/workers", json={"worker": "x", "role": "both"}).status_code == 400
        for body in ([], {}, wrong | {"role": 3}, wrong | {"worker": None}, wrong | {"more": 1}, {"worker": "w" * 99}):
            assert client.post("/twostroke/workers", json=body).status_code in (400, 422), body
        done = document["transfers"]["done"]
        for role in ("both", "prefill"):
            changed = client.post("/twostroke/workers", json={"worker": "prefill-0", "role": role}).json()
            assert changed["workers"][0]["role"] == role
            answer = client.post("/v1/completions", json=BODY).json()
            assert answer["choices"] == expected["choices"]
        wait_until(lambda: workers()["transfers"]["done"] > done, "nothing moved")
    with deployment.client(headers={"authorization": f"Bearer {OTHER_KEY}"}) as other:
        assert other.get("/twostroke/workers").status_code == 403


@pytest.mark.slow
def test_the_steps_of_each_worker_are_shown(deployment: Server) -> None:
    """A request has the same id in both, so a lane of the dashboard goes from one to the other."""
    with deployment.client() as client:
        client.post("/v1/completions", json=BODY | {"prompt": "Another prompt. " * 12}).raise_for_status()
        request = client.get("/twostroke/arrivals").json()["arrivals"][-1]["request"]
        shown = {}
        for name in ("prefill-0", "decode-0"):
            document = client.get("/twostroke/steps", params={"worker": name}).raise_for_status().json()
            assert document["worker"] == name and document["restarts"] == 0
            lanes = [lane for step in document["steps"] for lane in step["lanes"] if lane["request"] == request]
            shown[name] = {lane["stage"] for lane in lanes}
            blocks = [step["blocks"] for step in document["steps"]]
            assert all(one["free"] + one["held"] + one["cached"] == one["total"] for one in blocks)
        assert shown["prefill-0"] == {"prefill"} and "decode" in shown["decode-0"]
        assert client.get("/twostroke/steps").json()["worker"] == "decode-0"
        refused = client.get("/twostroke/steps", params={"worker": "x"})
        assert refused.status_code == 400 and "there is no x" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_diagnose_divides_the_workers_of_a_running_cluster(deployment: Server) -> None:
    with deployment.client() as client:
        for _ in range(6):
            client.post("/v1/completions", json=BODY).raise_for_status()
    where = ("diagnose", "--url", deployment.url, "--api-key", KEY)
    shown = command(*where)
    assert any(words in shown for words in ("levers, best first", "do not help", "The replay of these requests gives"))
    assert "divisions of the workers" in shown and "split 1:1 (now)" in shown
    applied = command(*where, "--apply", "-w", "chat", "-n", 8, "--rate", 4, "--scale", 8, "--ttft", 5, "--tpot", 1)
    assert "Nothing was changed" in applied or "Changed: " in applied
    admin = Admin(Target(deployment.url, key=KEY))
    workers = admin.workers()
    assert workers is not None and pools_of(workers).workers + pools_of(workers).prefill == 2
    for name, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        admin.change({"worker": name, "role": role}, "/twostroke/workers")


@pytest.mark.slow
def test_applied_divisions_change_roles_while_requests_run(
    deployment: Server, expected: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the simulation finds, the other division is taken here, twice. No request is lost meanwhile."""

    def the_other(*given: Any) -> Verdict:
        found = divide(*given)
        other = next(one for one in found.tried if one is not found.now)
        return Verdict(found.now, other, found.tried, found.targets)

    monkeypatch.setattr("twostroke.bench.split.divide", the_other)
    applying = threading.Event()
    applying.set()

    def ask() -> int:
        asked = 0
        with deployment.client() as client:
            while applying.is_set():
                found = client.post("/v1/completions", json=BODY).raise_for_status().json()
                assert found["choices"] == expected["choices"]
                asked += 1
        return asked

    admin = Admin(Target(deployment.url, key=KEY))
    load = ("-w", "chat", "-n", 8, "--rate", 4, "--scale", 8, "--ttft", 60, "--tpot", 60)
    for roles in ({"prefill-0": "both", "decode-0": "both"}, {"prefill-0": "prefill", "decode-0": "decode"}):
        applying.set()
        with ThreadPoolExecutor(2) as threads:
            asking = [threads.submit(ask) for _ in range(2)]
            shown = command("diagnose", "--url", deployment.url, "--api-key", KEY, "--apply", *load)
            applying.clear()
            assert all(one.result() for one in asking)
        assert "Changed: " + ", ".join(f"{name} is for {role}" for name, role in roles.items()) in shown
        workers = admin.workers()
        assert workers is not None and {one["name"]: one["role"] for one in workers["workers"]} == roles
        assert workers["resumed"] == 0 and not workers["transfers"]["failed"]


@pytest.mark.slow
def test_a_stream_survives_its_worker(deployment: Server, llama_folder: Path, expected: dict) -> None:
    """The client sees one stream with the right text, while the decode worker's engine is killed."""
    body = BODY | {"stream": True, "max_tokens": 300}
    with deployment.client() as client:

        def all_back() -> bool:
            """After the death was seen: it may be a moment after the stream that it did not end."""
            workers = client.get("/twostroke/workers").json()["workers"]
            return all(one["healthy"] for one in workers) and sum(one["losses"] for one in workers) == losses + 1

        losses = sum(one["losses"] for one in client.get("/twostroke/workers").json()["workers"])
        want = client.post("/v1/completions", json=BODY | {"max_tokens": 300}).json()["choices"][0]["text"]
        text, killed = "", False
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                text += json.loads(line[6:])["choices"][0]["text"]
                if not killed and len(text) > 20:
                    kill_engines(deployment, 1)
                    killed = True
        assert text == want
        wait_until(all_back, "not back")
        health = client.get("/health").json()
        assert health["status"] == "ok" and health["restarts"] == 0


def kill_engines(deployment: Server, count: int) -> None:
    """The newest engine processes."""
    engines = sorted(pid for pid in tree(deployment.process.pid) if is_engine(pid))
    for pid in engines[-count:]:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_auto_divides_the_workers_and_nothing_is_left_of_a_router_that_is_killed(llama_folder: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'twostroke[cluster]'")
    auto = ("--workers", "2", "--auto", "--hardware", "h200", "--rate", "1", "-s", "max_model_len=512", "--scale", "8")
    with without_other_rays():
        running = Server(llama_folder, *auto, command="cluster").wait()
        processes = tree(running.process.pid)
        try:
            assert any("one pool" in line or "split 1:1" in line for line in running.lines)
            with running.client() as client:
                assert len(client.get("/twostroke/workers").json()["workers"]) == 2
            assert len(processes) > 5
        finally:
            running.process.kill()
            running.process.wait()
        wait_until(lambda: not alive(processes), "processes are left", seconds=10)


@pytest.mark.slow
def test_a_router_that_is_killed_in_a_stream_leaves_nothing_on_a_cluster(
    running_ray: RunningRay, tmp_path: Path
) -> None:
    """The Ray goes on, without the workers: their cores are free for the same deployment, and the stream has ended. A
    second one beside it is told that there is no room."""
    folder = tiny.tiny_llama(tmp_path, max_position_embeddings=8192)
    body = {"prompt": "The quick brown fox", "temperature": 0, "ignore_eos": True, "max_tokens": 6000}
    shape = ("--prefill", "1", "--decode", "1", "--route", "apart", "-s", "speculate=off", "-s", "max_model_len=8000")
    where = ("--address", running_ray.address)  # with 8 cores, of which two workers take 6
    text = ""
    first = Server(folder, *shape, *where, threads=3, command="cluster").wait()
    router = tree(first.process.pid)
    with first.client() as client:
        try:
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                for line in response.iter_lines():
                    text += json.loads(line[6:])["choices"][0]["text"] if line.startswith("data: {") else ""
                    if len(text) > 20 and first.process.poll() is None:
                        assert len(running_ray.engines()) == 2
                        first.process.kill()
                        first.process.wait()
                        killed = time.monotonic()
            raise AssertionError("the stream ended as if it were complete")
        except httpx.HTTPError:
            assert time.monotonic() - killed < 5
    wait_until(lambda: not running_ray.engines() and not alive(router), "processes are left", seconds=10)
    first.key_file.unlink()
    second = Server(folder, *shape, *where, threads=3, command="cluster").wait()
    with second.client() as client:
        found = client.post("/v1/completions", json=body | {"max_tokens": 100}).raise_for_status().json()
    again = found["choices"][0]["text"]
    assert len(text) > 20 and (again.startswith(text) or text.startswith(again))
    with pytest.raises(AssertionError, match=r"has no room for 2 workers with 3 cores each: 2 cores .* are free"):
        Server(folder, *shape, *where, threads=3, command="cluster").wait()
    assert second.stop() == 0
    wait_until(lambda: not running_ray.engines(), "workers are left", seconds=10)


@pytest.mark.slow
def test_one_engine_has_no_workers(one_engine: httpx.Client) -> None:
    answer = one_engine.get("/twostroke/workers")
    assert answer.status_code == 404 and "twostroke cluster" in answer.json()["error"]["message"]
    assert one_engine.get("/twostroke/steps", params={"worker": "decode-0"}).status_code == 404
    assert one_engine.get("/twostroke/steps").json()["worker"] is None
