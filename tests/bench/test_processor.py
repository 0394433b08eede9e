"""Processor time of other programs is counted, that of this process is not."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from twostroke.bench import processor
from twostroke.bench.grid import undisturbed
from twostroke.metrics.steplog import LoggedWork, Step

pytestmark = pytest.mark.skipif(not processor.STAT.exists(), reason="the system does not report it")


def test_another_program_is_seen():
    watch = processor.OtherPrograms()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.6: pass"], check=True)
    assert watch.seconds > 0.5 and watch.share > 0.05


def test_our_own_work_is_taken_off():
    began = processor.processor_seconds()
    watch = processor.OtherPrograms()
    until = time.process_time() + 0.4
    while time.process_time() < until:
        pass
    others = watch.seconds
    used = processor.processor_seconds() - began  # begins before the watch and ends after it, whatever comes between
    assert others < used - 0.3


def test_where_the_system_does_not_report_it_is_zero(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "STAT", tmp_path / "none")
    assert processor.OtherPrograms().seconds == 0.0


def test_disturbed_repeats_count_only_where_there_are_no_others():
    def step(seconds, start):
        return Step(1, 0.0, seconds, (LoggedWork(1, start, 1),), 1)

    quiet = [step(1.0, 17), step(1.1, 18), step(1.0, 33)]
    kept = undisturbed(quiet, [step(9.0, 19), step(2.0, 34)])
    assert [one.seconds for one in kept] == [1.0, 1.1, 1.0, 2.0]
