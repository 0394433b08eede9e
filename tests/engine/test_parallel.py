"""Ranks share each layer's work: the tokens are those of a reference that adds the ranks' parts in the same order."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from tests.tiny import VOCAB, save
from twostroke import LLM, SamplingParams
from twostroke.engine import build
from twostroke.errors import ConfigError, ModelError, RankLostError
from twostroke.model.arch import Arch, DenseArch, GroupedArch, LayerArch
from twostroke.model.shares import divided
from twostroke.ops.formats import from_float
from twostroke.ops.interface import Batch, GroupBlocks
from twostroke.ranks.group import SETTINGS, packed, unpacked
from twostroke.ranks.rank import load_share
from twostroke.weights.quantize import quantize

PROMPTS = [list(range(5, 60)), list(range(40, 20, -1)), [7]]
GIVEN = {"threads": 1, "seed": 3, "max_model_len": 256, "kv_blocks": 64}
GREEDY = SamplingParams(max_tokens=20, temperature=0, logprobs=2)
DRAWN = SamplingParams(max_tokens=20, temperature=0.9, seed=5, logprobs=2)


class ThreadRanks:
    """The reference: ranks are threads of this process, and the sum is written out."""

    def __init__(self, model: Path, settings: Any):
        self.parts = settings.parallel
        self.values: list[np.ndarray | None] = [None] * self.parts
        self.given, self.taken = threading.Barrier(self.parts), threading.Barrier(self.parts)
        self.steps: list[queue.Queue[Batch | None]] = [queue.Queue() for _ in range(self.parts)]
        hello = {"model": str(model), "parts": self.parts}
        hello["settings"] = {name: getattr(settings, name) for name in SETTINGS}
        for rank in range(1, self.parts):
            threading.Thread(target=self.follow, args=(hello | {"rank": rank},), daemon=True).start()

    def follow(self, hello: dict[str, Any]) -> None:
        model, kv = load_share(hello)
        model.sum_ranks = self.sum_of(hello["rank"])
        while (batch := self.steps[hello["rank"]].get()) is not None:
            model.forward(batch, kv)

    def sum_of(self, rank: int) -> Callable[[np.ndarray], np.ndarray]:
        def total(value: np.ndarray) -> np.ndarray:
            self.values[rank] = value
            self.given.wait(600)
            found = self.values[0].copy()  # type: ignore[union-attr]
            for part in self.values[1:]:
                found = found + part
            self.taken.wait(600)
            return found

        return total

    def open_sum(self) -> Callable[[np.ndarray], np.ndarray]:
        return self.sum_of(0)

    def announce(self, batch: Batch) -> None:
        for steps in self.steps[1:]:
            steps.put(unpacked(packed(batch)))

    def close(self) -> None:
        for steps in self.steps[1:]:
            steps.put(None)


def answers(llm: LLM, params: SamplingParams) -> list[tuple[Any, ...]]:
    return [(one.token_ids, one.logprobs) for one in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def in_two(llama_folder: Path) -> Iterator[LLM]:
    with LLM(llama_folder, **GIVEN, parallel=2) as llm:
        yield llm


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_two_processes_write_what_the_sum_in_order_says(
    in_two: LLM, llama_folder: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answers(in_two, params)
    monkeypatch.setattr(build, "Ranks", ThreadRanks)
    with LLM(llama_folder, **GIVEN, parallel=2) as reference:
        assert answers(reference, params) == found  # log probabilities too, bit for bit
    with LLM(llama_folder, **GIVEN) as whole:
        for one, two in zip(whole.generate(PROMPTS, GREEDY), in_two.generate(PROMPTS, GREEDY), strict=True):
            assert one.token_ids == two.token_ids


def test_chunks_batches_and_the_cache_change_nothing(in_two: LLM) -> None:
    together = answers(in_two, DRAWN)
    alone = [(one.token_ids, one.logprobs) for prompt in PROMPTS for one in in_two.generate([prompt], DRAWN)]
    assert alone == together


def test_each_rank_has_its_part_of_the_cache(in_two: LLM, llama_folder: Path) -> None:
    with LLM(llama_folder, **GIVEN) as whole:
        assert whole.settings.layout.block_bytes == 2 * in_two.settings.layout.block_bytes


def odd_models(folder: Path) -> dict[str, Path]:
    """With biases on q, k, v; with norms of heads; with three ranks' worth of heads."""
    shape = {
        **{"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 512},
        **{"initializer_range": 0.15, "bos_token_id": 0, "eos_token_id": 2},
    }
    made = {}
    for name, config, kind in (
        ("qwen2", transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        ("qwen3", transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    ):
        given = {key: value for key, value in shape.items() if name != "qwen2" or key != "head_dim"}
        model = kind(config(**given))
        for parameter, values in model.named_parameters():
            if parameter.endswith("bias"):
                values.data.normal_()
        made[name] = save(model, folder / name)
    return made


def test_other_families_and_three_ranks(tmp_path: Path, gemma_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "Ranks", ThreadRanks)
    folders = odd_models(tmp_path)
    for name, folder, parts in (
        ("qwen2", folders["qwen2"], 3),
        ("qwen3", folders["qwen3"], 3),
        ("gemma3", gemma_folder, 2),
    ):
        with LLM(folder, **GIVEN, parallel=parts) as split, LLM(folder, **GIVEN) as whole:
            pairs = zip(split.generate(PROMPTS, GREEDY), whole.generate(PROMPTS, GREEDY), strict=True)
            assert [one.token_ids == two.token_ids for one, two in pairs] == [True] * 3, name


def test_a_quantized_model_is_divided_in_whole_blocks(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
    stored = quantize(from_float(values), "int8")
    part = stored.columns(64, 128)
    assert part.shape == (4, 64) and part.data.tobytes() == quantize(from_float(values[:, 64:]), "int8").data.tobytes()
    with pytest.raises(ValueError, match="not whole blocks"):
        stored.columns(0, 40)
    monkeypatch.setattr(build, "Ranks", ThreadRanks)
    with LLM(llama_folder, **GIVEN, parallel=2, quantize="int8") as split:
        assert all(len(one.token_ids) == 20 for one in split.generate(PROMPTS, GREEDY))


def test_a_step_is_the_same_after_its_way() -> None:
    rows, tables = np.arange(3), np.arange(8, dtype=np.int32).reshape(2, 4)
    starts, contexts = np.array([0, 1, 3], np.int32), np.array([4, 9], np.int32)
    batch = Batch(
        rows, rows + 7, starts, contexts, (GroupBlocks(rows, tables), GroupBlocks(rows * 2, tables)), rows[:2]
    )
    found = unpacked(packed(batch))
    assert found.tokens.dtype == np.int64 and found.groups[1].tables.dtype == np.int32
    assert packed(found) == packed(batch) and (found.groups[1].slots == batch.groups[1].slots).all()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"parallel": 4}, "does not divide 6 heads, 2 KV heads and a feed of 80: use 2"),
        ({"parallel": 2, "draft_model": "{folder}"}, "without a draft model"),
        ({"parallel": 2, "kv_offload": 1 << 20}, "without kv_offload"),
    ],
)
def test_what_cannot_be_divided_is_said(llama_folder: Path, given: dict[str, Any], reason: str) -> None:
    given = {name: str(llama_folder) if value == "{folder}" else value for name, value in given.items()}
    with pytest.raises(ConfigError, match=reason):
        LLM(llama_folder, **GIVEN, **given)


