"""DeepSeek V4: the same logits as transformers, across the borders of blocks, windows and entries."""

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
from tests.model.test_parity import tokens_of
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.model.roofline import lasting_bytes, window_bytes
from twostroke.errors import ModelError
from twostroke.kv.layout import make_layout
from twostroke.model.document import arch_document, read_arch
from twostroke.model.transformer import Transformer
from twostroke.ops.cpu.backend import NativeCpuOps, instruction_sets
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.record import replace
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_arch, load_model

SPARSE, HEAVY, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "index_n_heads": 16,  # with few heads several entries have a score of exactly 0, and transformers breaks no ties
    "index_head_dim": 16,
    "index_topk": 4,
    "compress_rates": {SPARSE: 4, HEAVY: 16},
    "layer_types": [SLIDING, HEAVY, SPARSE, HEAVY],
    "qk_rope_head_dim": 8,
    "num_hash_layers": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# The published sizes of window and entries; two layers choose entries, one of them in a layer after another.
PUBLISHED: dict[str, Any] = {
    "sliding_window": 128,
    "compress_rates": {SPARSE: 4, HEAVY: 128},
    "layer_types": [HEAVY, SPARSE, SPARSE],
    "num_hidden_layers": 3,
    "num_hash_layers": 2,
    "index_topk": 12,
    "hc_mult": 3,
}
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "small": ({}, (3, 4, 5, 16, 17, 70)),
    "yarn": ({"rope_parameters": YARN, "layer_types": [SPARSE, SLIDING, HEAVY, SPARSE]}, (37,)),
    "published": (PUBLISHED, (130, 263)),
}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make_peer(folder: Path, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model, saved to `folder`. What starts as ones and zeros is made to count."""
    torch.manual_seed(seed)
    config = transformers.DeepseekV4Config(**{**SHAPE, **changes})
    peer = transformers.DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager")
    for name, parameter in peer.named_parameters():
        if any(part in name for part in ("norm", "bias", "sinks", "base", "scale")):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    for name, buffer in peer.named_buffers():
        if name.endswith("tid2eid"):
            rows = [torch.randperm(config.n_routed_experts)[: buffer.shape[1]] for _ in range(len(buffer))]
            buffer.copy_(torch.stack(rows))
        elif name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.1)
    peer.save_pretrained(folder)
    return peer.eval()


def load(folder: Path, ops: Any = None) -> Transformer:
    return load_model(open_checkpoint(folder), ops or ReferenceOps(), 512)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    changes, lengths = CASES[case]
    peer = make_peer(tmp_path, **changes)
    model = load(tmp_path, NativeCpuOps(2, weights="float32"))
    for length in lengths:
        tokens = tokens_of(length)
        expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
        assert expected.std() > 0.3  # the comparison means something
        whole = run_tokens(model, tokens)
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
        chunks = [7, length - 8, 1] if length > 8 else [1] * length
        assert torch.equal(run_tokens(model, tokens, chunks), whole)


def test_cached_decode_equals_transformers(tmp_path: Path) -> None:
    peer = make_peer(tmp_path)
    model, tokens = load(tmp_path, NativeCpuOps(2, weights="float32")), tokens_of(40)
    step = peer(torch.tensor([tokens[:13]]), use_cache=True)
    rows = [step.logits[0]]
    for token in tokens[13:]:
        step = peer(torch.tensor([[token]]), past_key_values=step.past_key_values, use_cache=True)
        rows.append(step.logits[0])
    mine = run_tokens(model, tokens, [13] + [1] * 27)
    torch.testing.assert_close(mine, torch.cat(rows), atol=1e-4, rtol=0)


def test_a_description_survives_its_document_and_counts_its_weights(tmp_path: Path) -> None:
    peer = make_peer(tmp_path)
    arch = load_arch(open_checkpoint(tmp_path))
    again = read_arch(json.loads(json.dumps(arch_document(arch))))
    assert again == replace(arch, layers=arch.with_mixers(rope=None).layers)
    assert arch.parameters == sum(parameter.numel() for parameter in peer.parameters()) + 3 * 8  # its corrections


def test_names_of_published_checkpoints(tmp_path: Path) -> None:
    """DeepSeek's own: no prefix, and layers that predict further tokens, which are left out."""
    make_peer(tmp_path)
    tokens = tokens_of(20)
    expected = run_tokens(load(tmp_path, NativeCpuOps(2)), tokens)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("model.").replace("hc_head.hc_", "hc_head_"): t for name, t in tensors.items()}
    renamed = {name.replace(".attn.norm.", ".attn.kv_norm."): t for name, t in renamed.items()}
    renamed["embed.weight"] = renamed.pop("embed_tokens.weight")
    renamed |= {"mtp.0.norm.weight": torch.ones(48), "layers.4.attn_norm.weight": torch.ones(48)}
    safetensors.torch.save_file(renamed, tmp_path / "model.safetensors")
    assert torch.equal(run_tokens(load(tmp_path, NativeCpuOps(2)), tokens), expected)
    renamed["layers.0.ffn.gate.tid2eid"][5, 1] = 8
    safetensors.torch.save_file(renamed, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="tid2eid names experts outside 0 to 7"):
        load(tmp_path)
    del renamed["layers.2.attn.indexer.wq_b.weight"]
    safetensors.torch.save_file(renamed, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.2\.attn\.indexer\.wq_b\.weight is missing"):
        load(tmp_path)


def test_what_flash_costs() -> None:
    """DeepSeek-V4-Flash: 284 billion weights, 3.7 kB a token in fp8, 17 MB a request in windows."""
    arch = known_arch("deepseek-v4-flash")
    assert arch is not None and 284e9 < arch.parameters < 285e9 and 13e9 < arch.used_weights < 14e9
    layout = make_layout(arch, "fp8")
    assert 3_650 < lasting_bytes(layout) < 3_750 and 16e6 < window_bytes(layout) < 18e6
    assert layout.blocks_for(1 << 20, 512) * layout.block_bytes < 2 * (1 << 20) * lasting_bytes(layout)
    long, longer = (make_layout(arch, "bfloat16").read_bytes(context) for context in (1 << 17, 1 << 18))
    assert longer - long < (1 << 17) * 1_600  # of more context a token reads index keys and the entries of HCA
    assert arch.attention_flops(1 << 17, 1) < arch.linear_flops(1, 1)


def test_every_instruction_set_and_number_of_threads_gives_the_same_bits(tmp_path: Path) -> None:
    make_peer(tmp_path)
    tokens = tokens_of(50)
    first = run_tokens(load(tmp_path, NativeCpuOps(2)), tokens, [30, 20], "float16")
    for isa in instruction_sets():
        assert torch.equal(run_tokens(load(tmp_path, NativeCpuOps(1, isa=isa)), tokens, [49, 1], "float16"), first)


def test_the_specification_agrees(tmp_path: Path) -> None:
    make_peer(tmp_path)
    tokens = tokens_of(37)
    for kv_format, tolerance in (("float32", 1e-4), ("float16", 2e-2), ("bfloat16", 1e-1)):  # rounded otherwise
        fast = run_tokens(load(tmp_path, NativeCpuOps(2, weights="float32")), tokens, [16, 20, 1], kv_format)
        exact = run_tokens(load(tmp_path), tokens, None, kv_format)
        torch.testing.assert_close(exact, fast, atol=tolerance, rtol=0)
