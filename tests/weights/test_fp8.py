"""Weights of 8-bit floats with a scale for each 128 by 128, as published models hold them."""

from __future__ import annotations

import json
import re
import shutil
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


FOUR_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scales)))


def four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two codes in a byte, the first in its low half; scales of 32 inputs; and what they mean."""
    groups = weight.unflatten(1, (-1, 32))
    scales = powers_of_two(groups.abs().amax(dim=2) / 6)
    ratio = groups / scales.unsqueeze(2)
    codes = (ratio.abs().unsqueeze(-1) - FOUR_BITS).abs().argmin(dim=-1)
    meant = (FOUR_BITS[codes] * ratio.sign() * scales.unsqueeze(2)).flatten(1)
    codes = (codes + 8 * (ratio < 0)).flatten(1).to(torch.uint8)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), scales.to(torch.float8_e8m0fnu), meant


def squares(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One square: these matrices are small."""
    scale = powers_of_two(weight.abs().max() / 448).reshape(1, 1)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return codes, scale.to(torch.float8_e8m0fnu), codes.float() * scale


def published_v4(tmp_path: Path) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A small DeepSeek V4 in 8-bit floats with scales in powers of two, experts in 4-bit floats: a checkpoint of their
    values, one as published, and its tensors."""
    plain, coded = tiny.tiny_deepseek_v4(tmp_path / "plain", hidden=64), tmp_path / "coded"
    shutil.copytree(plain, coded)
    floats = safetensors.torch.load_file(plain / "model.safetensors")
    tensors = dict(floats)
    for name in [name for name in floats if re.search(r"(attn\.w|ffn\.(shared_)?experts\.).*\.weight$", name)]:
        made = four_bits if ".ffn.experts." in name else squares
        codes, scales, floats[name] = made(floats[name])
        tensors |= {name: codes, name.removesuffix("weight") + "scale": scales}
    assert {str(tensor.dtype) for tensor in tensors.values()} > {"torch.int8", "torch.float8_e4m3fn"}
    safetensors.torch.save_file(floats, plain / "model.safetensors")
    safetensors.torch.save_file(tensors, coded / "model.safetensors")
    config = json.loads((coded / "config.json").read_text()) | {"expert_dtype": "fp4"}
    config["quantization_config"] = published.SQUARES | {"scale_fmt": "ue8m0"}
    (coded / "config.json").write_text(json.dumps(config))
    return plain, coded, tensors


def test_deepseek_v4_as_published(tmp_path: Path) -> None:
    """The same logits as the values in floats, which are held to transformers' elsewhere."""
    plain, coded, tensors = published_v4(tmp_path)
    tokens = [(7 * i + 3) % 90 + 3 for i in range(40)]
    expected, found = (
        run_tokens(load_model(open_checkpoint(folder), NativeCpuOps(2, weights="float32"), 64), tokens)
        for folder in (plain, coded)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    kept = run_tokens(load_model(open_checkpoint(coded), NativeCpuOps(2), 64), tokens)
    assert ((kept - expected).norm(dim=1) / expected.norm(dim=1)).median() < 0.1
    broken = {**tensors, "model.layers.0.ffn.experts.0.w1.scale": tensors["model.layers.0.ffn.experts.0.w1.scale"][1:]}
    safetensors.torch.save_file(broken, coded / "model.safetensors")
    with pytest.raises(ModelError, match=r"w1\.scale has shape"):
        load_model(open_checkpoint(coded), NativeCpuOps(1), 64)
