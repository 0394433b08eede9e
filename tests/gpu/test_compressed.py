"""On the card: DeepSeek V4 against transformers, and an engine's tokens against the CPU's. Run with `-m gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from tests.gpu.test_card import CARD, row_error
from tests.gpu.test_sinks import PROMPTS
from tests.helpers import run_tokens
from tests.model import test_compressed_parity as parity
from tests.model.test_parity import tokens_of
from twostroke import LLM, SamplingParams
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.exact import ExactCudaOps

pytestmark = pytest.mark.gpu
LENGTH = 400
# The heads, window and entries of the published models; fewer entries are chosen than there are.
PUBLISHED = parity.PUBLISHED | {
    "hidden_size": 256, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 128,
    "o_groups": 8, "o_lora_rank": 64, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 24, "hc_mult": 4,
    "layer_types": [parity.SLIDING, parity.HEAVY, parity.SPARSE], "num_hash_layers": 1, "initializer_range": 0.05,
}  # fmt: skip
BASE = {"dtype": "float32", "kv_dtype": "float32", "max_model_len": 512, "kv_blocks": 1200, "seed": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"speculate": "off"},
    "chunks": {"speculate": "off", "max_batch_tokens": 16},
    "drafts": {"speculate": "lookup"},
    "exact": {"speculate": "off", "exact": True},
    "exact, drafts": {"speculate": "lookup", "exact": True, "max_batch_tokens": 64},
    "offload": {"speculate": "off", "kv_blocks": 300, "kv_offload": 1 << 28},
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("published")
    with torch.no_grad():
        return folder, parity.make_peer(folder, **PUBLISHED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_equal_transformers(published: tuple[Path, Any], dtype: torch.dtype) -> None:
    folder, peer = published
    tokens = tokens_of(LENGTH)
    expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
    kv_format, limit = ("float32", 1e-3) if dtype == torch.float32 else ("bfloat16", 0.15)
    for ops in (CudaOps(dtype, CARD), ExactCudaOps(dtype, CARD)):
        model = parity.load(folder, ops)
        whole = run_tokens(model, tokens, None, kv_format)  # type: ignore[arg-type]
        assert row_error(whole, expected) < limit
        for chunks in ([7, 290, 1, 1, 101], [120, *[1] * 20, 5, 255]):
            again = run_tokens(model, tokens, chunks, kv_format)  # type: ignore[arg-type]
            assert row_error(again, expected) < limit, chunks
            assert not ops.one_order or torch.equal(again, whole), chunks


def answers(folder: Path, **settings: Any) -> list[tuple[int, ...]]:
    """Twice: the second time with what the prefix cache holds by then."""
    with LLM(folder, **(BASE | settings)) as llm:
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        first, again = ([tuple(out.token_ids) for out in llm.generate(PROMPTS, params)] for _ in range(2))
    assert first == again
    return first


@pytest.fixture(scope="module")
def right(compressed_folder: Path) -> list[tuple[int, ...]]:
    return answers(compressed_folder, device="cpu", speculate="off")


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_equal_the_cpu(compressed_folder: Path, right: list[tuple[int, ...]], name: str) -> None:
    """Steps are captured as graphs here."""
    assert answers(compressed_folder, device="cuda", **SETTINGS[name]) == right
