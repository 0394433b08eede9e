"""Engines that write a part of an answer and wait for the test: what it does meanwhile is in the middle of the answer,
however slow or fast this machine is."""

from __future__ import annotations

from pathlib import Path

HOLD = """
import os, time, twostroke.remote.loop as loop
def hold(self, step=loop.EngineLoop._step):
    running = self.core.scheduler.running.values()
    enough = {tokens} if len(running) >= {answers} else 2
    if os.path.exists({path!r}) and any(one.output_length >= enough for one in running):
        time.sleep(0.005)
        return []  # no step: it takes messages meanwhile
    return step(self)
loop.EngineLoop._step = hold
"""


def holding(path: Path, tokens: int = 80, answers: int = 1) -> str:
    """Code for an engine's process: while there is this file, an answer has so many tokens and no more. answers: none
    goes far before so many are written at once."""
    return HOLD.format(path=str(path), tokens=tokens, answers=answers)
