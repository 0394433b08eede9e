"""A GGUF file means the same model as the safetensors folder it was converted from.

The files are written here with the gguf package, doing what llama.cpp's converter does to each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch

from tests.helpers import run_tokens
from tests.model.test_parity import FAMILIES, LLAMA3, arch_of, make_peer, tokens_of
from tests.text.vocabularies import write_value
from twostroke.errors import ModelError
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.record import Record, values
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_arch, load_model

SPELLINGS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
}
GEMMA_SPELLINGS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# family of test_parity -> GGUF architecture
CASES = {
    "llama": "llama",
    "llama llama3": "llama",
    "llama one kv head": "llama",
    "llama bias, head_dim": "llama",
    "llama yarn": "llama",
    "mistral window": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "phi3 partial long": "phi3",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
}


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to q and k: halves of a head become neighbours."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def converted(peer: Any, arch: str) -> dict[str, np.ndarray]:
    spellings = {**SPELLINGS, **(GEMMA_SPELLINGS if arch == "gemma3" else {})}
    tensors = {}
    for name, parameter in peer.named_parameters():
        if name == "lm_head.weight" and peer.config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        data = parameter.detach().float().numpy()
        if stem == "mlp.experts":  # (experts, outputs, inputs), gate above up
            parts = (
                {"down": data} if kind == "down_proj" else dict(zip(("gate", "up"), np.split(data, 2, 1), strict=True))
            )
            tensors |= {f"{prefix}ffn_{part}_exps.weight": np.ascontiguousarray(one) for part, one in parts.items()}
            continue
        if arch in ("llama", "smollm3") and "q_proj" in stem:
            data = permuted(data, peer.config.num_attention_heads)
        if arch in ("llama", "smollm3") and "k_proj" in stem:
            data = permuted(data, peer.config.num_key_value_heads)
        if arch == "gemma3" and "norm" in stem:
            data = data + 1
        tensors[f"{prefix}{spellings[stem]}.{kind}"] = np.ascontiguousarray(data)
    return tensors


def write_gguf(
    path: Path,
    arch: str,
    peer: Any,
    extra: dict[str, Any],
    quantized: bool = False,
    header: Mapping[str, Any] | None = None,
) -> None:
    """header: a vocabulary."""
    c = peer.config
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in (header or {}).items():
        write_value(writer, key, value)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if experts := getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
        if width := getattr(c, "moe_intermediate_size", None):
            writer.add_expert_feed_forward_length(width)
    tensors = converted(peer, arch)
    for key, value in extra.items():
        if isinstance(value, np.ndarray):
            tensors[key] = value
        elif isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{arch}.{key}", value)
    write_tensors(writer, tensors, quantized)


class Packed(NamedTuple):
    """A tensor in a format of few bits."""

    data: np.ndarray
    kind: gguf.GGMLQuantizationType


Tensors = Mapping[str, np.ndarray | Packed]


def write_tensors(writer: gguf.GGUFWriter, tensors: Tensors, quantized: bool) -> None:
    """And end the file. quantized: matrices whose rows are whole blocks are Q8_0."""
    for name, data in tensors.items():
        if isinstance(data, Packed):
            writer.add_tensor(name, data.data, raw_dtype=data.kind)
        elif quantized and data.ndim > 1 and data.shape[-1] % 32 == 0:
            packed = gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_divisors() -> np.ndarray:
    """The tensor that the converter writes for Llama 3's scaling, for heads of 8."""
    out = []
    for i in range(4):
        wavelength = 2 * np.pi * LLAMA3["rope_theta"] ** (2 * i / 8)
        low, high = 64 / LLAMA3["low_freq_factor"], 64 / LLAMA3["high_freq_factor"]
        if wavelength < high:
            out.append(1.0)
        elif wavelength > low:
            out.append(LLAMA3["factor"])
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            out.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(out, dtype=np.float32)


EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"rope.freq_base": 10_000.0, "rope.dimension_count": 8, "vocab_size": 96},
    "llama llama3": {"rope.freq_base": 500.0, "rope_freqs.weight": llama3_divisors()},
    "llama yarn": {
        "rope.freq_base": 1000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    },
    "mistral window": {"attention.sliding_window": 24},
    "mixtral": {"rope.freq_base": 1_000_000.0},
    "smollm3": {"rope.freq_base": 2_000_000.0},
    "gemma3": {"attention.sliding_window": 24, "rope.freq_base": 1_000_000.0},
    "phi3": {"rope.dimension_count": 8},
    "phi3 partial long": {
        "rope.dimension_count": 4,
        "rope.scaling.original_context_length": 8,
        "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(256 / 8) / np.log(8))),
        "rope_factors_long.weight": np.array([1.5, 3.0], dtype=np.float32),
        "rope_factors_short.weight": np.array([1.0, 1.2], dtype=np.float32),
    },
}


def assert_same(got: Any, expected: Any, place: str = "arch") -> None:
    """Equal, but a number may be rounded to float32 in one of them: a GGUF file stores its numbers so."""
    assert type(got) is type(expected), place
    if isinstance(expected, Record):
        for name, value in values(expected).items():
            if name != "family":  # Mistral's models are called llama in GGUF
                assert_same(getattr(got, name), value, f"{place}.{name}")
    elif isinstance(expected, tuple):
        assert len(got) == len(expected), place
        for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            assert_same(ours, theirs, f"{place}[{i}]")
    else:
        assert got == (pytest.approx(expected, rel=2**-24, abs=0) if isinstance(expected, float) else expected), place


@pytest.mark.parametrize("family", CASES)
def test_gguf_equals_safetensors(family: str, tmp_path: Path) -> None:
    """The same description, hence the same rotary tables, and the same logits."""
    more = {"query_pre_attn_scalar": FAMILIES[family][1]["head_dim"]} if family == "gemma3" else {}  # GGUF has no key
    peer = make_peer(family, tmp_path / "folder", **more)
    path = tmp_path / "model.gguf"
    write_gguf(path, CASES[family], peer, EXTRA.get(family, {}))
    tokens, folder = tokens_of(61), open_checkpoint(tmp_path / "folder")
    assert_same(load_arch(open_checkpoint(path)), load_arch(folder))
    expected = run_tokens(load_model(folder, ReferenceOps(), 64), tokens)
    got = run_tokens(load_model(open_checkpoint(path), ReferenceOps(), 64), tokens)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_quantized_rows_are_put_back_as_bytes(tmp_path: Path) -> None:
    peer = make_peer("llama", tmp_path / "folder", hidden_size=64, num_attention_heads=4, intermediate_size=96)
    write_gguf(tmp_path / "model.gguf", "llama", peer, EXTRA["llama"] | {"rope.dimension_count": 16}, quantized=True)
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.ndim == 2:
                packed = gguf.quants.quantize(parameter.numpy(), gguf.GGMLQuantizationType.Q8_0)
                values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
                parameter.copy_(torch.from_numpy(values))
    peer.save_pretrained(tmp_path / "rounded")
    tokens = tokens_of(40)
    expected = run_tokens(load_model(open_checkpoint(tmp_path / "rounded"), ReferenceOps(), 64), tokens)
    got = run_tokens(load_model(open_checkpoint(tmp_path / "model.gguf"), ReferenceOps(), 64), tokens)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_description_matches(tmp_path: Path) -> None:
    peer = make_peer("qwen2", tmp_path / "folder")
    write_gguf(tmp_path / "model.gguf", "qwen2", peer, {})
    assert load_arch(open_checkpoint(tmp_path / "model.gguf")).weights == arch_of(tmp_path / "folder").weights


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"expert_count": 8}, "expert_count"),
        ({"rope.scaling.type": "dynamic"}, "dynamic"),
        ({"rope.dimension_count": 4}, "dimension_count"),
        ({"blk.0.attn_extra.weight": np.ones((4, 4), np.float32)}, "blk.0.attn_extra"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, "rope_freqs"),
        ({"rope_freqs.weight": np.zeros(4, np.float32)}, "rope_freqs"),
    ],
)
def test_refusals(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", make_peer("llama", tmp_path / "folder"), extra)
    with pytest.raises(ModelError, match=message):
        load_model(open_checkpoint(tmp_path / "model.gguf"), ReferenceOps(), 64)


def test_unknown_architecture(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "mamba", make_peer("llama", tmp_path / "folder"), {})
    with pytest.raises(ModelError, match=r"mamba.*gemma3,.* llama, olmoe, phi3"):
        load_arch(open_checkpoint(tmp_path / "model.gguf"))
