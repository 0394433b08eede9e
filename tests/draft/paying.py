"""Drafts that pay however fast this machine is: in this process, or in the engine's process of a server."""

from __future__ import annotations

from typing import Any

import numpy as np

from twostroke.draft.rates import StepTimes
from twostroke.draft.speculate import Speculation, make_drafter
from twostroke.engine import build, settings

# For `Server(code=…)`: its engine's process begins with `install`.
PAYING_SERVER = """
from twostroke.remote import process
START = "from twostroke.remote.child_main"
assert START in process.BOOT
process.BOOT = process.BOOT.replace(START, "from tests.draft import paying; paying.install(); " + START)
"""


class FreeRows(StepTimes):
    """As if every step took the same time."""

    def predict(self, rows: int) -> float:
        return 0.1

    def predict_all(self, rows, below):
        return np.full(len(rows), 0.1)


class Unjudged:
    """Whether drafts have paid is not asked: that depends on how fast this machine is."""

    def add(self, without: float, taken: float) -> None:
        pass

    def allows(self) -> bool:
        return True


def make_rows_free(drafter: Any) -> None:
    drafter.times = drafter.verified = FreeRows()
    drafter.realised = {size: Unjudged() for size in range(8)}  # by doublings of streams


def make_drafts_cheap(drafter: Speculation) -> None:
    """As if a step took the same time for any number of rows, and a pass of the draft model a tenth of it."""
    make_rows_free(drafter)
    if drafter.model is not None:
        drafter.model.share, drafter.model.times.add = 0.1, lambda rows, seconds: None


def make_paying_drafter(*given: Any) -> Speculation | None:
    made = make_drafter(*given)
    if made is not None:
        make_drafts_cheap(made)
    return made


def install() -> None:
    """Engines that are built from now on draft wherever there is something to guess."""
    build.make_drafter = settings.make_drafter = make_paying_drafter
