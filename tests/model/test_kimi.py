"""Kimi K2 and the text half of Kimi K2.5, as their folders hold them: the logits of transformers' DeepSeek V3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import published
from tests.helpers import run_tokens
from tests.model.test_latent import check_parity, make_peer
from tests.model.test_parity import load, rewrite, tokens_of
from twostroke.errors import ModelError
from twostroke.model.families import arch_from_config
from twostroke.ops.cpu.backend import NativeCpuOps
from twostroke.ops.cpu.library import available

# What a name of the text model becomes in published files, and in those that transformers writes.
SPELLINGS = {
    "published": lambda name: f"language_model.{name}",
    "transformers": lambda name: name.replace("model.", "model.language_model.", 1),
}
SMALL_GROUPS = "compressed 4 bits, zero points"  # groups of 32


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def wrap(folder: Path, spelling: str, **outer: Any) -> None:
    """Makes a DeepSeek V3 folder the text half of a Kimi K2.5 folder, with image layers beside it."""
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    whole = {"model_type": "kimi_k25", "text_config": config, "vision_config": {"hidden_size": 8}, **outer}
    (folder / "config.json").write_text(json.dumps(whole))

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[SPELLINGS[spelling](name)] = tensors.pop(name)
        beside = "" if spelling == "published" else "model."
        tensors[f"{beside}vision_tower.encoder.blocks.0.wqkv.weight"] = torch.ones(24, 8)
        tensors[f"{beside}mm_projector.proj.0.weight"] = torch.ones(8, 8)

    rewrite(folder, rename)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_text_half_equals_transformers(spelling: str, tmp_path: Path) -> None:
    peer = make_peer("kimi", tmp_path)
    wrap(tmp_path, spelling)
    check_parity(peer, load(tmp_path))


def test_text_model_alone(tmp_path: Path) -> None:
    peer = make_peer("kimi", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_parity(peer, load(tmp_path))


def test_a_head_tied_by_the_outer_description(tmp_path: Path) -> None:
    peer = make_peer("kimi", tmp_path, tie_word_embeddings=True)
    wrap(tmp_path, "published", tie_word_embeddings=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"]["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_parity(peer, load(tmp_path))


@pytest.mark.skipif(not available(), reason="the native library is not built")
def test_coded_experts(tmp_path: Path) -> None:
    """Published files describe their four bits inside the text half."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96, "q_lora_rank": 32}
    sizes |= {"v_head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4}
    peer = make_peer("kimi", tmp_path, **sizes)
    meant = published.rewrite(tmp_path, SMALL_GROUPS)
    wrap(tmp_path, "published")
    for name, values in meant.items():
        parameter(peer, name).copy_(values)
    tokens = tokens_of(40)
    expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
    got = run_tokens(load(tmp_path, NativeCpuOps(2, "float32")), tokens)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)  # zero points are rounded to float16


def parameter(peer: Any, name: str) -> torch.Tensor:
    """The peer's weight under the name that a file gives it: experts are apart there."""
    if ".experts." not in name:
        found: torch.Tensor = peer.get_parameter(name)
        return found
    block, rest = name.split(".experts.")
    expert, part, _ = rest.split(".")
    whole = peer.get_submodule(f"{block}.experts")
    if part == "down_proj":
        return whole.down_proj[int(expert)]
    gate, up = whole.gate_up_proj[int(expert)].chunk(2)
    return gate if part == "gate_proj" else up


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "text_config is missing"),
        ({"text_config": 3}, "text_config must be an object"),
        ({"text_config": {"model_type": "llama"}}, r"text_config: model_type is 'llama'"),
        ({"text_config": {"quantization_config": {"quant_method": "quark"}, "model_type": "kimi_k2"}}, "quark"),
        ({"text_config": {"num_attention_heads": 0}}, "text_config: num_attention_heads"),
    ],
)
def test_refused_descriptions(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        arch_from_config({"model_type": "kimi_k25", **config})
