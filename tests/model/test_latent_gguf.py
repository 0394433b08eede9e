"""DeepSeek and gpt-oss attention in GGUF files: the same model as the safetensors folder it was converted from.

The files are written here with the gguf package, doing what llama.cpp's converter does. gpt-oss has a dense feed in the
place of its experts; test_gpt_oss_gguf.py has it whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.helpers import run_tokens
from tests.model.test_gguf_parity import SPELLINGS, Tensors, assert_same, write_tensors
from tests.model.test_latent import make_peer
from tests.model.test_parity import tokens_of
from tests.model.test_sinks import make_peer as make_sinks
from tests.text.vocabularies import write_value
from twostroke.errors import ModelError
from twostroke.model import families
from twostroke.model.arch import DenseArch
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_arch, load_model

LATENT_SPELLINGS = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def converted(peer: Any, split: bool, more: dict[str, str]) -> dict[str, np.ndarray]:
    """split: kv_b as two tensors, that of the keys transposed."""
    c, spellings, tensors = peer.config, {**SPELLINGS, **LATENT_SPELLINGS, **more}, {}
    for name, parameter in peer.named_parameters():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        data = parameter.detach().float().numpy()
        if kind == "sinks":
            tensors[f"{prefix}attn_sinks.weight"] = data
        elif split and stem == "self_attn.kv_b_proj":
            heads = data.reshape(c.num_attention_heads, -1, c.kv_lora_rank)
            keys, values = heads[:, : c.qk_nope_head_dim], heads[:, c.qk_nope_head_dim :]
            tensors[f"{prefix}attn_k_b.weight"] = np.ascontiguousarray(keys.swapaxes(1, 2))
            tensors[f"{prefix}attn_v_b.weight"] = np.ascontiguousarray(values)
        elif stem == "mlp.experts":
            whole = {"ffn_down_exps": data}
            if kind == "gate_up_proj":
                whole = {"ffn_gate_exps": data[:, : data.shape[1] // 2], "ffn_up_exps": data[:, data.shape[1] // 2 :]}
            tensors |= {f"{prefix}{part}.weight": np.ascontiguousarray(values) for part, values in whole.items()}
        else:
            tensors[f"{prefix}{spellings[stem]}.{kind}"] = data
    for name, buffer in peer.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensors[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = buffer.numpy()
    return tensors


def write(
    path: Path,
    arch: str,
    tensors: Tensors,
    keys: dict[str, Any],
    quantized: bool = False,
    header: Mapping[str, Any] | None = None,
) -> None:
    """header: a vocabulary."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in (header or {}).items():
        write_value(writer, key, value)
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(f"{arch}.{key}", value)
    write_tensors(writer, tensors, quantized)


def common(c: Any) -> dict[str, Any]:
    rope, scaled = c.rope_parameters, {}
    if rope["rope_type"] == "yarn":
        scaled = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return scaled | {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }


def deepseek_keys(c: Any, split: bool) -> dict[str, Any]:
    head = c.qk_nope_head_dim + c.qk_rope_head_dim
    found = common(c) | {
        "leading_dense_block_count": c.first_k_dense_replace,
        "attention.kv_lora_rank": c.kv_lora_rank,
        "rope.dimension_count": c.qk_rope_head_dim,
        "expert_count": 8,
    }
    if c.first_k_dense_replace < c.num_hidden_layers:
        found |= {
            "expert_used_count": c.num_experts_per_tok,
            "expert_feed_forward_length": c.moe_intermediate_size,
            "expert_shared_count": c.n_shared_experts,
            "expert_weights_scale": float(c.routed_scaling_factor),
            "expert_weights_norm": bool(c.norm_topk_prob),
            "expert_gating_func": 2 if c.model_type == "deepseek_v3" else 1,
            "expert_group_count": c.n_group,
            "expert_group_used_count": c.topk_group,
        }
    if c.q_lora_rank:
        found["attention.q_lora_rank"] = c.q_lora_rank
    if "mscale_all_dim" in c.rope_parameters:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * c.rope_parameters["mscale_all_dim"]
    if not split:
        return found | {
            "attention.head_count_kv": c.num_attention_heads,
            "attention.key_length": head,
            "attention.value_length": c.v_head_dim,
        }
    return found | {
        "attention.head_count_kv": 1,
        "attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim,
        "attention.value_length": c.kv_lora_rank,
        "attention.key_length_mla": head,
        "attention.value_length_mla": c.v_head_dim,
    }


