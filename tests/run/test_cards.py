"""Ranks on GPUs: two processes, each with its part of a model, give the tokens of one. Under Triton's interpreter."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_ranks.py runs this on the card", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
pytest.importorskip("triton")

from tests.engine.oracle import OracleDrafter
from tests.run.card_rank import interpreted
from tests.run.test_cuda_runner import ASKED, PROMPTS, tokens_of
from twostroke.config import Resolved, make_config, resolve
from twostroke.engine import build
from twostroke.engine.core import Core
from twostroke.errors import ConfigError, ModelError, RankLostError
from twostroke.hardware import Hardware
from twostroke.model.parallel import whole_step
from twostroke.model.shares import divided
from twostroke.ranks import cards
from twostroke.ranks import group as ranks_
from twostroke.ranks.cards import CardRanks, check_cards
from twostroke.ranks.group import open_gloo
from twostroke.ranks.storage import RankedStorage
from twostroke.run.cuda import ranked
from twostroke.run.cuda.collective import HostCollective, NcclCollective, in_order, open_nccl
from twostroke.run.cuda.ranked import Lead, StepMessage, lead_of
from twostroke.run.cuda.runner import CudaRunner
from twostroke.run.cuda.steps import Known, Shape
from twostroke.run.cuda.warm_up import product_tasks, run_largest_step
from twostroke.schedule.make import make_scheduler
from twostroke.types import Request
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_arch

CPU = torch.device("cpu")
BOOT = "import sys; sys.path.append(sys.argv[2]); from tests.run.card_rank import main; main(sys.argv[1])"
GONE = """import socket, sys; sys.path.append(sys.argv[2])
from twostroke.ranks.group import READY, read_frame, send_frame
with socket.socket(fileno=int(sys.argv[1])) as sock:
    read_frame(sock)
    send_frame(sock, READY)
"""


class Engine:
    """What build.py puts together on a card, as far as it can be on a CPU."""

    def __init__(self, folder: Path, exact: bool = False):
        checkpoint = open_checkpoint(folder)
        arch = load_arch(checkpoint)
        config = make_config(
            max_model_len=160, kv_dtype="float32", max_batch_tokens=24, kv_blocks=40, seed=1, parallel=2,
            threads=1, max_requests=3, exact=exact,
        )  # fmt: skip
        self.settings: Resolved = resolve(config, divided(arch, 2), Hardware("cuda", 2, 1 << 30), 0)
        self.ops = interpreted("cuda", "float32", 1, None, exact)
        self.ranks = build.start_ranks(checkpoint, self.settings)
        assert isinstance(self.ranks, CardRanks)
        self.model = build.load_leading(checkpoint, self.ops, self.settings, self.ranks, None, None)
        self.arch = arch

    def tokens(
        self, prompts: list[list[int]] = PROMPTS, drafter: OracleDrafter | None = None
    ) -> list[tuple[list[int], object]]:
        settings = self.settings
        kv = self.kv = RankedStorage(
            self.ranks, settings.layout, settings.kv_blocks, settings.kv_dtype, self.ops.device
        )
        self.ranks.reserve(settings.kv_blocks)
        scheduler = make_scheduler(self.arch, settings, "tiny")
        core = Core(scheduler, CudaRunner(self.model, kv, scheduler.tables.array, self.ops))
        scheduler.drafter = drafter
        found = [
            core.submit(Request(number, tuple(tokens), ASKED[number % 3], 7 + number, limit=len(tokens) + 4))
            for number, tokens in enumerate(prompts)
        ]
        while not core.idle:
            core.step()
        return [(request.tokens, request.finish_reason) for request in found]


@pytest.fixture(scope="module")
def in_two(llama_folder: Path) -> Iterator[Engine]:
    """Ranks are processes that interpret their kernels, and share what counts as one card."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_, "BOOT", BOOT)
        patch.setattr(cards, "count_cards", lambda: 1)
        patch.setattr(cards, "free_on_card", lambda: 9000)
        patch.setattr(cards, "current_card", lambda: 0)
        patch.setattr(cards, "take_card", lambda number: None)
        patch.setenv(cards.SHARE_VARIABLE, "1")
        engine = Engine(llama_folder)
        yield engine
        engine.ranks.close()
        assert [process.returncode for process in engine.ranks.processes] == [0]


def test_two_ranks_choose_the_tokens_of_one(in_two: Engine, llama_folder: Path) -> None:
    """Greedy, drawn, and with penalties and log probabilities, which the host makes; streams, chunks and both."""
    assert in_two.tokens() == tokens_of(llama_folder, "cpu")
    assert not in_two.ranks.lost()


@pytest.mark.slow
def test_exact_ranks_choose_the_tokens_of_one(llama_folder: Path, in_two: Engine) -> None:
    """in_two: what it has patched."""
    engine = Engine(llama_folder, exact=True)
    assert engine.ops.one_order and engine.tokens() == tokens_of(llama_folder, "cpu")
    engine.ranks.close()


