"""DeepSeek V4 as GGUF files hold it: its keys and the names of its tensors. Torch-free.

Both say the same as config.json and DeepSeek's own names (compressed_names.py), but that experts are stacked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from twostroke.errors import ModelError
from twostroke.model.arch import Arch, ExpertsArch
from twostroke.model.compressed_names import compressed_sources
from twostroke.model.fields import Fields
from twostroke.model.source import Source
from twostroke.record import replace

SQRT_SOFTPLUS = 4  # ggml's number for the scores of the router
LIMIT = 10.0  # of gate and up

_KEYS = {
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "qk_rope_head_dim": "rope.dimension_count",
    "rope_theta": "rope.freq_base",
    "compress_rope_theta": "attention.compress_rope_freq_base",
    "compress_ratios": "attention.compress_ratios",
    "sliding_window": "attention.sliding_window",
    "q_lora_rank": "attention.q_lora_rank",
    "o_lora_rank": "attention.output_lora_rank",
    "o_groups": "attention.output_group_count",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "hc_mult": "hyper_connection.count",
    "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    "hc_eps": "hyper_connection.epsilon",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "num_hash_layers": "hash_layer_count",
    "num_hidden_layers": "block_count",
    "rope_scaling": "rope.scaling",
}
# Inside a layer, without the end that says weight or bias.
_TENSORS = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "hc_attn_fn": "hc_attn_fn",
    "hc_attn_base": "hc_attn_base",
    "hc_attn_scale": "hc_attn_scale",
    "hc_ffn_fn": "hc_ffn_fn",
    "hc_ffn_base": "hc_ffn_base",
    "hc_ffn_scale": "hc_ffn_scale",
    "attn.attn_sink": "attn_sinks",
    "attn.wq_a": "attn_q_a",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    "attn.norm": "attn_kv_a_norm",
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    "attn.compressor.wkv": "attn_compressor_kv",
    "attn.compressor.wgate": "attn_compressor_gate",
    "attn.compressor.ape": "attn_compressor_ape",
    "attn.compressor.norm": "attn_compressor_norm",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "attn.indexer.compressor.wkv": "indexer_compressor_kv",
    "attn.indexer.compressor.wgate": "indexer_compressor_gate",
    "attn.indexer.compressor.ape": "indexer_compressor_ape",
    "attn.indexer.compressor.norm": "indexer_compressor_norm",
    "ffn.gate": "ffn_gate_inp",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid",
    "ffn.shared_experts.w1": "ffn_gate_shexp",
    "ffn.shared_experts.w2": "ffn_down_shexp",
    "ffn.shared_experts.w3": "ffn_up_shexp",
}
_STACKS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
_OUTSIDE = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "hc_head_fn": "output_hc_fn.weight",
    "hc_head_base": "output_hc_base.weight",
    "hc_head_scale": "output_hc_scale.weight",
}
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")


class KeysUnderOtherNames(Fields):
    """A file's keys under other names. Errors have the file's own."""

    def __init__(self, keys: Fields, names: Mapping[str, str], found: Mapping[str, Any]):
        super().__init__(keys.values, keys.where, keys.prefix)
        self.names, self.found = names, found

    def get(self, key: str) -> Any:
        if key in self.found:
            return self.found[key]
        return super().get(self.names[key]) if key in self.names else None

    def error(self, key: str, reason: str) -> ModelError:
        return super().error(self.names.get(key, key), reason)


def compressed_fields(keys: Fields, found: Mapping[str, Any]) -> Fields:
    """The keys of a file under config.json's names. found: what is not a key, or not in the same form."""
    keys.only("expert_gating_func", SQRT_SOFTPLUS)
    keys.only("expert_group_count", 0, 1)
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        _check_limits(keys, key)
    if not keys.has("attention.compress_ratios"):
        raise keys.error("attention.compress_ratios", "is missing")
    ratios = _plain(keys.get("attention.compress_ratios"))
    return KeysUnderOtherNames(keys, _KEYS, {**found, "compress_ratios": ratios})


def _check_limits(keys: Fields, key: str) -> None:
    """One number for all layers, or one for each. That of the shared experts may be left out: it is the other one."""
    value = _plain(keys.get(key))
    if value is None and key == "swiglu_clamp_exp":
        raise keys.error(key, "is missing")
    layers = keys.get("block_count")
    if isinstance(value, list) and len(value) != layers:
        raise keys.error(key, f"has {len(value)} numbers for {layers} layers")
    for limit in value if isinstance(value, list) else [value]:
        if limit is not None and (not isinstance(limit, int | float) or limit != LIMIT):
            raise keys.error(key, f"has {limit!r:.80}, which is not supported (it must be {LIMIT:g} in each layer)")


def _plain(value: Any) -> Any:
    """Arrays of a file as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def gguf_compressed_sources(arch: Arch) -> dict[str, Source]:
    """Every parameter of the model with its place."""
    own = compressed_sources(arch, ("embed.weight", "head.weight"))
    return {name: _source(source, arch) for name, source in own.items()}


def _source(source: Source, arch: Arch) -> Source:
    if source.tensor in _OUTSIDE:
        return replace(source, tensor=_OUTSIDE[source.tensor])
    _, layer, inside = source.tensor.split(".", 2)
    expert = _EXPERT.fullmatch(inside)
    if expert is None:
        return replace(source, tensor=f"blk.{layer}.{_inside(inside)}")
    feed, stack = arch.layers[int(layer)].feed, f"blk.{layer}.{_STACKS[expert[2]]}.weight"
    assert isinstance(feed, ExpertsArch)
    return replace(source, tensor=stack, shape=(feed.routing.experts, *source.shape), entry=int(expert[1]))


def _inside(name: str) -> str:
    if name == "ffn.gate.bias":
        return "exp_probs_b.bias"
    return f"{_TENSORS[name.removesuffix('.weight')]}.weight"
