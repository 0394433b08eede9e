"""Settings that a running engine takes: they hold from the next plan on."""

from __future__ import annotations

from pathlib import Path

from twostroke import LLM, SamplingParams
from twostroke.engine.settings import change
from twostroke.schedule.pace import MARGIN


def test_a_prefix_cache_that_is_turned_off_finds_nothing_of_before(llama_folder: Path) -> None:
    llm = LLM(llama_folder, threads=1, max_model_len=128)
    prompt, asked = [list(range(3, 67))], SamplingParams(max_tokens=2, temperature=0.0)
    scheduler = llm.engine.core.scheduler

    def found() -> int:
        before = scheduler.counters.cached_tokens
        llm.generate(prompt, asked)
        return scheduler.counters.cached_tokens - before

    assert (found(), found()) == (0, 48)
    off = change(scheduler, llm.settings, {"prefix_cache": False})
    assert not scheduler.tables.pool.cached and (found(), found()) == (0, 0)
    change(scheduler, off, {"prefix_cache": True})
    assert (found(), found()) == (0, 48)
    scheduler.check()


def test_drafts_keep_to_the_pause_that_a_stream_may_have(llama_folder: Path) -> None:
    llm = LLM(llama_folder, threads=1, max_model_len=128, max_gap=0.2)
    scheduler = llm.engine.core.scheduler
    assert scheduler.drafter.longest() == MARGIN * 0.2
    then = change(scheduler, llm.settings, {"max_gap": 0.1})
    assert scheduler.drafter.longest() == MARGIN * 0.1
    for speculate in ("off", "lookup"):
        then = change(scheduler, then, {"speculate": speculate})
    assert scheduler.drafter.longest() == MARGIN * 0.1