@pytest.mark.slow
def test_drafts_are_verified_on_both_ranks(in_two: Engine, llama_folder: Path) -> None:
    right = tokens_of(llama_folder, "cpu", PROMPTS[:2])
    answers = {
        (tuple(prompt), ASKED[n].temperature): [tokens[len(prompt) :]]
        for n, (prompt, (tokens, _)) in enumerate(zip(PROMPTS[:2], right, strict=True))
    }
    assert in_two.tokens(PROMPTS[:2], OracleDrafter(answers, most=3, errors=0.3)) == right


@pytest.mark.slow
def test_blocks_have_the_parts_of_both_cards(in_two: Engine) -> None:
    in_two.tokens(PROMPTS[:1])
    size = in_two.settings.layout.block_bytes
    content = in_two.kv.export(0)
    assert len(content) == 2 * size and any(content[:size]) and any(content[size:])
    assert content[:size] != content[size:]
    in_two.kv.take_in([(7, content)])
    assert in_two.kv.export(7) == content


def test_the_cache_is_sized_by_the_smallest_rank(in_two: Engine) -> None:
    """The largest step runs on both, each in a cache for it; then each says what its card has left."""
    lead = lead_of(in_two.model)
    assert lead is not None
    tokens = run_largest_step(in_two.model, in_two.ops, in_two.settings)
    assert len(tokens) == 3 and len(set(tokens)) == 1  # the same prompt three times
    assert lead.free() == 5000 // 2  # 9,000 here and 5,000 there, of which two ranks have one half each


def test_kernels_are_compiled_as_ranks_run_them(in_two: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual is added after the sum over ranks, not in the product."""
    layer, added = in_two.model.layers[0], []
    monkeypatch.setattr(in_two.ops, "linear", lambda x, weight, *, before, add_to: added.append(add_to))
    for product in layer.products():
        for task in product_tasks(in_two.model, layer, product, 1):
            task()
    assert added == [None] * 4


def test_an_engine_ends_with_a_rank(llama_folder: Path, in_two: Engine) -> None:
    """in_two: what it has patched."""
    engine = Engine(llama_folder)
    rank = engine.ranks.processes[0]
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    with pytest.raises(RankLostError):
        engine.tokens(PROMPTS[:1])
    assert engine.ranks.lost()
    engine.ranks.close()


def test_a_rank_that_ends_before_all_have_met_is_an_error_of_the_start(
    llama_folder: Path, in_two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its share, and ends: the sum of the others would wait for it."""
    monkeypatch.setattr(ranks_, "BOOT", GONE)
    with pytest.raises(ModelError, match="a rank has ended before all had met"):
        Engine(llama_folder)


def test_a_step_is_the_same_after_its_way() -> None:
    shape = Shape(5, 2, 16, 2, 1, 1, (3, 1), (1, 2), filtered=True)
    known = Known(np.array([4, 1]), np.array([4, 9]), ((0,), ()), (((0, 4, 4),), ()))
    for given in (known, None):
        message = StepMessage(shape, 3, given, np.arange(7, dtype=np.int32))
        found = StepMessage.unpacked(message.packed())
        assert found.shape == shape and type(found.shape.tiles) is tuple and found.prompt_rows == 3
        assert found.numbers.tolist() == list(range(7))
        assert (found.known is None) == (given is None)
    assert found.known is None
    found = StepMessage.unpacked(StepMessage(shape, 0, known, np.zeros(1, np.int32)).packed())
    assert found.known is not None and found.known.counts.tolist() == [4, 1] and found.known[2:] == known[2:]


# ---- collectives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_through_the_host_are_made_in_order(tmp_path: Path, dtype: torch.dtype) -> None:
    ranks, shapes = 3, [(1, 8), (5, 16), (2, 3), (0, 4)]
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(ranks, *shape, generator=generator).mul(100).to(dtype) for shape in shapes]
    tokens = [torch.arange(6, dtype=torch.int32) * 10 ** (rank + 1) for rank in range(ranks)]

    def run(rank: int) -> list[torch.Tensor]:
        collective = HostCollective(open_gloo(tmp_path, rank, ranks), ranks, CPU)
        cards.check(collective, rank, ranks, CPU)
        found = [collective.sum(parts[rank].clone()) for parts in given]
        collective.share(tokens[rank])
        return found

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(run, range(ranks)))
    for found in results:
        for parts, total in zip(given, found, strict=True):
            want = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
            assert total.dtype == dtype and torch.equal(total, want)
    assert all(torch.equal(one, torch.arange(6, dtype=torch.int32) * 10) for one in tokens)


def test_a_rank_that_is_gone_ends_a_sum_through_the_host(tmp_path: Path) -> None:
    def run(rank: int) -> HostCollective:
        return HostCollective(open_gloo(tmp_path, rank, 2), 2, CPU)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    del second
    with pytest.raises(RankLostError):
        first.sum(torch.ones(1, 4))


class Done:
    def wait(self) -> None:
        pass


