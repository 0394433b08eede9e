"""Weights of 8-bit floats with a scale for each 128 by 128, as published models hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from tests import published, tiny
from tests.helpers import run_tokens
from twostroke.errors import ModelError
from twostroke.ops.cpu.backend import NativeCpuOps
from twostroke.ops.formats import EIGHT_BIT_FLOATS
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model


def test_every_code_means_what_torch_says() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(EIGHT_BIT_FLOATS, theirs)


def test_logits_of_a_coded_deepseek(tmp_path: Path) -> None:
    folder = tiny.tiny_deepseek(tmp_path / "model")
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    meant = published.rewrite(folder, "fp8 in squares")
    for name, parameter in meant.items():
        if "experts." in name and "shared" not in name:
            continue  # stacked in the peer
        peer.state_dict()[name].copy_(parameter)
    stack_experts(peer, meant)
    tokens = [(7 * i + 3) % 90 + 3 for i in range(40)]
    with torch.no_grad():
        expected = peer(torch.tensor([tokens])).logits[0]
    model = load_model(open_checkpoint(folder), NativeCpuOps(2, weights="float32"), 64)
    torch.testing.assert_close(run_tokens(model, tokens), expected, atol=3e-3, rtol=0)  # turned keys are float16


def stack_experts(peer: torch.nn.Module, meant: dict[str, torch.Tensor]) -> None:
    for index, layer in enumerate(peer.model.layers):
        if not hasattr(layer.mlp, "experts"):
            continue
        stem = f"model.layers.{index}.mlp.experts."
        with torch.no_grad():
            for expert in range(8):
                both = [meant[f"{stem}{expert}.{part}_proj.weight"] for part in ("gate", "up")]
                layer.mlp.experts.gate_up_proj[expert].copy_(torch.cat(both))
                layer.mlp.experts.down_proj[expert].copy_(meant[f"{stem}{expert}.down_proj.weight"])


def test_scales_that_are_missing_or_of_another_shape(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "model")
    published.rewrite(folder, "fp8 in squares")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    kept = tensors.pop(name)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.weight_scale_inv is missing"):
        load_model(open_checkpoint(folder), NativeCpuOps(1), 64)
    safetensors.torch.save_file({**tensors, name: kept.repeat(2, 1)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.weight_scale_inv has shape .* or for squares of 128 by 128"):
        load_model(open_checkpoint(folder), NativeCpuOps(1), 64)
