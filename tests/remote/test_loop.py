"""The engine's loop, with a port that a test fills."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tests.remote.engines import GREEDY
from twostroke.config import make_config
from twostroke.engine.build import build_engine
from twostroke.remote.loop import EngineLoop
from twostroke.remote.messages import FromEngine, Orders, Report, ToEngine
from twostroke.schedule.together import Together
from twostroke.types import Request


class Filled:
    """A port. `later` arrives while the first step runs."""

    def __init__(self, first: ToEngine, later: ToEngine):
        self.messages: list[list[ToEngine]] = [[first], [later]]
        self.sent: list[FromEngine] = []

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        return self.messages.pop(0) if self.messages else []

    def wake(self) -> None:
        pass


def test_requests_that_come_while_a_step_runs_are_read_with_it(llama_folder: Path) -> None:
    def order(numbers: range) -> Orders:
        requests = [Request(n, tuple(range(3, 40 + n)), GREEDY, n, time.monotonic(), 99) for n in numbers]
        return Orders(tuple((request, 1) for request in requests), ())

    engine = build_engine(str(llama_folder), make_config(threads=1, seed=1), time.monotonic)
    engine.core.scheduler.together = Together(60.0, within=60.0)
    port = Filled(order(range(1)), order(range(1, 12)))
    loop = EngineLoop(port, engine)
    loop._turn()
    assert engine.core.scheduler.together.kept and len(loop.inbox) == 1
    assert not any(message.events for message in port.sent if isinstance(message, Report))
    while not engine.core.idle or loop.inbox:
        loop._turn()
    told = [message for message in port.sent if isinstance(message, Report) and message.events]
    assert {event.request_id for event in told[0].events} == set(range(12)), "all answers begin together"
