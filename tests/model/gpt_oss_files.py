"""Random gpt-oss models, and GGUF files of them as llama.cpp's converter writes them, with experts in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.model.test_gguf_parity import SPELLINGS, Packed
from tests.model.test_latent_gguf import common, write
from tests.model.test_parity import SHAPE
from tests.model.test_sinks import ROPES, WINDOW

MXFP4 = gguf.GGMLQuantizationType.MXFP4
SIZES = {**SHAPE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
SIZES |= {"initializer_range": 0.15, "num_attention_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 3}
ROUTER = {"mlp.router": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm"}


def random_peer(**more: Any) -> Any:
    """A transformers model whose norms, biases and sinks count."""
    torch.manual_seed(4)
    config = transformers.GptOssConfig(**{**SIZES, "sliding_window": WINDOW, "rope_parameters": ROPES["yarn"], **more})
    peer = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    for name, parameter in peer.named_parameters():
        if "norm" in name or "bias" in name or "sinks" in name:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return peer


def write_gpt_oss(
    path: Path,
    peer: Any,
    coded: bool,
    extra: dict[str, Any] | None = None,
    header: Mapping[str, Any] | None = None,
) -> None:
    """coded: the experts are in MXFP4, and the peer gets the values that they have there. extra: keys. header: a
    vocabulary."""
    c, tensors = peer.config, {}
    for name, parameter in peer.named_parameters():
        prefix, stem = "", name.removesuffix(".weight").removesuffix(".bias")
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        data = parameter.detach().float().numpy()
        if stem.startswith("mlp.experts."):
            tensors |= {f"{prefix}{end}": one for end, one in _experts(stem, parameter, coded).items()}
        elif stem == "self_attn.sinks":
            tensors[f"{prefix}attn_sinks.weight"] = data
        else:
            tensors[f"{prefix}{(SPELLINGS | ROUTER)[stem]}.{name.rsplit('.', 1)[1]}"] = data
    write(path, "gpt-oss", tensors, gpt_oss_keys(c) | (extra or {}), header=header)


def gpt_oss_keys(c: Any) -> dict[str, Any]:
    return common(c) | {
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.sliding_window": c.sliding_window,
        "expert_feed_forward_length": c.intermediate_size,
        "expert_count": c.num_local_experts,
        "expert_used_count": c.num_experts_per_tok,
    }


def _experts(stem: str, parameter: torch.Tensor, coded: bool) -> dict[str, np.ndarray | Packed]:
    """transformers holds (experts, inputs, outputs), with gate and up in alternating outputs."""
    if stem.endswith("_bias"):
        data = parameter.detach().float().numpy()
        return {f"{part}.bias": one for part, one in _parts(stem, data).items()}
    data = np.ascontiguousarray(parameter.detach().float().numpy().swapaxes(1, 2))
    if not coded:
        return {f"{part}.weight": one for part, one in _parts(stem, data).items()}
    parameter.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(data, MXFP4), MXFP4)).transpose(1, 2))
    packed = {part: gguf.quants.quantize(one, MXFP4) for part, one in _parts(stem, data).items()}
    return {f"{part}.weight": Packed(one, MXFP4) for part, one in packed.items()}


def _parts(stem: str, data: np.ndarray) -> dict[str, np.ndarray]:
    """data: (experts, outputs, …)"""
    if "down" in stem:
        return {"ffn_down_exps": data}
    return {f"ffn_{part}_exps": np.ascontiguousarray(data[:, at::2]) for at, part in enumerate(("gate", "up"))}
