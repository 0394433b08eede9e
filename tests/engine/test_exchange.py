"""Blocks leave one engine process and enter another: the same names, and the same tokens from there on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.engine.exchanges import export_prefix, submit_with
from tests.schedule.fakes import FakeEngine, make_scheduler
from twostroke import LLM, SamplingParams
from twostroke.config import make_config
from twostroke.engine.build import build_engine
from twostroke.engine.exchange import (
    arrive,
    cached_since,
    computed_since,
    expect,
    export_lent,
    storage_of,
    store,
)
from twostroke.kv.addresses import Name
from twostroke.types import FinishReason, Request, RequestState, Status

KEY = bytes(range(32))
PROMPT = [(7 * i) % 290 + 3 for i in range(75)]
SETTINGS = {"max_model_len": 192, "threads": 1, "seed": 1, "kv_blocks": 60}
OTHER_PROCESS = """
import json, sys
from twostroke.config import make_config
from twostroke.engine.build import build_engine
from tests.engine.exchanges import export_prefix
from twostroke.sampling import SamplingParams
from twostroke.types import Request
folder, settings, prompt = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
core = build_engine(folder, make_config(**settings), block_key=bytes(range(32))).core
core.submit(Request(0, tuple(prompt), SamplingParams(max_tokens=1, temperature=0), limit=len(prompt) + 1, salt=b"t"))
while not core.idle:
    core.step()
found = export_prefix(core, prompt, b"t")
print(json.dumps([[name.group, name.digest.hex(), content.hex()] for name, content in found.items()]))
"""


def other_process(folder, settings) -> dict[Name, bytes]:
    """The blocks of the prompt, computed by an engine in a process of its own."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(folder), json.dumps(settings), json.dumps(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {Name(g, bytes.fromhex(d)): bytes.fromhex(c) for g, d, c in json.loads(done.stdout.splitlines()[-1])}


def finish(core) -> None:
    while not core.idle:
        core.step()
        core.scheduler.check()


def asked(salt: bytes = b"t") -> Request:
    return Request(5, tuple(PROMPT), SamplingParams(max_tokens=12, temperature=0), limit=len(PROMPT) + 12, salt=salt)


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_another_process_continues_with_the_same_tokens(family, kv_dtype, llama_folder, gemma_folder):
    folder = gemma_folder if family == "gemma" else llama_folder
    settings = SETTINGS | {"kv_dtype": kv_dtype}
    blocks = other_process(folder, settings)
    params = SamplingParams(max_tokens=12, temperature=0)
    want = LLM(folder, **settings).generate([PROMPT], params)[0].samples[0].token_ids
    core = build_engine(folder, make_config(**settings), block_key=KEY).core
    state = submit_with(core, asked(), blocks, len(PROMPT))
    assert state.status is Status.RUNNING and state.computed == 64
    finish(core)
    assert state.tokens[len(PROMPT) :] == want
    mine = export_prefix(core, PROMPT, b"t")
    assert mine.keys() == blocks.keys() and mine == blocks
    assert core.scheduler.counters.computed_tokens == len(PROMPT) - 64 + 11


def test_what_does_not_come_is_computed_here(llama_folder):
    want = LLM(llama_folder, **SETTINGS).generate([PROMPT], SamplingParams(max_tokens=12, temperature=0))[0]
    blocks = other_process(llama_folder, SETTINGS)
    blocks.popitem()
    for known, salt in ((blocks, b"t"), (blocks, b"another tenant"), ({}, b"t")):
        core = build_engine(llama_folder, make_config(**SETTINGS), block_key=KEY).core
        state = submit_with(core, asked(salt), known, len(PROMPT))
        assert state.computed == 0
        finish(core)
        assert state.tokens[len(PROMPT) :] == want.samples[0].token_ids


def test_another_key_or_format_gives_other_names(llama_folder):
    engines = [
        build_engine(llama_folder, make_config(**(SETTINGS | more)), block_key=key).core
        for key, more in ((KEY, {}), (bytes(32), {}), (KEY, {"kv_dtype": "float16"}), (None, {}), (None, {}))
    ]
    roots = [core.scheduler.tables.hasher.root(b"") for core in engines]
    assert len(set(roots)) == 5


def test_a_request_that_waits_for_blocks_is_not_planned_and_gives_them_back():
    engine = FakeEngine(make_scheduler(blocks=30))
    scheduler, pool = engine.scheduler, engine.scheduler.tables.pool
    request = engine.add(list(range(50)), max_tokens=4)
    wanted = scheduler.expect(request, 50)
    assert [name.digest for name, _ in wanted] == request.hashes[:3] and len({block for _, block in wanted}) == 3
    assert request.status is Status.FETCHING and not scheduler.plan(0.0).works and not scheduler.idle
    scheduler.check()
    assert scheduler.abort(request, 1.0).finish_reason == "abort"
    assert pool.available == 26, "bytes may still be written to these blocks"
    scheduler.arrived(request, 0)
    scheduler.check()
    assert pool.available == 30 and scheduler.idle


