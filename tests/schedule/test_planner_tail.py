"""The end of a prompt whose blocks another engine wants: the last full blocks travel while the tail is computed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.schedule.fakes import FakeEngine, make_scheduler
from twostroke.record import replace


def steps(length: int, lend: int, sample: int = 0, **options) -> list[int]:
    """Tokens of the prompt in each step."""
    engine = FakeEngine(make_scheduler(blocks=200, **options))
    request = engine.add(list(range(length)), max_tokens=1)
    request.request = replace(request.request, lend=lend, sample=sample)
    computed = [0]
    while request.finish_reason is None:
        engine.step()
        engine.scheduler.check()
        computed.append(request.computed)
    return [after - before for before, after in pairwise(computed) if after > before]


@pytest.mark.parametrize(
    ("length", "parts"),
    [
        (300, [288, 12]),
        (288, [272, 16]),  # the last block is full only with the token that gives the first logits
        (700, [512, 188]),  # the rest is short: its blocks take less time than another step
        (1400, [512, 512, 368, 8]),
        (1024, [512, 496, 16]),
        (255, [255]),
    ],
)
def test_the_tail_is_a_step_of_its_own(length, parts):
    assert steps(length, lend=0) == parts
    assert steps(length, lend=3) == parts, "what the other engine has does not matter here"


@pytest.mark.parametrize(
    "options", [{"windows": (64,)}, {"windows": (None, 64)}, {"chunked": False}], ids=["window", "windows", "whole"]
)
def test_no_tail_where_it_would_gain_nothing(options):
    assert steps(300, lend=0, **options) == [300]


def test_no_tail_for_an_answer_that_stays():
    assert steps(300, lend=-1) == [300]
    assert steps(300, lend=0, sample=1) == [300], "its siblings' blocks are copied, not its own"


def test_blocks_of_entries_for_several_tokens_end_where_all_groups_do():
    assert steps(500, lend=0, windows=(None, None), entry_tokens=(1, 128)) == [384, 116]
