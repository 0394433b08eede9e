"""Checkpoints in published formats of few bits load as they are: logits beside transformers' with their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests import published, tiny
from tests.helpers import run_tokens
from twostroke.ops.cpu.backend import NativeCpuOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model

TOKENS = [(7 * i + 3) % 300 + 3 for i in range(24)]
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "head_dim": 64, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("plain") / "model", **SHAPE)


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def expected_logits(plain: Path, meant: dict[str, torch.Tensor]) -> torch.Tensor:
    peer = transformers.AutoModelForCausalLM.from_pretrained(plain).eval()
    peer.load_state_dict(meant, strict=False)
    with torch.no_grad():
        return peer(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("kind", published.FORMATS)
def test_logits(plain: Path, tmp_path: Path, kind: str) -> None:
    folder = copied(plain, tmp_path / "model")
    expected = expected_logits(plain, published.rewrite(folder, kind))
    exact = load_model(open_checkpoint(folder), NativeCpuOps(2, weights="float32"), 64)
    rounding = 0.03 if kind == "compressed int8, zero points" else 2e-4  # those become float16
    torch.testing.assert_close(run_tokens(exact, TOKENS), expected, atol=rounding, rtol=0)
    kept = load_model(open_checkpoint(folder), NativeCpuOps(2), 64)
    found = run_tokens(kept, TOKENS)
    error = (found - expected).norm() / expected.norm()
    assert error < 0.06, error  # activations are 8-bit codes there
