"""The same logits as transformers, for every family and every kind of rotary scaling, from tiny random checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from tests.helpers import run_tokens
from twostroke.model.arch import Arch
from twostroke.model.transformer import Transformer
from twostroke.ops.cpu.backend import NativeCpuOps
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_arch, load_model

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,  # wide enough for sharp attention: small weights would hide mistakes
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "long_factor": [1.5, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}
HALF = {"partial_rotary_factor": 0.5}
HALF_LONG = {**HALF, "rope_type": "longrope", "long_factor": [1.5, 3.0], "short_factor": [1.0, 1.2]}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

# name -> (config class, what differs from SHAPE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama multi-head": ("Llama", {"num_key_value_heads": 6}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama bias, head_dim": ("Llama", {"attention_bias": True, "head_dim": 12}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}),
    "llama llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama yarn factors": (
        "Llama",
        {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3 window": (
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 24},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {"sliding_window": 24}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2 layer types": ("Qwen2", {"use_sliding_window": True, "sliding_window": 17, "layer_types": MIXED}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 24}),
    "gemma3 scaled": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": MIXED,
            "rope_parameters": GEMMA_ROPE,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 5.0,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3 window": ("Phi3", {"sliding_window": 24, "num_key_value_heads": 6}),
    "phi3 partial": ("Phi3", {"rope_parameters": HALF}),
    "phi3 long": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 8}),
    "phi3 short": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 256}),
    "phi3 partial long": ("Phi3", {"rope_parameters": HALF_LONG, "original_max_position_embeddings": 8}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe every second layer": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 24}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe normalised": ("Olmoe", {"num_experts": 20, "num_experts_per_tok": 1, "norm_topk_prob": True}),
}
MIXTURES = [name for name, (kind, _) in FAMILIES.items() if kind in ("Qwen3Moe", "Mixtral", "Olmoe")]
LENGTHS = (9, 16, 17, 61, 150)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make_peer(family: str, folder: Path, **more: Any) -> Any:
    """A random transformers model, saved to `folder`."""
    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes, **more})
    peer = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in peer.named_parameters():  # norms and biases start as ones and zeros: make them count
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    peer.save_pretrained(folder)
    return peer.eval()


def load(folder: Path, ops: Any = None) -> Transformer:
    return load_model(open_checkpoint(folder), ops or ReferenceOps(), 256)


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file)


def tokens_of(length: int) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    peer = make_peer(family, tmp_path)
    model = load(tmp_path)
    for length in LENGTHS:
        tokens = tokens_of(length)
        expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
        whole = run_tokens(model, tokens)
        assert expected.std() > 0.3  # the comparison means something
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
        chunks = [7, length - 8, 1] if length > 8 else [length]
        assert torch.equal(run_tokens(model, tokens, chunks), whole)


@pytest.mark.parametrize("family", ["llama", "gemma3 scaled", *MIXTURES])
def test_native_ops_agree(family: str, tmp_path: Path) -> None:
    make_peer(family, tmp_path)
    tokens = tokens_of(40)
    fast = run_tokens(load(tmp_path, NativeCpuOps(2, weights="float32")), tokens, [16, 23, 1])
    torch.testing.assert_close(run_tokens(load(tmp_path), tokens), fast, atol=1e-4, rtol=0)


def test_half_precision_checkpoints(tmp_path: Path) -> None:
    """bfloat16 on disk, float32 inside: the peer gets the same rounded weights."""
    make_peer("llama", tmp_path / "full").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    peer = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    tokens = tokens_of(40)
    expected = peer(torch.tensor([tokens])).logits[0]
    for weights in ("float32", "bfloat16"):
        model = load(tmp_path / "half", NativeCpuOps(2, weights=weights))
        torch.testing.assert_close(run_tokens(model, tokens), expected, atol=1e-4, rtol=0)


def test_older_configs_mean_the_same(tmp_path: Path) -> None:
    """Before transformers 5: rope_theta and rope_scaling instead of rope_parameters."""
    for family in ("llama llama3", "llama yarn", "llama linear", "gemma3 scaled", "phi3 partial long"):
        make_peer(family, tmp_path)
        new = arch_of(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        rope = config.pop("rope_parameters")
        if "full_attention" in rope:
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in rope:
                config[key] = rope.pop(key)
        rope["type"] = "su" if rope["rope_type"] == "longrope" else rope["rope_type"]
        del rope["rope_type"]
        config["rope_scaling"] = rope
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert arch_of(tmp_path) == new


def arch_of(folder: Path) -> Arch:
    return load_arch(open_checkpoint(folder))
