"""Pools that compute K and V in different ways: blocks travel between them, and the deployment says that it is not
exact."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.fakes import FakeTransport
from tests.cluster.pairs import GREEDY, NAMES, PEERS, SETTINGS, Pair, all_back, answer, held_answers, moved, run_pair
from tests.cluster.rays import all_up, run_deployment
from tests.cluster.test_faults import FAULTS, LONG, kill, prompts
from tests.cluster.test_pair import PROMPT, Alone
from tests.cluster.test_ray import shape
from tests.cluster.test_shared_prefix import SAMPLES, SHARED, Three, at, run_three
from tests.cluster.test_storm import hurt
from tests.waiting import until
from twostroke.cluster.deployment import Deployment
from twostroke.cluster.group import check_names
from twostroke.cluster.mixed import ways_of
from twostroke.cluster.sockets import SharedMemoryTransport
from twostroke.config import make_config, resolve
from twostroke.engine.build import build_engine
from twostroke.errors import ConfigError
from twostroke.hardware import this_machine
from twostroke.record import replace
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.messages import Ready
from twostroke.types import FinishReason
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.fingerprint import fingerprint
from twostroke.weights.load import load_arch

NARROW = {"quantize": "int4"}
PLAIN = {"speculate": "off"}
MIXED = ("weights as in the file", "weights int4")
FIRST = replace(GREEDY, max_tokens=1)
ENDS = (FinishReason.LENGTH, FinishReason.STOP)


@pytest.fixture(scope="module")
def wide(llama_folder: Path) -> Alone:
    return Alone(llama_folder)


@pytest.fixture(scope="module")
def narrow(llama_folder: Path) -> Alone:
    return Alone(llama_folder, **NARROW)


def tokens(answered: list) -> list[int]:
    return list(answered[0][0])


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_the_blocks_of_one_pool_are_used_in_the_other(
    llama_folder: Path, wide: Alone, narrow: Alone, kind: str
) -> None:
    many = [[(one * 3 + turn) % 290 + 3 for one in PROMPT] for turn in range(6)]
    together: list[list[int]] = []

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        for number, prompt in enumerate(many):
            before = pair.decode.counts.computed_tokens
            together.append(tokens(await answer(engine, prompt)))
            await moved(pair)
            assert pair.counts.done == number + 1 and not pair.counts.failed
            assert pair.decode.counts.computed_tokens - before == len(together[-1]) - 1, "it computed the prompt again"
            assert together[-1][0] == tokens(narrow.answer(prompt, FIRST))[0]
        known = engine.intake.settings
        assert not known.exact and known.reasons["exact"].startswith("pools that compute in different ways (weights as")
        await engine.change({"max_gap": 0.5})
        assert not engine.intake.settings.exact

    run_pair(
        llama_folder, scenario, lambda: SharedMemoryTransport(PEERS), kind, prefill=NARROW, decode=PLAIN, mixed=MIXED
    )
    assert together != [tokens(wide.answer(prompt)) for prompt in many], "the two formats give the same tokens"


def test_where_blocks_do_not_come_the_other_weights_write_the_rest(
    llama_folder: Path, wide: Alone, narrow: Alone
) -> None:
    """The prompt and the first token are read by the second engine, as a prompt of its own would be."""
    transport = FakeTransport()

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        for number, (prompt, fault) in enumerate(zip(prompts(len(FAULTS)), FAULTS.values(), strict=True)):
            transport.fault = lambda fault=fault: fault  # type: ignore[misc]
            found = await answer(engine, prompt)
            first = tokens(narrow.answer(prompt, FIRST))
            rest = wide.answer([*prompt, *first], replace(GREEDY, max_tokens=GREEDY.max_tokens - 1))
            assert tokens(found) == first + tokens(rest) and found[0][1] == rest[0][1]
            await moved(pair)
            assert sum(pair.counts.failed.values()) == number + 1
            await all_back(engine, pair)
        assert transport.open == 0

    run_pair(llama_folder, scenario, lambda: transport, prefill=NARROW, decode=PLAIN, mixed=MIXED, transfer_seconds=3.0)


def test_streams_go_on_in_the_other_pool(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their process is killed: each ends once, with all its tokens and no error."""

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in prompts(3)]
        await until(lambda: sum(len(flight.written) for flight in pair.flights.values()) > 60, "nothing was written")
        kill(pair.decode.worker.engine)
        go_on()
        for stream in streams:
            (written, reason, _), *others = await stream
            assert len(written) == LONG.max_tokens and reason == FinishReason.LENGTH and not others
        assert pair.resumed >= 1 and pair.restarts == 0

    with held_answers(monkeypatch, tmp_path / "hold") as go_on:
        run_pair(
            llama_folder, scenario, lambda: SharedMemoryTransport(PEERS), "process",
            prefill=NARROW, decode=PLAIN, mixed=MIXED,
        )  # fmt: skip


