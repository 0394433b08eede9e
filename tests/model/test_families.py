"""A description that is absurd, hostile or not ours is refused by name; a checkpoint must fit its description."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers import run_tokens
from tests.model.test_parity import SHAPE, make_peer, rewrite, tokens_of
from twostroke.errors import ModelError
from twostroke.model.families import arch_from_config
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import halves_order, load_model

MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA = {**SHAPE, "model_type": "llama", "rms_norm_eps": 1e-5}
GEMMA = {**SHAPE, "model_type": "gemma3_text", "head_dim": 8}
DEEPSEEK_V4 = {**SHAPE, "model_type": "deepseek_v4", "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8}
DEEPSEEK_V4 |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "o_groups": 2}
DEEPSEEK = {**SHAPE, "model_type": "deepseek_v3", "num_key_value_heads": 6, "first_k_dense_replace": 3}
ROUTED = {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED |= {"n_group": 2, "topk_group": 1}

COMPRESSED: dict[str, object] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def compressed(**weights: object) -> dict[str, object]:
    return COMPRESSED | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def test_published_quantized_formats_are_known() -> None:
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    gpt_oss = {**LLAMA, **EXPERTS, "model_type": "gpt_oss", "sliding_window": 16}
    assert arch_from_config({**gpt_oss, "quantization_config": mxfp4}) == arch_from_config(gpt_oss)
    assert arch_from_config({**DEEPSEEK, "quantization_config": fp8}) == arch_from_config(DEEPSEEK)


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (LLAMA, {"model_type": "mamba"}, r"mamba.*gemma3, gemma3_text,.* llama, mistral"),
        (LLAMA, {"model_type": None}, "model_type"),
        (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA, {"hidden_size": -1}, "hidden_size"),
        (LLAMA, {"hidden_size": 1 << 40}, "hidden_size"),
        (LLAMA, {"hidden_size": "48"}, "hidden_size"),
        (LLAMA, {"hidden_size": True}, "hidden_size"),
        (LLAMA, {"hidden_size": 48.5}, "hidden_size"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA, {"vocab_size": 10**12}, "vocab_size"),
        (LLAMA, {"max_position_embeddings": 10**12}, "max_position_embeddings"),
        (LLAMA, {"num_key_value_heads": 4}, "num_attention_heads.*multiple"),
        (LLAMA, {"head_dim": 7}, "head_dim"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps"),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"num_local_experts": 8}, "num_local_experts"),
        (LLAMA, {"quantization_config": {"quant_method": "quark"}}, "has quant_method 'quark', which is not read"),
        (
            LLAMA,
            {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}},
            "Use the model's bfloat",
        ),
        (LLAMA, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "quant_algo is 'NVFP4'"),
        (LLAMA, {"quantization_config": {"quant_method": "awq"}}, "bits is missing"),
        (LLAMA, {"quantization_config": {"quant_method": "awq", "bits": 3}}, "bits is 3; read are 4"),
        (LLAMA, {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "version is 'gemv'"),
        (
            LLAMA,
            {"quantization_config": {"quant_method": "awq", "bits": 4, "zero_point": False}},
            "zero_point is False",
        ),
        (LLAMA, {"quantization_config": {"quant_method": "gptq", "bits": 2}}, "bits is 2; read are 4 and 8"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 0}}, "group_size is 0"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}}, "marlin"),
        (LLAMA, {"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}}, "marlin-24"),
        (LLAMA, {"quantization_config": COMPRESSED | {"transform_config": {"config_groups": {}}}}, "transform_config"),
        (LLAMA, {"quantization_config": COMPRESSED | {"sparsity_config": {"format": "sparse-24"}}}, "sparse-24"),
        (LLAMA, {"quantization_config": compressed(type="float", num_bits=4)}, "num_bits is 4 of type 'float'"),
        (LLAMA, {"quantization_config": compressed(strategy="tensor_group")}, "strategy is 'tensor_group'"),
        (LLAMA, {"quantization_config": compressed(strategy="block", block_structure=[0, 1])}, "block_structure is"),
        (LLAMA, {"quantization_config": COMPRESSED | {"config_groups": [1]}}, "config_groups must be an object"),
        (LLAMA, {"quantization_config": {"quant_method": "mxfp4"}}, "is not read for llama"),
        (LLAMA, {"quantization_config": "fp8"}, "quantization_config must be an object"),
        (LLAMA, {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "weight_block_size is 128"),
        (LLAMA, {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt is 'e5m2'"),
        (DEEPSEEK_V4, {"quantization_config": {"quant_method": "awq"}}, "not read for deepseek_v4"),
        (DEEPSEEK_V4, {"n_routed_experts": 0}, "n_routed_experts must lie between 1 and"),
        (DEEPSEEK_V4, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
        (DEEPSEEK_V4, {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        (DEEPSEEK_V4, {"o_groups": 4}, "o_groups is 4, which does not divide 6 heads"),
        (DEEPSEEK_V4, {"compress_rates": {"compressed_sparse_attention": 5}}, "compress_rates has 5"),
        (DEEPSEEK_V4, {"compress_rates": {"heavily_compressed_attention": 0}}, "heavily_compressed_attention"),
        (DEEPSEEK_V4, {"compress_rate_hca": 10**9}, "compress_rate_hca"),
        (DEEPSEEK_V4, {"layer_types": ["full_attention"] * 3}, "layer_types must be a list of 3 entries"),
        (DEEPSEEK_V4, {"compress_ratios": [0, 4, 7]}, "compress_ratios must be a list of 3 entries"),
        (DEEPSEEK_V4, {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types must be a list of 3 entries"),
        (DEEPSEEK_V4, {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        (DEEPSEEK_V4, {"index_head_dim": 4}, "index_head_dim is 4, less than the 8"),
        (DEEPSEEK_V4, {"head_dim": 40}, "head_dim is 40; that must be a multiple of 16"),
        (DEEPSEEK_V4, {"hc_mult": 0}, "hc_mult"),
        (DEEPSEEK_V4, {"swiglu_limit": 7.0}, "swiglu_limit is 7.0"),
        (DEEPSEEK_V4, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK_V4, {"rope_parameters": {"rope_type": "longrope"}}, "long_factor|short_factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling"),
        (LLAMA, {"rope_parameters": {"rope_theta": -5.0}}, "rope_theta"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 0.0, 1, 1]}}, "short_factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ({**LLAMA, "model_type": "mistral"}, {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({**LLAMA, "model_type": "qwen2"}, {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        ({**LLAMA, "model_type": "qwen2"}, {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({**LLAMA, "model_type": "qwen3"}, {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({**LLAMA, "model_type": "smollm3"}, {"no_rope_layers": [1, 0, 5]}, "no_rope_layers"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3"}, {}, "text_config"),
        (DEEPSEEK, {"kv_lora_rank": 0}, "kv_lora_rank"),
        (DEEPSEEK, {"kv_lora_rank": 10**9}, "kv_lora_rank"),
        (DEEPSEEK, {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        (DEEPSEEK, {"qk_nope_head_dim": "many"}, "qk_nope_head_dim"),
        (DEEPSEEK, {"v_head_dim": -1}, "v_head_dim"),
        (DEEPSEEK, {"q_lora_rank": 0.5}, "q_lora_rank"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (DEEPSEEK, {"first_k_dense_replace": 1}, "n_routed_experts is missing"),
        (DEEPSEEK, {"rope_scaling": {"rope_type": "yarn", "mscale_all_dim": 1.0}}, "factor is missing"),
        (DEEPSEEK, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": "x"}}, "mscale_all_dim"),
        ({**LLAMA, "model_type": "gpt_oss"}, {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({**LLAMA, "model_type": "gpt_oss"}, {"sliding_window": -4}, "sliding_window"),
        ({"model_type": "gemma3", "text_config": GEMMA}, {"text_config": {**GEMMA, "head_dim": 0}}, "head_dim"),
    ],
)
def test_refused_descriptions(base: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        arch_from_config({**base, **change})


def test_any_value_gives_our_own_error() -> None:
    """Whatever stands under whatever key: an Arch or a ModelError, nothing else."""
    odd: list[Any] = [
        None,
        -1,
        0,
        1,
        2**70,
        0.5,
        float("inf"),
        "x",
        [],
        [1],
        [[1], {}, "x"],
        {},
        {"rope_type": 3},
        True,
    ]
    dense = ("llama", "smollm3", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3")
    bases: dict[str, dict[str, Any]] = {
        **{name: {} for name in dense},
        **dict.fromkeys(MIXTURES, EXPERTS),
        "deepseek_v4": DEEPSEEK_V4,
    }
    bases |= {"deepseek_v2": DEEPSEEK | ROUTED, "deepseek_v3": DEEPSEEK | ROUTED, "kimi_k2": DEEPSEEK | ROUTED}
    for model_type, more in bases.items():
        keys = [*SHAPE, "head_dim", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window"]
        keys += ["kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace"]
        keys += ["layer_types", "no_rope_layers", "sliding_window_pattern", "use_sliding_window", "attention_bias"]
        keys += ["num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers"]
        keys += ["decoder_sparse_step", "norm_topk_prob"]
        keys += [*ROUTED, *DEEPSEEK_V4, "n_shared_experts", "routed_scaling_factor", "topk_method", "scoring_func"]
        keys += ["compress_rates", "compress_ratios", "index_n_heads", "index_head_dim", "index_topk", "hc_mult"]
        keys += ["mlp_layer_types", "num_hash_layers", "o_lora_rank", "partial_rotary_factor", "quantization_config"]
        base = {**SHAPE, **more, "model_type": model_type}
        for key in keys:
            for value in odd:
                with suppress(ModelError):
                    arch_from_config({**base, key: value})
                if model_type == "kimi_k2":
                    with suppress(ModelError):
                        arch_from_config({"model_type": "kimi_k25", "text_config": {**base, key: value}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (lambda t: t.update({"model.layers.1.extra": torch.ones(2)}), r"model\.layers\.1\.extra is left over"),
        (lambda t: t.update({f"odd.{i}": torch.ones(2) for i in range(9)}), "and 5 more tensors are left over"),
        (lambda t: t.update({"model.norm.weight": torch.ones(4)}), r"model\.norm\.weight has shape \(4,\)"),
    ],
)
def test_checkpoint_must_fit_its_description(change: Any, named: str, tmp_path: Path) -> None:
    make_peer("llama", tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=named):
        load_model(open_checkpoint(tmp_path), ReferenceOps(), 64)


def test_ignorable_tensors(tmp_path: Path) -> None:
    """Rotary buffers of old checkpoints, and a head stored although it is tied."""
    make_peer("llama one kv head", tmp_path)
    tokens = tokens_of(20)
    plain = run_tokens(load_model(open_checkpoint(tmp_path), ReferenceOps(), 64), tokens)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(96, 48)}
    rewrite(tmp_path, lambda t: t.update(extra))
    assert torch.equal(run_tokens(load_model(open_checkpoint(tmp_path), ReferenceOps(), 64), tokens), plain)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_text_half_of_multimodal_gemma(prefix: str, tmp_path: Path) -> None:
    make_peer("gemma3 scaled", tmp_path)
    tokens = tokens_of(40)
    expected = run_tokens(load_model(open_checkpoint(tmp_path), ReferenceOps(), 64), tokens)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", prefix, 1)] = tensors.pop(name)
        tensors["model.vision_tower.patch"] = torch.ones(3)

    rewrite(tmp_path, rename)
    assert torch.equal(run_tokens(load_model(open_checkpoint(tmp_path), ReferenceOps(), 64), tokens), expected)


def test_halves_order() -> None:
    assert halves_order(10, 2, 4).tolist() == [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]
    assert halves_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make_peer("phi3", tmp_path)
    load_model(open_checkpoint(tmp_path), ReferenceOps(), 64, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_peer_version() -> None:
    """The parity tests read configs as transformers 5 writes them."""
    assert int(transformers.__version__.split(".")[0]) >= 5