def test_a_prefix_that_is_here_is_not_fetched():
    engine = FakeEngine(make_scheduler(blocks=30))
    engine.add(list(range(40)), max_tokens=1)
    engine.finish_all()
    request = engine.add(list(range(64)), max_tokens=4)
    wanted = engine.scheduler.expect(request, 64)
    assert request.computed == 32 and len(wanted) == 1
    engine.scheduler.arrived(request, 31)
    assert request.computed == 63 and isinstance(request, RequestState)


# ---- blocks that are lent --------------------------------------------------------------------------------------------


def lending(number: int, tokens: list[int]) -> Request:
    params = SamplingParams(max_tokens=1, temperature=0)
    return Request(number, tuple(tokens), params, limit=len(tokens) + 1, salt=b"t", lend=0)


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "int4"])
@pytest.mark.parametrize(("family", "prefix_cache"), [("llama", True), ("llama", False), ("gemma", True)])
def test_what_a_request_leaves_is_held_until_it_is_taken_back(
    family, prefix_cache, kv_dtype, llama_folder, gemma_folder
):
    folder = gemma_folder if family == "gemma" else llama_folder
    settings = SETTINGS | {"prefix_cache": prefix_cache, "kv_dtype": kv_dtype}
    first, second = (build_engine(folder, make_config(**settings), block_key=KEY).core for _ in range(2))
    first.submit(lending(5, PROMPT))
    finish(first)
    pool = first.scheduler.tables.pool
    held = len(first.scheduler.tables.lent.by_id[5])
    assert pool.available == pool.total - held and first.idle and (held == 5 or family == "gemma")
    begun = Request(6, (*PROMPT, 9), SamplingParams(max_tokens=12, temperature=0), limit=90, salt=b"t", written=1)
    expected = expect(second, begun, len(PROMPT))
    memory = bytearray(held * first.scheduler.tables.layout.block_bytes)
    found = export_lent(first, 5, expected.names, memoryview(memory))
    assert found == tuple(range(held)) and not export_lent(first, 6, expected.names, memoryview(memory))
    size = len(memory) // held
    parts = {name: bytes(memory[i * size : (i + 1) * size]) for i, name in enumerate(expected.names)}
    assert parts == {name: part for name, part in parts.items() if name in dict(first.scheduler.tables.lent.by_id[5])}
    assert arrive(second, expected, parts) and expected.state.computed == 75
    assert [(work.start, work.count) for work in second.scheduler.plan(0.0).works] == [(75, 1)], "it writes at once"
    expected.state.in_flight = 0
    finish(second)
    alone = build_engine(folder, make_config(**settings), block_key=KEY).core
    want = alone.submit(begun)
    finish(alone)
    assert expected.state.tokens == want.tokens
    first.scheduler.tables.lent.take_back(5)
    first.scheduler.tables.lent.take_back(5)
    first.scheduler.check()
    assert pool.available == pool.total


def test_blocks_leave_an_engine_step_by_step_and_another_one_finds_them(llama_folder):
    """In its cache: each part follows the one before it, and the last one comes after the end."""
    settings = SETTINGS | {"max_batch_tokens": 20}
    first, second = (build_engine(llama_folder, make_config(**settings), block_key=KEY).core for _ in range(2))
    tables, pool = first.scheduler.tables, second.scheduler.tables.pool
    state, done, parts = first.submit(lending(5, PROMPT)), 0, []
    while not first.idle:
        first.step()
        end, blocks = computed_since(first, state, done)
        if blocks:
            parts.append((end, {name: first.runner.kv.export(block) for name, block in blocks}))
            done = end
    assert [(end, len(part)) for end, part in parts] == [(16, 1), (32, 1), (48, 1), (76, 2)]
    assert list(parts[-1][1]) == [name for name, _ in tables.lent.by_id[5][-2:]]
    assert store(second, PROMPT[:32], b"t", parts[1][1]) == 0, "it does not follow what is there"
    assert [store(second, PROMPT[:end], b"t", part) for end, part in parts] == [1, 1, 1, 1]
    assert store(second, PROMPT[:32], b"t", parts[1][1]) == 0, "it is there"
    assert store(second, PROMPT[:48], b"another tenant", parts[2][1]) == 0
    second.scheduler.check()
    assert pool.available == pool.total and len(pool.cached) == 4
    found = second.submit(asked())
    finish(second)
    alone = build_engine(llama_folder, make_config(**settings), block_key=KEY).core
    want = alone.submit(asked())
    finish(alone)
    assert found.timeline.cached_tokens == 64 and found.tokens == want.tokens
    assert export_prefix(second, PROMPT, b"t") == export_prefix(alone, PROMPT, b"t")


