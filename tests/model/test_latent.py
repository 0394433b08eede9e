"""Latent attention (MLA): the same logits as transformers, from tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers import run_tokens
from tests.model.test_parity import SHAPE, YARN, load, tokens_of
from twostroke.model.transformer import Transformer
from twostroke.ops.cpu.backend import NativeCpuOps, instruction_sets
from twostroke.ops.cpu.library import available
from twostroke.ops.reference.backend import ReferenceOps

MLA: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 3,
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
LOUD = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
STEP = {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # a ramp of no width
# name -> (config class, what differs)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", {}),
    "v2 lite": ("DeepseekV2", {"q_lora_rank": None, "rope_parameters": LOUD}),
    "v3": ("DeepseekV3", {}),
    "v3 yarn": ("DeepseekV3", {"rope_parameters": LOUD, "kv_lora_rank": 40, "qk_nope_head_dim": 16}),
    "v3 yarn, one mscale": ("DeepseekV3", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}),
    "v3 halves": ("DeepseekV3", {"rope_interleave": False, "tie_word_embeddings": True}),
    "v3 biases": ("DeepseekV3", {"attention_bias": True}),
    "v2 experts": ("DeepseekV2", {**EXPERTS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7}),
    "v2 lite experts": ("DeepseekV2", {**EXPERTS, "q_lora_rank": None, "n_shared_experts": 2, "n_group": 1}),
    "v3 experts": ("DeepseekV3", EXPERTS),
    "moonlight": (
        "DeepseekV3",
        {**EXPERTS, "q_lora_rank": None, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    ),
    "kimi": ("DeepseekV3", {**EXPERTS, "n_group": 1, "topk_group": 1, "rope_parameters": STEP}),
    "v3 biases, direct q": ("DeepseekV3", {"attention_bias": True, "q_lora_rank": None}),
}
LENGTHS = (9, 17, 150)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make_peer(family: str, folder: Path, **more: Any) -> Any:
    """A random transformers model, saved to `folder`."""
    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **MLA, **changes, **more})
    peer = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager")
    for name, parameter in peer.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    for name, buffer in peer.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.2)
    peer.save_pretrained(folder)
    return peer.eval()


def cached_logits(peer: Any, tokens: list[int], start: int) -> torch.Tensor:
    """transformers' logits from `start` on, one token at a time over its cache."""
    cache = peer(torch.tensor([tokens[:start]]), use_cache=True).past_key_values
    rows = []
    for token in tokens[start:]:
        out = peer(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0])
    return torch.cat(rows)


def check_parity(peer: Any, model: Transformer, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Whole, in chunks, and one token at a time over the cache of transformers."""
    for length in lengths:
        tokens = tokens_of(length)
        expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
        assert expected.std() > 0.3  # the comparison means something
        whole = run_tokens(model, tokens)
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
        assert torch.equal(run_tokens(model, tokens, [7, length - 8, 1]), whole)
    torch.testing.assert_close(whole[-5:], cached_logits(peer, tokens, len(tokens) - 5), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    peer = make_peer(family, tmp_path)
    check_parity(peer, load(tmp_path, ReferenceOps()))


@pytest.mark.skipif(not available(), reason="the native library is not built")
@pytest.mark.parametrize("family", ["v2 lite", "v3", "v3 yarn", "v3 experts", "moonlight", "v3 biases, direct q"])
def test_native_kernels_agree(family: str, tmp_path: Path) -> None:
    """On every instruction set of this machine the same bits, and those of transformers within rounding."""
    peer = make_peer(family, tmp_path)
    tokens = tokens_of(150)
    expected = peer(torch.tensor([tokens]), use_cache=False).logits[0]
    whole = [run_tokens(load(tmp_path, NativeCpuOps(2, "float32", isa)), tokens) for isa in instruction_sets()]
    torch.testing.assert_close(whole[0], expected, atol=1e-4, rtol=0)
    assert all(torch.equal(other, whole[0]) for other in whole[1:])
