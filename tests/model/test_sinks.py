"""Attention with sinks, as gpt-oss has it: windows on every other layer, biases, YaRN without truncation.

Where the attention alone is compared, the experts are replaced by a dense feed on both sides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from tests.helpers import run_tokens
from tests.model.test_latent import check_parity
from tests.model.test_parity import SHAPE, YARN, load, tokens_of
from twostroke.engine.device import check_attention
from twostroke.model import families
from twostroke.model.arch import DenseArch, GroupedArch
from twostroke.model.fields import Fields
from twostroke.ops.cpu.backend import NativeCpuOps, instruction_sets
from twostroke.ops.cpu.library import available
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model

WINDOW = 24
ROPES = {"plain": {"rope_type": "default", "rope_theta": 1000.0}, "yarn": {**YARN, "truncate": False}}


class DenseFeed(nn.Module):
    """A gated feed in the place of the experts."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)), None


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def without_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of `make_peer` load with dense feeds."""

    def feeds(c: Fields, count: int) -> list[DenseArch]:
        return [DenseArch(c.integer("intermediate_size"))] * count

    monkeypatch.setattr(families, "gpt_oss_feeds", feeds)


@pytest.fixture
def dense_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    without_experts(monkeypatch)


def make_peer(folder: Path, rope: str, **more: Any) -> Any:
    torch.manual_seed(0)
    shape = {**SHAPE, "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = transformers.GptOssConfig(**{**shape, "sliding_window": WINDOW, "rope_parameters": ROPES[rope], **more})
    peer = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager")
    for layer in peer.model.layers:
        layer.mlp = DenseFeed(config.hidden_size, config.intermediate_size)
        layer.self_attn.sinks.copy_(2 * torch.randn(config.num_attention_heads))
    for name, parameter in peer.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(peer.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"model_type": "gpt_oss"}))
    return peer.eval()


@pytest.mark.usefixtures("dense_feeds")
@pytest.mark.parametrize("rope", ROPES)
def test_logits_equal_transformers(rope: str, tmp_path: Path) -> None:
    peer = make_peer(tmp_path, rope)
    model = load(tmp_path, ReferenceOps())
    for length in (9, WINDOW, WINDOW + 1, 61, 150):
        tokens = tokens_of(length)
        expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
        assert expected.std() > 0.3
        whole = run_tokens(model, tokens)
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
        assert torch.equal(run_tokens(model, tokens, [7, length - 8, 1]), whole)


@pytest.mark.parametrize("ops", [ReferenceOps, *([partial(NativeCpuOps, 2, "float32")] if available() else [])])
@pytest.mark.parametrize("rope", ROPES)
def test_whole_models_equal_transformers(rope: str, ops: Any, tmp_path: Path) -> None:
    """With experts, across borders of blocks and of the window, with transformers' cached decode."""
    torch.manual_seed(2)
    shape = {**SHAPE, "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**shape, sliding_window=WINDOW, rope_parameters=ROPES[rope])
    peer = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    for name, parameter in peer.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    peer.save_pretrained(tmp_path)
    check_parity(peer, load(tmp_path, ops()), (9, 16, 17, WINDOW, WINDOW + 1, 61, 150))


@pytest.mark.usefixtures("dense_feeds")
def test_sinks_matter(tmp_path: Path) -> None:
    """Without them the logits are others: the comparison above cannot pass by accident."""
    peer = make_peer(tmp_path, "plain")
    tokens = tokens_of(40)
    before = peer(torch.tensor([tokens])).logits
    for layer in peer.model.layers:
        layer.self_attn.sinks.fill_(-1e4)
    assert (peer(torch.tensor([tokens])).logits - before).abs().max() > 0.3


@pytest.mark.usefixtures("dense_feeds")
@pytest.mark.skipif(not available(), reason="the native library is not built")
@pytest.mark.parametrize("kv_format", ["float32", "int8"])
def test_native_kernels_agree(kv_format: Any, tmp_path: Path) -> None:
    """In chunks and on every instruction set the same bits; long enough for several splits of 256 keys."""
    make_peer(tmp_path, "yarn", max_position_embeddings=1024)
    tokens = tokens_of(600)
    folder = open_checkpoint(tmp_path)
    ops = [NativeCpuOps(threads, "float32", isa) for isa in instruction_sets() for threads in (1, 2)]
    models = [load_model(folder, one, 1024) for one in ops]
    whole = run_tokens(models[0], tokens, kv_format=kv_format)
    for model in models[1:]:
        assert torch.equal(run_tokens(model, tokens, [100, 1, 448, 50, 1], kv_format), whole)
    if kv_format == "float32":
        slow = run_tokens(load_model(folder, ReferenceOps(), 1024), tokens[:300])
        torch.testing.assert_close(whole[:300], slow, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("dense_feeds")
def test_keys_are_not_centered(tmp_path: Path) -> None:
    """A constant that is taken from all keys would move their scores against the sink."""
    make_peer(tmp_path, "plain")
    assert all(layer.mixer.attention.key_center is None for layer in load(tmp_path).layers)


@pytest.mark.usefixtures("dense_feeds")
def test_windows_alternate_and_a_gpu_serves_them(tmp_path: Path) -> None:
    make_peer(tmp_path, "yarn")
    arch = load(tmp_path).arch
    mixers = [layer.mixer for layer in arch.layers]
    assert all(isinstance(mixer, GroupedArch) and mixer.qkv_bias and mixer.output_bias for mixer in mixers)
    assert [mixer.window for mixer in mixers] == [WINDOW, None, WINDOW, None]
    for device in ("cpu", "cuda"):
        check_attention(arch, device)