def test_an_engine_stores_only_what_it_can_keep(llama_folder, gemma_folder):
    blocks = other_process(llama_folder, SETTINGS)
    for more in ({"prefix_cache": False}, {"kv_blocks": 12}):
        core = build_engine(llama_folder, make_config(**(SETTINGS | more)), block_key=KEY).core
        pool = core.scheduler.tables.pool
        running = core.submit(Request(1, tuple(range(3, 150)), asked().params, limit=190, salt=b"t"))
        core.step()
        assert store(core, PROMPT, b"t", blocks) == 0
        core.scheduler.check()
        finish(core)
        assert running.output_length == 43 and pool.available == pool.total
    windowed = build_engine(gemma_folder, make_config(**SETTINGS), block_key=KEY).core
    assert store(windowed, PROMPT, b"t", other_process(gemma_folder, SETTINGS)) == 0
    windowed.scheduler.check()


def test_an_aborted_request_leaves_nothing():
    engine = FakeEngine(make_scheduler(blocks=30))
    request = engine.add(list(range(50)), max_tokens=4)
    request.request = lending(request.id, list(range(50)))
    engine.step()
    engine.scheduler.abort(request, 1.0)
    engine.step()
    assert request.finish_reason is FinishReason.ABORT and not engine.scheduler.tables.lent.by_id


def test_blocks_that_are_lent_are_taken_back_for_a_request_that_cannot_run_otherwise():
    engine = FakeEngine(make_scheduler(blocks=12))
    scheduler = engine.scheduler
    for number in range(3):
        request = engine.add([number] * 50, max_tokens=1)
        request.request = lending(request.id, [number] * 50)
        while request.finish_reason is None:
            engine.step()
    assert list(map(len, scheduler.tables.lent.by_id.values())) == [4, 4, 4]
    engine.add([7] * 100, max_tokens=8)
    while not scheduler.idle:
        engine.step()
        scheduler.check()
    assert len(scheduler.tables.lent.by_id) == 1, "the oldest ones first, and no more than needed"


def test_evicted_blocks_reach_the_host_before_bytes_from_elsewhere_replace_them(llama_folder):
    """The pool is full of cached blocks. Those that make room are found on the host later, with their own bytes."""
    settings = SETTINGS | {"kv_blocks": 12, "kv_offload": 1 << 18}
    blocks = other_process(llama_folder, SETTINGS)
    old = [(11 * i) % 290 + 3 for i in range(180)]
    params = SamplingParams(max_tokens=4, temperature=0)
    core = build_engine(llama_folder, make_config(**settings), block_key=KEY).core
    answers = []
    for number in range(2):
        state = core.submit(Request(number, tuple(old), params, limit=len(old) + 4, salt=b"t"))
        finish(core)
        answers.append(state.tokens)
        if number == 0:
            assert submit_with(core, asked(), blocks, len(PROMPT)).computed == 64
            finish(core)
    assert answers[0] == answers[1] and core.counts().blocks_restored > 0
    assert export_prefix(core, old, b"t") == export_alone(llama_folder, old)


def export_alone(folder, tokens) -> dict[Name, bytes]:
    core = build_engine(folder, make_config(**SETTINGS), block_key=KEY).core
    core.submit(Request(0, tuple(tokens), SamplingParams(max_tokens=1), limit=len(tokens) + 1, salt=b"t"))
    finish(core)
    return export_prefix(core, tokens, b"t")


def test_what_comes_back_from_the_host_is_given_away_with_its_own_bytes(llama_folder):
    """A request that waits for bytes has brought a part of its prompt back from the host. No step has run since."""
    settings = SETTINGS | {"kv_blocks": 12, "kv_offload": 1 << 18}
    core = build_engine(llama_folder, make_config(**settings), block_key=KEY).core
    first, params = [(11 * i) % 290 + 3 for i in range(65)], SamplingParams(max_tokens=1, temperature=0)
    for number, tokens in enumerate((first, [(13 * i) % 290 + 3 for i in range(180)])):
        core.submit(Request(number, tuple(tokens), params, limit=len(tokens) + 1, salt=b"t"))
        finish(core)
    longer = (*first[:64], *PROMPT)
    waiting = expect(core, Request(7, longer, params, limit=len(longer) + 1, salt=b"t"), len(longer))
    assert waiting is not None and core.counts().blocks_restored > 0
    end, blocks = cached_since(core, first, b"t", 0)
    assert end == 64
    found = {name: storage_of(core).export(block) for name, block in blocks}
    assert found == export_alone(llama_folder, first)
