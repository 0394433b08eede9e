"""The process that tries grammars is killed or stopped: no request waits long for it, and no grammar gets a verdict
that it does not deserve."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests import tiny
from tests.measured import measured
from tests.serve.server import OTHER_KEY, Server, children, command_line, wait_until
from twostroke.confined import Confined, WallTimeError

pytestmark = pytest.mark.slow  # seconds for each case

PATIENCE = 8.0  # seconds: a new process reads the vocabulary again, on a busy machine
numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tiny.tiny_llama(tmp_path_factory.mktemp("checker"))).wait()
    yield running
    assert running.stop() == 0


def checker(server: Server) -> int | None:
    """The process that tries grammars, if there is one."""
    found = [pid for pid in children(server.process.pid) if b"grammar.check" in command_line(pid)]
    return found[0] if found else None


def fresh() -> str:
    """A regular expression that was never tried."""
    return f"a{{{next(numbers) + 1}}}"


def ask(client: httpx.Client, regex: str) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "x", "regex": regex, "max_tokens": 4})


@measured
@pytest.mark.alone
def test_a_stopped_checker_is_replaced_at_once(server: Server) -> None:
    with server.client() as client:
        assert ask(client, fresh()).status_code == 200
        stopped = checker(server)
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        assert ask(client, fresh()).status_code == 200
        assert time.monotonic() - began < PATIENCE
        assert checker(server) != stopped


def test_a_checker_that_is_killed_again_and_again_gives_no_verdict(server: Server) -> None:
    """A grammar that could not be tried is 429 and can be sent again: it is not called too large."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.01):
            pid = checker(server)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    tried = [fresh() for _ in range(6)]
    with server.client() as client:
        killer.start()
        answers = [ask(client, regex) for regex in tried]
        over.set()
        killer.join()
        assert {answer.status_code for answer in answers} <= {200, 429}, [answer.text for answer in answers]
        assert 429 in {answer.status_code for answer in answers}
        assert [ask(client, regex).status_code for regex in tried] == [200] * len(tried)
        wait_until(lambda: checker(server) is not None, "there is no checker")


def test_wall_time_alone_is_no_verdict() -> None:
    """A message that takes no CPU time has waited for something else."""
    child = Confined("tests.confined_child", seconds=0.2, memory=1 << 26)
    with pytest.raises(WallTimeError):
        child.ask({"sleep": 60})
    child.close()


def test_a_key_with_slow_grammars_does_not_keep_another_key_waiting(server: Server) -> None:
    """The keys take turns: another key waits for one slow grammar, not for all of them, and is not refused."""

    def flood(number: int) -> None:
        schema = {"type": "integer", "multipleOf": 1_000_003 + number}  # a state for each remainder
        form = {"type": "json_schema", "json_schema": {"name": "slow", "schema": schema}}
        with server.client() as client:
            assert client.post("/v1/completions", json={"prompt": "x", "response_format": form}).status_code == 400

    floods = [threading.Thread(target=flood, args=[number]) for number in range(4)]
    for thread in floods:
        thread.start()
    time.sleep(0.5)
    with server.client(headers={"authorization": f"Bearer {OTHER_KEY}"}) as client:
        answer = ask(client, fresh())
    waiting = sum(thread.is_alive() for thread in floods)
    for thread in floods:
        thread.join()
    assert answer.status_code == 200, answer.text
    assert waiting >= 2
