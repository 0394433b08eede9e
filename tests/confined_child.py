"""What the child process of `test_confined.py` does."""

from __future__ import annotations

import os
import time
from typing import Any

from twostroke.confined import answer_messages


def answer(message: dict[str, Any]) -> dict[str, Any]:
    if "signal" in message:
        os.kill(os.getpid(), message["signal"])
    if "allocate" in message:
        return {"size": len(bytearray(message["allocate"]))}
    if "sleep" in message:
        time.sleep(message["sleep"])
    while "loop" in message:
        pass
    return {"message": message, "pid": os.getpid()}


def main() -> None:
    answer_messages(lambda setup: lambda message: answer(message) | setup)
