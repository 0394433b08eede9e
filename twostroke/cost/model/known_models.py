"""Architectures of well-known models by name, so that a plan needs no download.

The numbers are those of the published config.json, with the format of the weights (`quantization_config`). Rope
frequencies cost no time and stay at their defaults.
"""

from __future__ import annotations

from typing import Any

from twostroke.cost.model.weight_formats import published_format
from twostroke.model.arch import Arch
from twostroke.model.families import arch_from_config


def _config(
    family: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **more,
    }


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def _qwen3_moe(layers: int, hidden: int, ffn: int, heads: int, width: int) -> dict[str, Any]:
    more = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width, "norm_topk_prob": True}
    return _config("qwen3_moe", layers, hidden, ffn, heads, 4, 151936, 40960, head_dim=128, **more)


def _deepseek(
    layers: int, hidden: int, ffn: int, heads: int, vocab: int, context: int, experts: int, chosen: int, width: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Heads and latent are those of V3; V2-Lite's too."""
    head = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    routed = {"n_routed_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": width}
    given = {"q_lora_rank": 1536, "n_shared_experts": 1, "quantization_config": _FP8, **more}
    return _config("deepseek_v3", layers, hidden, ffn, heads, heads, vocab, context, **{**head, **routed, **given})


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    more: dict[str, Any] = {
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "attention_bias": True,
    }
    more["quantization_config"] = {"quant_method": "mxfp4"}
    return _config("gpt_oss", layers, 2880, 2880, 64, 8, 201088, 131072, sliding_window=128, **more)


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _config("llama", 32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": _config("llama", 40, 5120, 13824, 40, 40, 32000, 4096),
    "llama-2-70b": _config("llama", 80, 8192, 28672, 64, 8, 32000, 4096),
    "llama-3-8b": _config("llama", 32, 4096, 14336, 32, 8, 128256, 8192),
    "llama-3.1-8b": _config("llama", 32, 4096, 14336, 32, 8, 128256, 131072),
    "llama-3-70b": _config("llama", 80, 8192, 28672, 64, 8, 128256, 8192),
    "llama-3.1-70b": _config("llama", 80, 8192, 28672, 64, 8, 128256, 131072),
    "llama-3.2-1b": _config("llama", 16, 2048, 8192, 32, 8, 128256, 131072, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _config("llama", 28, 3072, 8192, 24, 8, 128256, 131072, head_dim=128, tie_word_embeddings=True),
    "mistral-7b": _config("mistral", 32, 4096, 14336, 32, 8, 32000, 32768, sliding_window=None),
    "qwen2.5-0.5b": _config("qwen2", 24, 896, 4864, 14, 2, 151936, 32768, tie_word_embeddings=True),
    "qwen2.5-7b": _config("qwen2", 28, 3584, 18944, 28, 4, 152064, 32768),
    "qwen2.5-32b": _config("qwen2", 64, 5120, 27648, 40, 8, 152064, 32768),
    "olmoe-1b-7b": _config("olmoe", 16, 2048, 1024, 16, 16, 50304, 4096, num_experts=64, num_experts_per_tok=8),
    "mixtral-8x7b": _config(
        "mixtral", 32, 4096, 14336, 32, 8, 32000, 32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 6144, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 12288, 64, 1536),
    "qwen3-8b": _config("qwen3", 36, 4096, 12288, 32, 8, 151936, 40960, head_dim=128),
    "deepseek-v3": _deepseek(
        61, 7168, 18432, 128, 129280, 163840, 256, 8, 2048, n_group=8, topk_group=4, first_k_dense_replace=3
    ),
    "deepseek-v2-lite": _deepseek(
        27,
        2048,
        10944,
        16,
        102400,
        163840,
        64,
        6,
        1408,
        model_type="deepseek_v2",
        q_lora_rank=None,
        n_shared_experts=2,
        first_k_dense_replace=1,
        quantization_config=None,
    ),
    "kimi-k2": _deepseek(61, 7168, 18432, 64, 163840, 131072, 384, 8, 2048, first_k_dense_replace=1),
    "deepseek-v4-flash": _config(
        "deepseek_v4",
        43,
        4096,
        2048,
        64,
        1,
        129280,
        1048576,
        head_dim=512,
        n_routed_experts=256,
        num_experts_per_tok=6,
        moe_intermediate_size=2048,
        quantization_config=_FP8,
        expert_dtype="fp4",
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "smollm2-135m": _config("llama", 30, 576, 1536, 9, 3, 49152, 8192, tie_word_embeddings=True),
}


def known_arch(name: str) -> Arch | None:
    """The architecture of a well-known model, by its short name in any case; None if the table has no such name."""
    config = CONFIGS.get(name.lower())
    return None if config is None else arch_from_config(config, name)


def known_format(name: str) -> str | None:
    """The published format of a well-known model's weights; None: bfloat16, or the table has no such name."""
    return published_format(CONFIGS.get(name.lower(), {}), name)
