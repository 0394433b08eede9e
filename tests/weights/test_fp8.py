"""Weights of 8-bit floats with a scale for each 128 by 128, as published models hold them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from tests import tiny
from tests.helpers import run_tokens
from twostroke.errors import ModelError
from twostroke.ops.cpu.backend import NativeCpuOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.fp8 import code_values
from twostroke.weights.load import load_model

CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_every_code_means_what_torch_says() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(code_values(), theirs)


def squares(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and what they mean in bfloat16."""
    rows, cols = values.shape
    scales = torch.empty(-(-rows // 128), -(-cols // 128))
    codes, meant = torch.empty(rows, cols, dtype=torch.float8_e4m3fn), torch.empty(rows, cols)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            scales[i, j] = values[place].abs().max() / 448
            codes[place] = (values[place] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[place] = codes[place].float() * scales[i, j]
    return codes, scales, meant.to(torch.bfloat16).float()


def coded(folder: Path) -> None:
    """Every matrix inside the layers in squares, and the same values as floats in the folder's `meant`."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2 and ".layers." in name]:
        if "mlp.gate.weight" not in name:
            tensors[name], tensors[f"{name}_scale_inv"], plain[name] = squares(tensors[name])
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    safetensors.torch.save_file(plain, folder / "meant.bin")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))


def test_logits_of_a_coded_deepseek(tmp_path: Path) -> None:
    folder = tiny.tiny_deepseek(tmp_path / "model")
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    coded(folder)
    for name, parameter in safetensors.torch.load_file(folder / "meant.bin").items():
        if "experts." in name and "shared" not in name:
            continue  # stacked in the peer
        peer.state_dict()[name].copy_(parameter)
    stack_experts(peer, folder)
    tokens = [(7 * i + 3) % 90 + 3 for i in range(40)]
    with torch.no_grad():
        expected = peer(torch.tensor([tokens])).logits[0]
    model = load_model(open_checkpoint(folder), NativeCpuOps(2, weights="float32"), 64)
    torch.testing.assert_close(run_tokens(model, tokens), expected, atol=1e-4, rtol=0)


def stack_experts(peer: torch.nn.Module, folder: Path) -> None:
    meant = safetensors.torch.load_file(folder / "meant.bin")
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
    coded(folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    kept = tensors.pop(name)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.weight_scale_inv is missing"):
        load_model(open_checkpoint(folder), NativeCpuOps(1), 64)
    safetensors.torch.save_file({**tensors, name: kept.repeat(2, 1)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.weight: 8-bit floats of shape .* one scale for each 128 by 128"):
        load_model(open_checkpoint(folder), NativeCpuOps(1), 64)
