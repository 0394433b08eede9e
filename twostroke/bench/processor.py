"""Processor time that other programs use during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = (3, 4)  # fields of its first line: idle, waiting for a disk


class OtherPrograms:
    """Processor time of other programs since the last `mark`."""

    def __init__(self) -> None:
        self.mark()

    def mark(self) -> None:
        self.began, self.own, self.all = time.monotonic(), time.process_time(), processor_seconds()

    @property
    def seconds(self) -> float:
        """0 where the system does not report it."""
        now = processor_seconds()
        if now is None or self.all is None:
            return 0.0
        return max(0.0, now - self.all - (time.process_time() - self.own))

    @property
    def share(self) -> float:
        """What other programs took, as a share of one core."""
        return self.seconds / max(time.monotonic() - self.began, 1e-6)


def processor_seconds() -> float | None:
    """Seconds of all cores since the system started, including what a hypervisor took."""
    try:
        fields = [int(field) for field in STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return (sum(fields) - sum(fields[place] for place in IDLE)) / os.sysconf("SC_CLK_TCK")
