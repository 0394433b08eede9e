"""Evicted blocks on the host: found again by their names, forgotten when a step fails, byte for byte the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.schedule.fakes import FakeEngine, make_scheduler
from twostroke import LLM, SamplingParams
from twostroke.errors import ConfigError
from twostroke.kv import host_memory
from twostroke.kv.addresses import Name
from twostroke.kv.layout import make_layout
from twostroke.kv.offload import HostPool
from twostroke.kv.storage import KVStorage
from twostroke.model.arch import Arch, DenseArch, GroupedArch, LayerArch
from twostroke.types import Move, Place

FULL, NARROW = (LayerArch(GroupedArch(2, 2, 16, window), DenseArch(32)) for window in (None, 24))
ARCH = Arch(
    family="llama", vocab=64, hidden=32, layers=(FULL, NARROW, NARROW), max_positions=512, norm_eps=1e-5
)  # fmt: skip


def served(engine: FakeEngine, tokens: list[int]) -> int:
    """Tokens computed for this prompt and one of its answer."""
    before = engine.scheduler.counters.computed_tokens
    engine.add(tokens, max_tokens=1)
    engine.finish_all()
    return engine.scheduler.counters.computed_tokens - before


def prompt(number: int, length: int = 200) -> list[int]:
    return [1000 * number + i for i in range(length)]


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_evicted_prompt_is_copied_back_instead_of_computed(depth, windows):
    engine = FakeEngine(make_scheduler(blocks=16 * len(windows), windows=windows, host_slots=100), depth)
    first = served(engine, prompt(1))
    assert served(engine, prompt(2)) == first == 200  # no room for both
    assert served(engine, prompt(1)) == 200 - 192
    host = engine.scheduler.tables.pool.host
    assert host.restored > 0 and host.offloaded >= host.restored
    assert engine.requests[-1].timeline.cached_tokens == 192


def test_without_room_on_the_host_the_oldest_are_forgotten():
    engine = FakeEngine(make_scheduler(blocks=16, host_slots=12))
    for number in (1, 2, 3, 4):
        served(engine, prompt(number))
    assert served(engine, prompt(1)) == 200
    assert served(engine, prompt(4)) < 200


def test_what_is_evicted_again_is_not_copied_again():
    engine = FakeEngine(make_scheduler(blocks=16, host_slots=100))
    for _ in range(4):
        served(engine, prompt(1))
        served(engine, prompt(2))
    host = engine.scheduler.tables.pool.host
    assert host.offloaded <= 2 * 12 and host.restored > 3 * 12


def test_a_prompt_whose_slots_are_all_the_host_has_comes_back_whole():
    """Room for it is made by evicting others, whose bytes must not replace its own before they were read."""
    engine = FakeEngine(make_scheduler(blocks=13, host_slots=12))
    served(engine, prompt(1))
    served(engine, prompt(2))
    assert served(engine, prompt(1)) == 200 - 192


def test_a_pool_that_is_cleared_finds_nothing_on_either_side():
    engine = FakeEngine(make_scheduler(blocks=16, host_slots=100))
    for number in (1, 2):
        served(engine, prompt(number))
    pool = engine.scheduler.tables.pool
    assert pool.cached and pool.host.slot_of
    pool.clear()
    engine.scheduler.check()
    assert [served(engine, prompt(number)) for number in (1, 2)] == [200, 200]


def test_copies_of_a_failed_step_are_forgotten_on_both_sides():
    engine = FakeEngine(make_scheduler(blocks=16, host_slots=100))
    served(engine, prompt(1))
    served(engine, prompt(2))
    scheduler = engine.scheduler
    again = engine.add(prompt(1), max_tokens=1)
    plan = scheduler.plan(engine.now)
    assert {move.away for move in plan.moves} == {True, False}
    (ended,) = scheduler.fail([plan], "boom", engine.now)
    assert ended.request_id == again.id
    engine._count(ended)
    engine.snapshots.clear()
    scheduler.check()
    host, pool = scheduler.tables.pool.host, scheduler.tables.pool
    assert not any(host.name_in[move.place.slot] for move in plan.moves if move.away)
    assert not any(pool.name_of[move.block] for move in plan.moves if not move.away)
    assert served(engine, prompt(1)) == 200 - 192  # the slots that were only read are still good


def test_copies_that_no_plan_has_taken_yet_are_forgotten_too():
    pool, name = HostPool(4), Name(0, b"x")
    pool.keep(3, name, (1, 2))
    assert pool.has(name, (1, 2)) and not pool.has(name, (1, 3))
    assert pool.undo([]) == set()
    assert not pool.has(name, (1, 2)) and not pool.moves
    pool.check()


@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["arrays", "tensors"])
@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8", "int4", "fp8"])
def test_bytes_come_back_as_they_went(kv_format, device, monkeypatch):
    layout = make_layout(ARCH, kv_format)
    monkeypatch.setattr(host_memory, "ALLOCATION", 2 * layout.block_bytes)  # five slots lie in three allocations
    kv = KVStorage(layout, 6, kv_format, device, host_slots=5)
    assert kv.host.allocations[0].shape == (2, layout.block_bytes) and len(kv.host.allocations) == 3
    pool = np.asarray(kv.data)  # the same memory
    pool[:] = np.random.default_rng(0).integers(0, 256, pool.shape)
    before = pool.copy()
    kv.move([Move(block, Place(slot), True) for block, slot in zip((1, 2, 3, 4), (4, 0, 2, 1), strict=True)])
    pool[:] = 0
    kv.move([Move(block, Place(slot), False) for block, slot in zip((5, 0, 3), (4, 0, 1), strict=True)])
    assert np.array_equal(pool[[5, 0, 3]], before[[1, 2, 4]]) and not pool[[1, 2, 4]].any()
    assert kv.export(5) == before[1].tobytes()
    kv.take_in([(1, before[2].tobytes())])
    assert kv.export(1) == before[2].tobytes()
    with pytest.raises(ValueError, match="a block has"):
        kv.take_in([(1, b"too short")])


def test_llm_counts_what_went_and_came_and_says_the_same(llama_folder):
    prompts = [[(7 * i + number) % 300 + 3 for i in range(100)] for number in range(4)]
    asked = SamplingParams(max_tokens=4, temperature=0.0)
    plain = LLM(llama_folder, kv_blocks=12, max_model_len=128, threads=2)
    roomy = LLM(llama_folder, kv_blocks=12, max_model_len=128, threads=2, kv_offload=1 << 24)
    for _ in range(2):
        answers = [[llm.generate([p], asked)[0].samples[0].token_ids for p in prompts] for llm in (plain, roomy)]
        assert answers[0] == answers[1]
    stats = roomy.stats()
    assert stats["blocks_offloaded"] > 0 and stats["blocks_restored"] > 0 and stats["blocks_on_host"] > 0
    assert stats["cached_tokens"] > plain.stats()["cached_tokens"]
    assert plain.stats()["blocks_offloaded"] == plain.stats()["blocks_restored"] == 0
    assert "evicted blocks" in roomy.settings.reasons["kv_offload"]


def test_more_than_the_machine_has_is_refused(llama_folder):
    with pytest.raises(ConfigError, match=r"kv_offload .*lower it"):
        LLM(llama_folder, kv_offload=1 << 60)
