"""On the card: ranks that share one (over gloo), NCCL with one rank, and NCCL with two where there are two cards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from tests.engine.test_parallel import PROMPTS, answers
from twostroke import LLM, SamplingParams
from twostroke.errors import ConfigError, RankLostError
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ranks import cards
from twostroke.run.cuda.collective import HostCollective, NcclCollective, open_nccl
from twostroke.run.cuda.ranked import lead_of

pytestmark = pytest.mark.gpu
CARDS = torch.cuda.device_count()
GIVEN = {"dtype": "float32", "seed": 3, "max_model_len": 256, "kv_blocks": 64, "threads": 1}
GREEDY = SamplingParams(max_tokens=20, temperature=0)
ASKED = [
    GREEDY,
    SamplingParams(max_tokens=20, temperature=0.9, seed=5),
    SamplingParams(max_tokens=20, temperature=0.8, seed=5, repetition_penalty=1.2, logprobs=1, prompt_logprobs=0),
]
two_cards = pytest.mark.skipif(CARDS < 2, reason="needs two CUDA devices")


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(one.token_ids) for one in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def on_cpu(llama_folder: Path) -> Iterator[LLM]:
    """Two ranks whose parts are added in the same order."""
    with LLM(llama_folder, device="cpu", parallel=2, **GIVEN) as llm:
        yield llm


@pytest.mark.parametrize("ordered", [False, True])
def test_nccl_with_one_rank(tmp_path: Path, ordered: bool) -> None:
    collective = open_nccl(tmp_path, 0, 1, ordered)
    cards.check(collective, 0, 1, torch.device("cuda"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((1, 4096), (300, 64), (0, 8)):
                part = torch.randn(shape, device="cuda").to(dtype)
                want = part.clone()
                assert torch.equal(collective.sum(part) + 1, want + 1)
        numbers = torch.arange(7, dtype=torch.int32, device="cuda")
        collective.share(numbers)
        assert numbers.tolist() == list(range(7))
    collective.close()


def test_nccl_is_taken_where_each_rank_has_a_card(tmp_path: Path) -> None:
    collective = cards.open_collective(tmp_path, 0, 1, 1, CudaOps(torch.float32))
    assert isinstance(collective, NcclCollective)
    collective.close()


@pytest.mark.parametrize("params", ASKED, ids=["greedy", "drawn", "hosted"])
def test_two_ranks_on_one_card_write_what_two_on_a_cpu_write(
    on_cpu: LLM, llama_folder: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cards.SHARE_VARIABLE, "1")
    monkeypatch.setattr(cards, "count_cards", lambda: 1)
    with LLM(llama_folder, device="cuda", parallel=2, **GIVEN) as llm:
        lead = lead_of(llm.engine.core.runner.model)
        assert lead is not None and isinstance(lead.collective, HostCollective)
        assert tokens(llm, params) == tokens(on_cpu, params)


def test_the_cache_is_sized_after_the_largest_step_of_all_ranks(
    on_cpu: LLM, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cards.SHARE_VARIABLE, "1")
    monkeypatch.setattr(cards, "count_cards", lambda: 1)
    given = {name: value for name, value in GIVEN.items() if name != "kv_blocks"}
    with LLM(llama_folder, device="cuda", parallel=2, max_requests=8, max_batch_tokens=256, **given) as llm:
        assert llm.settings.kv_blocks > 0
        assert tokens(llm) == tokens(on_cpu)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_ranks_do_not_depend_on_the_batch(llama_folder: Path, dtype: str, monkeypatch) -> None:
    monkeypatch.setenv(cards.SHARE_VARIABLE, "1")
    with LLM(llama_folder, device="cuda", parallel=2, exact=True, **GIVEN | {"dtype": dtype}) as llm:
        params = SamplingParams(max_tokens=20, temperature=0, logprobs=2)
        together = answers(llm, params)
        assert together == [(one.token_ids, one.logprobs) for p in PROMPTS for one in llm.generate([p], params)]


def lose_a_rank(folder: Path) -> None:
    with LLM(folder, device="cuda", parallel=2, **GIVEN) as llm:
        tokens(llm)
        ranks = llm.engine.ranks
        assert ranks is not None
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        ranks.processes[0].wait()
        with pytest.raises(RankLostError):
            llm.generate(PROMPTS, GREEDY)


def test_an_engine_ends_with_a_rank(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cards.SHARE_VARIABLE, "1")
    lose_a_rank(llama_folder)


@pytest.mark.skipif(CARDS > 1, reason="needs one CUDA device alone")
def test_two_ranks_need_two_cards(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cards.SHARE_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="parallel=2 needs 2 GPUs, one for each rank, and torch sees 1"):
        LLM(llama_folder, device="cuda", parallel=2, **GIVEN)


@two_cards
@pytest.mark.parametrize("exact", [False, True])
def test_two_ranks_on_two_cards(on_cpu: LLM, llama_folder: Path, exact: bool) -> None:
    with LLM(llama_folder, device="cuda", parallel=2, exact=exact, **GIVEN) as llm:
        lead = lead_of(llm.engine.core.runner.model)
        assert lead is not None and isinstance(lead.collective, NcclCollective)
        for params in ASKED:
            assert tokens(llm, params) == tokens(on_cpu, params)


@two_cards
def test_an_engine_on_two_cards_ends_with_a_rank(llama_folder: Path) -> None:
    lose_a_rank(llama_folder)
