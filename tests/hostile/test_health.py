"""What /health says of an engine that is dead, and of one that is alive and far too slow."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests import tiny
from tests.measured import measured
from tests.serve.server import Server, alive, wait_until
from tests.serve.test_faults import Streaming

LONG = {"prompt": "Once upon a time", "max_tokens": 30000, "temperature": 1.0, "ignore_eos": True, "stream": True}
# Progress is judged over two seconds instead of ten; a dead engine is started again after three.
HASTY = (
    "import twostroke.remote.process as p; p.Patience.__init__.__defaults__ = (3.0, 60.0, 20.0, 600.0, 3.0, 3.0)\n"
    "import twostroke.serve.expected as e; e.SECONDS = 2.0\n"
)

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # seconds for each case
RUN, STOP = 0.002, 0.6  # seconds: the engine gets a small part of the time


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tiny.tiny_llama(tmp_path_factory.mktemp("health"), max_position_embeddings=32768)
    running = Server(folder, "-s", "max_requests=4", "--drain-timeout", "0", code=HASTY).wait()
    yield running
    running.stop()


class Throttle(threading.Thread):
    """Lets a process run for a small part of the time."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.pid = pid
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ended.is_set() and alive(self.pid):
            os.kill(self.pid, signal.SIGSTOP)
            time.sleep(STOP)
            os.kill(self.pid, signal.SIGCONT)
            time.sleep(RUN)

    def stop(self) -> None:
        self.ended.set()
        self.join()


def test_counts_are_those_of_requests_that_exist(hasty: Server) -> None:
    Streaming(hasty, LONG | {"n": 3}).wait_for_tokens()
    wait_until(lambda: hasty.health()["running"] == 3, "they never ran")
    os.kill(hasty.engine_pid(), signal.SIGKILL)
    dead: dict = {}

    def is_seen() -> bool:
        dead.update(hasty.health())
        return any(words in str(dead["reason"]) for words in ("signal 9", "exit status"))  # not that it is late

    wait_until(is_seen, "the death was not seen")
    assert dead["status"] != "ok"
    assert dead["running"] == dead["waiting"] == dead["in_flight"] == 0
    assert dead["blocks"]["free"] == dead["blocks"]["total"] > 0 and dead["blocks"]["cached"] == 0
    wait_until(lambda: hasty.health()["status"] == "ok", "the engine was not started again")


@measured
def test_health_turns_when_progress_is_a_tenth_of_what_the_cost_model_expects(hasty: Server) -> None:
    hasty.quiet()
    streaming = Streaming(hasty, LONG).wait_for_tokens()
    for _ in range(10):  # at its own pace it is healthy
        assert hasty.health()["status"] == "ok"
        time.sleep(0.25)
    throttle = Throttle(hasty.engine_pid())
    try:
        seen: list[dict] = []

        def turned() -> bool:
            seen.append(hasty.health())
            return seen[-1]["status"] != "ok"

        wait_until(turned, "health stayed good while the engine crept", 60)
        assert "progress is slow" in seen[-1]["reason"] and "cost model" in seen[-1]["reason"], seen[-1]
        assert seen[-1]["running"] == 1 and "no sign of life" not in seen[-1]["reason"]
    finally:
        throttle.stop()
    wait_until(lambda: hasty.health()["status"] == "ok", "health stayed bad at full speed")
    assert streaming.status == 200 and "error" not in streaming.text
