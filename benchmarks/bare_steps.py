"""An engine process that takes turns: steps that are served as always, and the same step again without serving it.

The server under measurement runs it in place of `EngineLoop` (see server_overhead.py). After every
three steps in which all rows advance by a token, the model's part of the last one is run again three times: same
process, same memory, same rows, same contexts, a moment later, but nothing is planned, committed or told. The first of
either three does not count: at a served one the server has nothing to work on, at a bare one it still has the last
report. What a row's K and V are written with is what stands there already, so the answers do not change; that the same
tokens come out is checked.

A line of JSON for each turn goes to the file that the environment names: seconds from the start of one served step to
that of the next, and seconds of the bare model's part.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from typing import Any

from twostroke.remote import loop
from twostroke.types import Event, Plan, Result

TURNS = "TWOSTROKE_TURNS"  # names the file and how many rows make a full step, with a colon in between
FIRST, COUNTED = 1, 2  # steps of each kind in a turn


class TurnTaker(loop.EngineLoop):
    def __init__(self, port: loop.Port, engine: Any):
        super().__init__(port, engine)
        name, _, rows = os.environ[TURNS].rpartition(":")
        self.turns, self.rows = open(name, "a"), int(rows)  # noqa: SIM115  # until the process ends
        self.run_model = self.core.runner.launch
        self.core.runner.launch = self._launch
        self.last: tuple[Plan, Result] | None = None
        self.began: list[float] = []  # full steps, one after the other

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
        newest = [work.request.tokens.pop() for work in plan.works]  # as they stood when the step was planned
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


loop.EngineLoop = TurnTaker  # type: ignore[misc]