def test_other_kinds_of_layers_are_refused(
    llama_folder: Path, mixture_pair: tuple[Path, Path], deepseek_pair: tuple[Path, Path], compressed_folder: Path
) -> None:
    for folder, what in ((mixture_pair[0], "experts"), (deepseek_pair[0], "latent"), (compressed_folder, "streams")):
        with pytest.raises(ConfigError, match=what):
            LLM(folder, **GIVEN, parallel=2)
    wide = LayerArch(GroupedArch(4, 4, 16, wide_qk_norm=True), DenseArch(64))
    with pytest.raises(ConfigError, match="norms over all heads"):
        divided(Arch("olmo2", 320, 48, (wide,), 512, 1e-5), 2)


@pytest.mark.slow
def test_an_engine_ends_with_a_rank(llama_folder: Path) -> None:
    with LLM(llama_folder, **GIVEN, parallel=2) as llm:
        ranks = llm.engine.ranks
        assert ranks is not None
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        ranks.processes[0].wait()
        with pytest.raises(RankLostError):
            llm.generate(PROMPTS, GREEDY)
    assert ranks.processes[0].poll() is not None


def test_a_rank_that_cannot_load_says_why(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = build.Ranks._start
    broken = {"model": str(llama_folder / "nothing")}
    monkeypatch.setattr(build.Ranks, "_start", lambda self, hello: start(self, hello | broken))
    with pytest.raises(ModelError, match=r"rank 1 did not start: .*nothing"):
        LLM(llama_folder, **GIVEN, parallel=2)
