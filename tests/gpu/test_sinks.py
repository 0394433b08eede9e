"""On the card: gpt-oss' attention against transformers, and an engine's tokens against the CPU's. Run with `-m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from tests import tiny
from tests.gpu.test_card import CARD, logits_of, row_error
from tests.model import test_sinks
from tests.model.test_parity import tokens_of
from twostroke import LLM, SamplingParams
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.exact import ExactCudaOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model

pytestmark = pytest.mark.gpu
# The heads of the published models: 64 of 64 numbers, 8 of K and V, a window of 128.
PUBLISHED = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
LENGTH, POSITIONS = 400, 512
BASE = {"dtype": "float32", "kv_dtype": "float32", "max_model_len": POSITIONS, "kv_blocks": 400, "seed": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"speculate": "off"},
    "chunks": {"speculate": "off", "max_batch_tokens": 16},
    "drafts": {"speculate": "lookup"},
    "exact": {"speculate": "off", "exact": True},
    "exact, drafts": {"speculate": "lookup", "exact": True, "max_batch_tokens": 64},
}


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Any]:
    """A small model with the published heads, and transformers' one. Feeds are dense as long as a test runs."""
    test_sinks.without_experts(monkeypatch)
    with torch.no_grad():
        return tmp_path, test_sinks.make_peer(tmp_path, "yarn", max_position_embeddings=POSITIONS, **PUBLISHED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_equal_transformers(published: tuple[Path, Any], dtype: torch.dtype) -> None:
    folder, peer = published
    tokens = tokens_of(LENGTH)
    expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
    kv_format, limit = ("float32", 1e-3) if dtype == torch.float32 else ("bfloat16", 0.1)
    model = load_model(open_checkpoint(folder), CudaOps(dtype, CARD), POSITIONS)
    for chunks in ([LENGTH], [7, 290, 1, 1, 101], [120, *[1] * 20, 5, 255]):
        found = logits_of(model, tokens, chunks, kv_format)
        assert row_error(found, expected) < limit, chunks
        if dtype == torch.float32:
            assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_exact_logits_have_the_same_bits_in_any_chunks(published: tuple[Path, Any], dtype: torch.dtype) -> None:
    folder, peer = published
    tokens = tokens_of(LENGTH)
    kv_format, limit = ("float32", 1e-3) if dtype == torch.float32 else ("bfloat16", 0.1)
    model = load_model(open_checkpoint(folder), ExactCudaOps(dtype, CARD), POSITIONS)
    whole = logits_of(model, tokens, [LENGTH], kv_format)
    assert row_error(whole, peer(torch.tensor([tokens]), use_cache=False).logits[0]) < limit
    for chunks in ([7, 290, 1, 1, 101], [120, *[1] * 20, 5, 255], [16] * 25):
        assert torch.equal(logits_of(model, tokens, chunks, kv_format), whole), chunks


@torch.no_grad()
def test_a_cache_of_few_bits(published: tuple[Path, Any]) -> None:
    """Single tokens read it in a kernel of their own. The format alone costs 0.05 here."""
    folder, peer = published
    tokens = tokens_of(LENGTH)
    model = load_model(open_checkpoint(folder), CudaOps(torch.bfloat16, CARD), POSITIONS)
    expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
    for chunks in ([LENGTH], [LENGTH - 40, *[1] * 40]):
        found = logits_of(model, tokens, chunks, "int8")
        assert row_error(found[-40:], expected[-40:]) < 0.2, chunks


@pytest.fixture(scope="module", params=["dense feeds", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints with a tokenizer, sinks that matter, and windows that most contexts here exceed."""
    found = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if request.param == "dense feeds":
            test_sinks.without_experts(patch)
            test_sinks.make_peer(found, "yarn", vocab_size=tiny.VOCAB, max_position_embeddings=POSITIONS)
            tiny.save_tokenizer(found)
        else:
            tiny.tiny_gpt_oss(found)
        yield found


def prompt(number: int, length: int) -> list[int]:
    return [(7919 * i + 104729 * number * (i + 1)) % 300 + 3 for i in range(length)]


PROMPTS = [prompt(1, 9), prompt(2, 130), prompt(3, 39), prompt(4, 300), prompt(4, 260) + prompt(5, 20), prompt(6, 1)]


def answers(folder: Path, **settings: Any) -> list[tuple[int, ...]]:
    """Twice: the second time with what the prefix cache holds by then."""
    with LLM(folder, **(BASE | settings)) as llm:
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        first, again = (llm.generate(PROMPTS, params) for _ in range(2))
    assert [out.error for out in first + again] == [None] * 2 * len(PROMPTS)
    assert [out.token_ids for out in first] == [out.token_ids for out in again]
    return [tuple(out.token_ids) for out in first]


@pytest.fixture(scope="module")
def right(folder: Path) -> list[tuple[int, ...]]:
    return answers(folder, device="cpu", speculate="off")


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_of_the_cpu(folder: Path, right: list[tuple[int, ...]], name: str) -> None:
    assert answers(folder, device="cuda", **SETTINGS[name]) == right