class Group:
    """What NCCL would do: two ranks, of which the other one gives the same as this one, doubled."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def allreduce(self, tensors: list[torch.Tensor]) -> Done:
        self.calls.append("allreduce")
        tensors[0].mul_(3)
        return Done()

    def _allgather_base(self, out: torch.Tensor, value: torch.Tensor) -> Done:
        self.calls.append("allgather")
        out.copy_(torch.stack([value, 2 * value]))
        return Done()

    def broadcast(self, value: torch.Tensor, root: int) -> Done:
        self.calls.append(f"broadcast {root}")
        return Done()

    def abort(self) -> None:
        self.calls.append("abort")


def test_nccl_adds_by_itself_or_gathers_for_one_order() -> None:
    for ordered, call in ((False, "allreduce"), (True, "allgather")):
        group = Group()
        collective = NcclCollective(group, 2, ordered)
        assert collective.sum(torch.full((2, 3), 1.5)).tolist() == [[4.5] * 3] * 2
        assert collective.sum(torch.empty(0, 3)).shape == (0, 3)  # no rank has a row that goes on
        collective.share(torch.zeros(2, dtype=torch.int32))
        collective.close()
        collective.close()
        assert group.calls == [call, "broadcast 0", "abort"]


def test_a_first_sum_that_is_wrong_is_an_error_of_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cards, "open_nccl", lambda *_: NcclCollective(Group(), 2, False))
    ops = interpreted("cuda", "float32", 1, None, False)
    cards.open_collective(tmp_path, 0, 2, 2, ops)
    with pytest.raises(ModelError, match=r"4 ranks do not reach each other: the ranks' first sum is 3\.0, not 10"):
        cards.open_collective(tmp_path, 0, 4, 4, ops)


@pytest.mark.parametrize(("exact", "parts", "ordered"), [(True, 2, False), (True, 4, True), (False, 4, False)])
def test_exact_sums_of_more_than_two_ranks_are_ordered(tmp_path: Path, monkeypatch, exact, parts, ordered) -> None:
    asked = []
    monkeypatch.setattr(cards, "open_nccl", lambda *given: asked.append(given[3]))
    monkeypatch.setattr(cards, "check", lambda *_: None)
    cards.open_collective(tmp_path, 0, parts, parts, interpreted("cuda", "float32", 1, None, exact))
    assert asked == [ordered]


@pytest.mark.parametrize("given", [None, "eth1"])
def test_nccl_listens_on_loopback_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    interfaces: list[str | None] = []

    class ProcessGroup:
        Options = SimpleNamespace

        def __init__(self, *given: object):
            interfaces.append(os.environ.get("NCCL_SOCKET_IFNAME"))

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", ProcessGroup, raising=False)
    open_nccl(tmp_path, 0, 1, False)
    assert interfaces == [given or "lo"]


def test_in_order_rounds_once() -> None:
    parts = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()  # 256 + 1 is 256 in bfloat16
    assert in_order(parts).item() == 258 and in_order(parts).dtype == torch.bfloat16


# ---- what ends, and what is refused --------------------------------------------------------------------------------


class Event:
    def __init__(self, asks: int):
        self.left = asks

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_rank_0_waits_for_its_card_and_sees_a_rank_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked, "LOOK_SECONDS", 0.0)
    looks: list[int] = []
    group = Group()
    lead = Lead(NcclCollective(group, 2, False), bytes, lambda: bool(looks.append(1)) or len(looks) > 3, int, int)
    lead.wait(Event(2))  # type: ignore[arg-type]
    assert group.calls == []
    with pytest.raises(RankLostError):
        lead.wait(Event(1 << 40))  # type: ignore[arg-type]
    assert group.calls == ["abort"] and len(looks) == 4


def test_a_step_that_fails_on_one_rank_ends_the_engine() -> None:
    with pytest.raises(RankLostError, match="MemoryError: no room"), whole_step():
        raise MemoryError("no room")


def test_a_rank_ends_with_the_engine_while_its_card_waits() -> None:
    code = (
        "import socket, sys, time; from twostroke.ranks.rank import end_with;"
        "import threading; sock = socket.socket(fileno=int(sys.argv[1]));"
        "threading.Thread(target=end_with, args=(sock,), daemon=True).start(); sock.send(b'1'); time.sleep(600)"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", code, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    assert ours.recv(1) == b"1"
    ours.send(b"a frame that is not read")
    assert process.poll() is None
    ours.close()
    assert process.wait(600) == 0


def test_fewer_cards_than_ranks_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="parallel=4 needs 4 GPUs, one for each rank, and torch sees 2: lower"):
        check_cards(4, 2, shared=False)
    check_cards(2, 2, shared=False)
    assert not caplog.text
    check_cards(2, 1, shared=True)
    assert "2 ranks share one GPU " in caplog.text and "gloo" in caplog.text


def test_nothing_is_started_for_cards_that_are_not_there(
    llama_folder: Path, in_two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cards.SHARE_VARIABLE)
    monkeypatch.setattr(ranks_.subprocess, "Popen", None)
    with pytest.raises(ConfigError, match="needs 2 GPUs"):
        build.start_ranks(open_checkpoint(llama_folder), in_two.settings)