SAME_MSCALE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SAME_MSCALE |= {"mscale": 0.8, "mscale_all_dim": 0.8}
CASES = {  # family of test_latent, whether kv_b is split, what differs
    "v2": ("v2", False, {}),
    "v2 lite": ("v2 lite", True, {"rope_parameters": SAME_MSCALE}),
    "v3": ("v3", True, {}),
    "v3 yarn": ("v3", False, {"rope_parameters": SAME_MSCALE}),
    "biases": ("v3 biases", True, {}),
    "v2 experts": ("v2 experts", True, {}),
    "v3 experts": ("v3 experts", True, {}),
    "v3 experts, no gating": ("v3 experts", True, {}),
}


def logits(path: Path) -> torch.Tensor:
    return run_tokens(load_model(open_checkpoint(path), ReferenceOps(), 64), tokens_of(61))


@pytest.mark.parametrize("case", CASES)
def test_gguf_equals_safetensors(case: str, tmp_path: Path) -> None:
    family, split, more = CASES[case]
    with torch.no_grad():
        peer = make_peer(family, tmp_path / "folder", **more)
    path = tmp_path / "model.gguf"
    keys = deepseek_keys(peer.config, split)
    if case == "v3 experts, no gating":
        del keys["expert_gating_func"]
    write(path, "deepseek2", converted(peer, split, {}), keys)
    assert_same(load_arch(open_checkpoint(path)), load_arch(open_checkpoint(tmp_path / "folder")))
    torch.testing.assert_close(logits(path), logits(tmp_path / "folder"), atol=2e-5, rtol=0)


@pytest.mark.parametrize("split", [True, False])
def test_quantized_files(split: bool, tmp_path: Path) -> None:
    """Blocks of 8 bits lie along rows. Where keys must be transposed they are decoded first."""
    sizes = {"hidden_size": 96, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 16}
    with torch.no_grad():
        peer = make_peer("v3", tmp_path / "folder", **sizes, intermediate_size=96)
    keys, tensors = deepseek_keys(peer.config, split), converted(peer, split, {})
    write(tmp_path / "packed.gguf", "deepseek2", tensors, keys, quantized=True)
    rounded = {
        name: gguf.quants.dequantize(
            gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
        )
        if data.ndim > 1 and data.shape[-1] % 32 == 0
        else data
        for name, data in tensors.items()
    }
    write(tmp_path / "plain.gguf", "deepseek2", rounded, keys)
    got, expected = logits(tmp_path / "packed.gguf"), logits(tmp_path / "plain.gguf")
    torch.testing.assert_close(got, expected, atol=2e-5 if split else 2e-2, rtol=0)  # float16 after the transposition


def test_gguf_with_sinks_equals_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "gpt_oss_feeds", lambda c, n: [DenseArch(c.integer("intermediate_size"))] * n)
    with torch.no_grad():
        peer = make_sinks(tmp_path / "folder", "yarn")
    c = peer.config
    keys = common(c) | {
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.sliding_window": c.sliding_window,
    }
    tensors = converted(peer, False, {"post_attention_layernorm": "post_attention_norm"})
    write(tmp_path / "model.gguf", "gpt-oss", tensors, keys)
    assert_same(load_arch(open_checkpoint(tmp_path / "model.gguf")), load_arch(open_checkpoint(tmp_path / "folder")))
    torch.testing.assert_close(logits(tmp_path / "model.gguf"), logits(tmp_path / "folder"), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"leading_dense_block_count": 2}, "expert_count is 8, but no layer has a router"),
        ({"attention.key_length_mla": 8}, "not above the 8 rotated dimensions"),
        ({"attention.kv_lora_rank": 33}, r"attn_kv_a_mqa.weight has shape \(40, 48\), expected \(41, 48\)"),
        ({"attention.value_length_mla": 11}, r"attn_output.weight has shape|attn_v_b.weight has shape"),
        ({"rope.scaling.type": "dynamic"}, "dynamic"),
    ],
)
def test_refusals(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with torch.no_grad():
        peer = make_peer("v3", tmp_path / "folder")
    write(tmp_path / "model.gguf", "deepseek2", converted(peer, True, {}), deepseek_keys(peer.config, True) | change)
    with pytest.raises(ModelError, match=named):
        load_model(open_checkpoint(tmp_path / "model.gguf"), ReferenceOps(), 64)
