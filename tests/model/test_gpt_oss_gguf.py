"""gpt-oss from GGUF, whole: biases, sinks, windows and experts in floats and in MXFP4, beside transformers' logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import run_tokens
from tests.model.gpt_oss_files import random_peer, write_gpt_oss
from tests.model.test_gguf_parity import assert_same
from tests.model.test_latent import cached_logits
from tests.model.test_parity import tokens_of
from tests.model.test_sinks import WINDOW
from twostroke.errors import ModelError
from twostroke.ops.cpu.backend import NativeCpuOps, instruction_sets
from twostroke.ops.cpu.library import available
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_arch, load_model


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def load(path: Path, ops: Any = None) -> Any:
    return load_model(open_checkpoint(path), ops or ReferenceOps(), 256)


@pytest.mark.parametrize("coded", [False, True])
def test_logits_equal_transformers(coded: bool, tmp_path: Path) -> None:
    """On the reference and on every instruction set of this machine."""
    peer, path = random_peer(), tmp_path / "model.gguf"
    write_gpt_oss(path, peer, coded)
    fast = [NativeCpuOps(2, "float32", isa) for isa in instruction_sets()] if available() else []
    models = [load(path, ops) for ops in (ReferenceOps(), *fast)]
    for length in (9, WINDOW + 1, 150):
        tokens = tokens_of(length)
        expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
        assert expected.std() > 0.3  # the comparison means something
        for model in models:
            whole = run_tokens(model, tokens)
            torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
            assert torch.equal(run_tokens(model, tokens, [7, length - 8, 1]), whole)
    torch.testing.assert_close(whole[-5:], cached_logits(peer, tokens, length - 5), atol=1e-4, rtol=0)


@pytest.mark.skipif(not available(), reason="the native library is not built")
def test_codes_stay_codes(tmp_path: Path) -> None:
    """What serves by default multiplies four bits with activations of eight."""
    peer, path = random_peer(), tmp_path / "model.gguf"
    write_gpt_oss(path, peer, coded=True)
    assert open_checkpoint(path).tensors["blk.0.ffn_down_exps.weight"].format == "MXFP4"
    tokens = tokens_of(60)
    expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
    got = run_tokens(load(path, NativeCpuOps(2)), tokens)
    assert (got - expected).norm() / expected.norm() < 0.05


def test_the_same_description_as_a_folder(tmp_path: Path) -> None:
    peer = random_peer()
    peer.save_pretrained(tmp_path / "folder")
    write_gpt_oss(tmp_path / "model.gguf", peer, coded=True)
    assert_same(load_arch(open_checkpoint(tmp_path / "model.gguf")), load_arch(open_checkpoint(tmp_path / "folder")))


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"expert_used_count": 9}, "expert_used_count is 9, but there are 8 experts"),
        ({"expert_count": 16}, r"ffn_gate_inp\.weight has shape \(8, 64\), expected \(16, 64\)"),
        ({"expert_feed_forward_length": 64}, r"ffn_\w+_exps\.\w+ has shape \(8, .*96.*\), expected"),
        ({"attention.sliding_window": 0}, "attention.sliding_window"),
    ],
)
def test_refusals(extra: dict[str, Any], named: str, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "model.gguf", random_peer(), True, extra)
    with pytest.raises(ModelError, match=named):
        load(tmp_path / "model.gguf")