def test_prefill_workers_share_a_beginning(llama_folder: Path) -> None:
    many = [[*SHARED, *range(20 + number, 40 + number)] for number in range(3)]

    async def scenario(engine: AsyncEngine, three: Three) -> None:
        await at(engine, three, "p0", many[0])
        await at(engine, three, "p1", many[1])
        assert three.counts.shared == 8 and three.members["p1"].counts.computed_tokens == 20
        found = await at(engine, three, "p1", many[2], SAMPLES)
        assert len(found) == SAMPLES.n and all(reason in ENDS for _, reason, _ in found)
        assert not three.counts.failed

    run_three(llama_folder, scenario, prefill=NARROW, mixed=MIXED)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_what_names_depend_on(llama_folder: Path) -> None:
    def identity(mixed: tuple[str, ...] = (), **more: object) -> str:
        engine = build_engine(llama_folder, make_config(**(SETTINGS | more)), block_key=NAMES, mixed=mixed)
        return engine.core.scheduler.tables.hasher.identity.decode()

    weights = fingerprint(open_checkpoint(llama_folder))
    backend = identity().split()[-2]
    assert identity() == f"{weights} int8 None None {backend} True"
    assert identity(**NARROW) == f"{weights} int8 None int4 {backend} True"
    assert identity(MIXED) == identity(MIXED, **NARROW) == f"{weights} int8 {' '.join(MIXED)} {backend}"
    assert identity(MIXED, kv_dtype="float16", **NARROW) == f"{weights} float16 {' '.join(MIXED)} floats"


@pytest.mark.parametrize(
    ("prefill", "mixed", "words"),
    [
        (NARROW, (), "quantize is int4 for prefill and None for decode"),
        (NARROW | {"kv_dtype": "float16"}, MIXED, "blocks: kv_dtype is float16 for prefill and int8 for decode. Start"),
    ],
)
def test_what_does_not_start(llama_folder: Path, prefill: dict, mixed: tuple[str, ...], words: str) -> None:
    async def nothing(engine: AsyncEngine, pair: Pair) -> None:
        raise AssertionError("they started")

    with pytest.raises(ConfigError, match=words):
        run_pair(llama_folder, nothing, prefill=prefill, mixed=mixed)


def test_in_which_ways_workers_compute() -> None:
    cpu, cuda = {"device": "cpu"}, {"device": "cuda"}
    assert ways_of([cpu, cpu]) == ways_of([NARROW, NARROW]) == ways_of([cuda | {"threads": 2}, cuda]) == ()
    assert ways_of([NARROW, {}]) == ways_of([{}, NARROW, {}]) == MIXED
    assert ways_of([{"dtype": "float16"}, {"quantize": "int8"}]) == ("weights float16", "weights int8")
    assert ways_of([cpu, cuda]) == ("weights as in the file on cpu", "weights as in the file on cuda")
    with pytest.raises(ConfigError, match="exact=True does not go with pools that compute in different ways"):
        ways_of([{"exact": True}, NARROW | {"exact": True}])


@pytest.mark.parametrize(
    ("kv_dtype", "words"),
    [
        ("int8", "prefill on cuda and decode on cpu keep int8 in different ways: give all kv_dtype=bfloat16. Start"),
        ("bfloat16", "other weights or another block key"),
    ],
)
def test_why_two_devices_do_not_go_together(llama_folder: Path, kv_dtype: str, words: str) -> None:
    settings = resolve(make_config(kv_dtype=kv_dtype), load_arch(open_checkpoint(llama_folder)), this_machine("cpu"), 0)
    here = Ready(settings, {}, 0.0, (1, 0.0), "", 0.0, b"one", mixed=MIXED)
    other = replace(settings, device="cuda") if kv_dtype == "int8" else settings
    there = Ready(other, {}, 0.0, (1, 0.0), "", 0.0, b"another", mixed=MIXED)
    with pytest.raises(ConfigError, match=words):
        check_names({"prefill": there, "decode": here})


@pytest.mark.slow
def test_a_deployment_says_it(
    llama_folder: Path, narrow: Alone, ray_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(engine: AsyncEngine, deployment: Deployment) -> None:
        (written, reason, _), *_ = await answer(engine, PROMPT)
        assert reason in ENDS and written[0] == tokens(narrow.answer(PROMPT, FIRST))[0]
        await moved(deployment)
        assert deployment.counts.done == 1 and not deployment.counts.failed
        assert not engine.intake.settings.exact

    run_deployment(llama_folder, shape(ray_address, prefill_settings=NARROW, share_cores=True), scenario)
    assert (
        capsys.readouterr().out.count("not exact: with pools that compute in different ways (weights as in the file; ")
        == 1
    )


@pytest.mark.slow
def test_every_request_ends_whatever_is_killed(llama_folder: Path, ray_address: str) -> None:
    """With all its tokens and no error."""
    rng, happened = random.Random(5), Counter[str]()

    async def one(engine: AsyncEngine, prompt: list[int]) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        (written, reason, _), *others = await answer(engine, prompt, LONG)
        assert len(written) == LONG.max_tokens and reason == FinishReason.LENGTH and not others

    async def scenario(engine: AsyncEngine, deployment: Deployment) -> None:
        while happened.total() < 4:
            running = [asyncio.ensure_future(one(engine, prompt)) for prompt in prompts(8)]
            await asyncio.sleep(rng.random() * 0.3)
            await hurt(deployment, rng, happened)
            await asyncio.gather(*running)
            await all_back(engine, deployment, 10)
            await all_up(deployment)
        assert deployment.restarts == 0 and deployment.counts.done > 0

    mixed = shape(ray_address, "2+2", prefill_settings=NARROW, decode_settings={"quantize": "int8"}, share_cores=True)
    run_deployment(llama_folder, mixed, scenario)
