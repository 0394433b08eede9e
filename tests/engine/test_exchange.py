"""Blocks leave one engine process and enter another: the same names, and the same tokens from there on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.schedule.fakes import FakeEngine, make_scheduler
from twostroke import LLM, SamplingParams
from twostroke.config import make_config
from twostroke.engine.build import build_engine
from twostroke.engine.exchange import export_prefix, submit_with
from twostroke.kv.addresses import Name
from twostroke.types import Request, RequestState, Status

KEY = bytes(range(32))
PROMPT = [(7 * i) % 290 + 3 for i in range(75)]
SETTINGS = {"max_model_len": 192, "threads": 1, "seed": 1, "kv_blocks": 60}
OTHER_PROCESS = """
import json, sys
from twostroke.config import make_config
from twostroke.engine.build import build_engine
from twostroke.engine.exchange import export_prefix
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
    assert pool.available == 27, "bytes may still be written to these blocks"
    scheduler.arrived(request, complete=False)
    scheduler.check()
    assert pool.available == 30 and scheduler.idle


def test_a_prefix_that_is_here_is_not_fetched():
    engine = FakeEngine(make_scheduler(blocks=30))
    engine.add(list(range(40)), max_tokens=1)
    engine.finish_all()
    request = engine.add(list(range(64)), max_tokens=4)
    wanted = engine.scheduler.expect(request, 64)
    assert request.computed == 32 and len(wanted) == 1
    engine.scheduler.arrived(request, complete=True)
    assert request.computed == 48 and isinstance(request, RequestState)
