"""An engine process that alternates between served steps and bare repeats of the model's part of a step.

The measured server runs it in place of `EngineLoop` (see server_overhead.py). After every three steps in
which all rows advance by a token, the model's part of the last one is run again three times: same process, same memory,
same rows, same contexts, but nothing is planned, committed or reported. The first of each three does not count: during
the first served step the server is idle, during the first bare one it still handles the last report. A repeat writes
the K and V that are already there, so the answers do not change; its tokens are compared.

One line of JSON per turn is appended to the file that the environment names: seconds from the start of each served step
to that of the next, and seconds of each bare repeat.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from typing import Any

from twostroke.remote import loop
from twostroke.types import Event, Plan, Result

TURNS = "TWOSTROKE_TURNS"  # FILE:ROWS, where ROWS is the number of rows of a full step
FIRST, COUNTED = 1, 2  # steps of each kind in a turn


class TurnTaker(loop.EngineLoop):
    def __init__(self, *given: Any):
        super().__init__(*given)
        name, _, rows = os.environ[TURNS].rpartition(":")
        self.turns, self.rows = open(name, "a"), int(rows)  # noqa: SIM115  # until the process ends
        self.run_model = self.core.runner.launch
        self.core.runner.launch = self._launch
        self.last: tuple[Plan, Result] | None = None
        self.began: list[float] = []  # of consecutive full steps

    def _launch(self, plan: Plan) -> Any:
        result = self.run_model(plan)
        full = len(plan.works) == self.rows and all(work.count == 1 and work.samples for work in plan.works)
        self.last = (plan, result) if full else None
        return result

    def _step(self) -> list[Event]:
        now = loop.clock()
        if self.last is not None and len(self.began) == FIRST + COUNTED:
            self._run_bare(*self.last, [after - before for before, after in pairwise([*self.began, now])])
            self.began.clear()
            now = loop.clock()
        self.began.append(now)
        return super()._step()

    def _report(self, events: list[Event]) -> None:
        super()._report(events)
        if self.last is None or any(event.finish_reason for event in events):
            self.last = None
            self.began.clear()

    def _run_bare(self, plan: Plan, result: Result, served: list[float]) -> None:
        newest = [work.request.tokens.pop() for work in plan.works]  # as they were when the step was planned
        bare = []
        for _ in range(FIRST + COUNTED):
            began = loop.clock()
            again = self.core.runner.collect(self.run_model(plan))
            bare.append(loop.clock() - began)
            assert again.tokens == result.tokens, "the same step gave other tokens"
        for work, token in zip(plan.works, newest, strict=True):
            work.request.tokens.append(token)
        self.turns.write(json.dumps({"served": served[FIRST:], "bare": bare[FIRST:]}) + "\n")
        self.turns.flush()


def install() -> None:
    loop.EngineLoop = TurnTaker  # type: ignore[misc]
