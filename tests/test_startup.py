"""The garbage collector rests while the engine starts, and is found as it was left."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from twostroke.startup import collector_paused

WATCHED = """
import gc
import twostroke
passes = []
gc.callbacks.append(lambda phase, info: passes.append(phase))
twostroke.LLM
assert gc.isenabled()
assert len(passes) < 10, f"{len(passes) // 2} collections while torch was imported"
"""


def test_off_inside_and_on_again_after_an_error():
    def fail():
        with collector_paused(), collector_paused():
            assert not gc.isenabled()
            raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_a_collector_that_the_caller_turned_off_stays_off():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_no_collections_while_torch_is_imported():
    subprocess.run([sys.executable, "-c", WATCHED], check=True)
