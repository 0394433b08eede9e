"""DeepSeek V4 from GGUF: the same model as the folder it was converted from.

The names of keys and tensors are those that llama.cpp reads: test_llama_cpp_mixtures.py has it read such a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

from tests.helpers import run_tokens
from tests.model.test_compressed_parity import HEAVY, SLIDING, SPARSE, YARN, make_peer
from tests.model.test_gguf_parity import Packed, assert_same
from tests.model.test_latent_gguf import write
from tests.model.test_parity import tokens_of
from twostroke.errors import ModelError
from twostroke.model.compressed_gguf import _OUTSIDE, _STACKS, _inside
from twostroke.ops.cpu.backend import NativeCpuOps
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.checkpoint import Checkpoint, open_checkpoint
from twostroke.weights.load import load_arch, load_model

RATIOS = {SLIDING: 0, SPARSE: 4, HEAVY: 128}
SIZES: dict[str, Any] = {  # the ratios that files can name
    "compress_rates": {SPARSE: 4, HEAVY: 128},
    "layer_types": [SLIDING, HEAVY, SPARSE, SPARSE],
    "num_hash_layers": 2,
}
MXFP4 = gguf.GGMLQuantizationType.MXFP4


def converted(folder: Path, coded: bool = False) -> dict[str, np.ndarray | Packed]:
    """The tensors of a folder that transformers saved. coded: experts are in MXFP4."""
    found, stacks = {}, {}
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        own = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
        own = {"embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight"}.get(own, own)
        if own in _OUTSIDE:
            found[_OUTSIDE[own]] = tensor.numpy()
            continue
        _, layer, inside = own.split(".", 2)
        if ".experts." in inside:
            _, _, expert, part, _ = inside.split(".")
            stacks.setdefault(f"blk.{layer}.{_STACKS[part]}.weight", {})[int(expert)] = tensor.numpy()
        else:
            found[f"blk.{layer}.{_inside(inside)}"] = (
                tensor.to(torch.int32).numpy() if "tid2eid" in inside else tensor.numpy()
            )
    for name, experts in stacks.items():
        whole = np.stack([experts[index] for index in range(len(experts))])
        found[name] = Packed(gguf.quants.quantize(whole, MXFP4), MXFP4) if coded else whole
    return found


def keys_of(c: Any) -> dict[str, Any]:
    rope, scaled = c.rope_parameters["compress"], {}
    if rope["rope_type"] == "yarn":
        scaled = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return scaled | {
        "vocab_size": c.vocab_size,
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.moe_intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.sliding_window": c.sliding_window,
        "attention.q_lora_rank": c.q_lora_rank,
        "attention.output_lora_rank": c.o_lora_rank,
        "attention.output_group_count": c.o_groups,
        "attention.compress_ratios": [RATIOS[kind] for kind in c.layer_types],
        "attention.compress_rope_freq_base": float(rope["rope_theta"]),
        "attention.indexer.head_count": c.index_n_heads,
        "attention.indexer.key_length": c.index_head_dim,
        "attention.indexer.top_k": c.index_topk,
        "rope.freq_base": float(c.rope_parameters["main"]["rope_theta"]),
        "rope.dimension_count": int(c.head_dim * rope["partial_rotary_factor"]),
        "expert_count": c.n_routed_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_shared_count": 1,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_weights_scale": float(c.routed_scaling_factor),
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "hash_layer_count": sum(kind == "hash_moe" for kind in c.mlp_layer_types),
        "swiglu_clamp_exp": [10.0] * c.num_hidden_layers,
        "hyper_connection.count": c.hc_mult,
        "hyper_connection.sinkhorn_iterations": c.hc_sinkhorn_iters,
        "hyper_connection.epsilon": c.hc_eps,
    }


def write_v4(
    path: Path, coded: bool = False, change: Mapping[str, Any] | None = None, header: Any = None, **sizes: Any
) -> None:
    """A file, and beside it the folder that it was converted from. change: keys, None takes one away."""
    with torch.no_grad():
        peer = make_peer(path.parent / "folder", **{**SIZES, **sizes})
    keys = keys_of(peer.config) | dict(change or {})
    kept = {key: value for key, value in keys.items() if value is not None}
    write(path, "deepseek4", converted(path.parent / "folder", coded), kept, header=header)


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": YARN}], ids=["plain", "yarn"])
def test_gguf_equals_safetensors(rope: dict[str, Any], tmp_path: Path) -> None:
    path, tokens = tmp_path / "model.gguf", tokens_of(150)
    write_v4(path, **rope)
    file, folder = open_checkpoint(path), open_checkpoint(tmp_path / "folder")
    assert_same(load_arch(file), load_arch(folder))
    for ops in (ReferenceOps(), NativeCpuOps(2, "float32")):
        expected = run_tokens(load_model(folder, ops, 256), tokens)
        got = run_tokens(load_model(file, ops, 256), tokens, [100, 49, 1])
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_experts_in_four_bits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    write_v4(tmp_path / "model.gguf", True, **sizes)
    tensors = safetensors.torch.load_file(tmp_path / "folder" / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        packed = gguf.quants.quantize(tensors[name].numpy(), MXFP4)
        tensors[name] = torch.from_numpy(gguf.quants.dequantize(packed, MXFP4))
    safetensors.torch.save_file(tensors, tmp_path / "folder" / "model.safetensors")
    tokens = tokens_of(40)
    got, expected = (
        run_tokens(load_model(open_checkpoint(tmp_path / name), NativeCpuOps(2, "float32"), 64), tokens)
        for name in ("model.gguf", "folder")
    )
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention.compress_ratios": None}, "deepseek4.attention.compress_ratios is missing"),
        ({"attention.compress_ratios": [0, 4, 7, 4]}, "deepseek4.attention.compress_ratios must be a list of 4"),
        ({"swiglu_clamp_exp": None}, "deepseek4.swiglu_clamp_exp is missing"),
        ({"swiglu_clamp_exp": [10.0, 10.0]}, "deepseek4.swiglu_clamp_exp has 2 numbers for 4 layers"),
        ({"swiglu_clamp_exp": [10.0, 10.0, 7.0, 10.0]}, r"deepseek4.swiglu_clamp_exp has 7.0, .*it must be 10"),
        ({"expert_gating_func": 2}, "deepseek4.expert_gating_func is 2"),
        ({"expert_used_count": 9}, "deepseek4.expert_used_count is 9, but there are 8 experts"),
        ({"attention.output_group_count": 3}, "deepseek4.attention.output_group_count is 3, which does not divide 4"),
        ({"attention.indexer.key_length": 4}, "deepseek4.attention.indexer.key_length is 4, less than the 8"),
        ({"hash_layer_count": 3}, r"blk\.2\.ffn_gate_tid2eid\.weight is missing"),
        ({"hyper_connection.count": 2}, r"output_hc_\w+.weight has shape|blk\.\d\.hc_\w+\.weight has shape"),
    ],
)
def test_refusals(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    write_v4(tmp_path / "model.gguf", change=change)
    with pytest.raises(ModelError, match=named):
        load_model(open_checkpoint(tmp_path / "model.gguf"), ReferenceOps(), 64)


def test_any_value_gives_our_own_error(tmp_path: Path) -> None:
    """Whatever stands under whatever key: an Arch or a ModelError, nothing else."""
    write_v4(tmp_path / "model.gguf")
    file = open_checkpoint(tmp_path / "model.gguf")
    odd: list[Any] = [None, -1, 0, 2**63, 0.5, float("nan"), "x", True, ["x"] * 4, np.zeros(4), np.full(4, 4, np.int32)]
    odd += [[np.zeros(2), np.zeros(2)] * 2, np.array([True] * 4)]
    for key in [key for key in file.config if key.startswith("deepseek4.")]:
        for value in odd:
            with suppress(ModelError):
                load_arch(Checkpoint("gguf", file.path, {**file.config, key: value}, file.tensors))
