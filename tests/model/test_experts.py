"""Experts in checkpoints: other layouts of the same weights, routers of every family, absurd descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from tests.helpers import run_tokens
from tests.model.test_gguf_parity import write_gguf
from tests.model.test_parity import MIXTURES, SHAPE, load, make_peer, rewrite, tokens_of
from tests.published import code_experts
from twostroke.errors import ModelError
from twostroke.model.arch import Arch, ExpertsArch, GroupedArch, LayerArch
from twostroke.model.document import arch_document, read_arch
from twostroke.model.expert_names import expert_sources
from twostroke.model.experts import deepseek_v2_feeds, deepseek_v3_feeds, gguf_feeds, gpt_oss_feeds
from twostroke.model.families import arch_from_config
from twostroke.model.fields import Fields
from twostroke.model.source import Source
from twostroke.ops.formats import Stored, dequantize
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.record import replace
from twostroke.weights.checkpoint import Checkpoint, open_checkpoint
from twostroke.weights.load import Parameters, _feed, load_arch, load_model

QWEN = {**SHAPE, "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
QWEN |= {"moe_intermediate_size": 32}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 96}
DEEPSEEK |= {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_stacked_experts_mean_the_same(family: str, tmp_path: Path) -> None:
    """As transformers 5 holds them in memory."""
    peer = make_peer(family, tmp_path)
    tokens = tokens_of(20)
    expected = run_tokens(load(tmp_path), tokens)

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        for name, value in peer.state_dict().items():
            if ".experts." in name:
                tensors[name] = value.clone()

    rewrite(tmp_path, stack)
    assert torch.equal(run_tokens(load(tmp_path), tokens), expected)


def test_stacked_gate_and_up_in_gguf(tmp_path: Path) -> None:
    peer = make_peer("olmoe", tmp_path / "folder")
    tokens = tokens_of(20)
    write_gguf(tmp_path / "model.gguf", "olmoe", peer, {})
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    expected = run_tokens(load_model(checkpoint, ReferenceOps(), 64), tokens)
    tensors = dict(checkpoint.tensors)
    for layer in range(3):
        gate, up = (tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        both = np.concatenate([dequantize(gate), dequantize(up)], axis=1)
        name = f"blk.{layer}.ffn_gate_up_exps.weight"
        tensors[name] = Stored("F32", both.shape, both.reshape(-1).view(np.uint8))
    again = Checkpoint("gguf", checkpoint.path, checkpoint.config, tensors)
    assert torch.equal(run_tokens(load_model(again, ReferenceOps(), 64), tokens), expected)


def test_quantized_experts_of_gguf(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 32}
    peer = make_peer("qwen3_moe", tmp_path / "folder", **shape)
    write_gguf(tmp_path / "model.gguf", "qwen3moe", peer, {}, quantized=True)
    for parameter in peer.parameters():
        if parameter.ndim >= 2:
            packed = gguf.quants.quantize(parameter.numpy(), gguf.GGMLQuantizationType.Q8_0)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)))
    tokens = tokens_of(30)
    got = run_tokens(load_model(open_checkpoint(tmp_path / "model.gguf"), ReferenceOps(), 64), tokens)
    torch.testing.assert_close(got, peer(torch.tensor([tokens])).logits[0], atol=1e-4, rtol=0)


# ---- feeds of families whose attention is described elsewhere -----------------------------------------------------


class Part(Parameters):
    """The parameters of one layer's feed."""

    def __init__(self, checkpoint: Checkpoint, feed: ExpertsArch, stem: str, hidden: int):
        sources = expert_sources(hidden, feed, False, stem, checkpoint.tensors.keys())
        self.sources = {f"feed.{name}": source for name, source in sources.items()}
        self.sources["feed.feed_norm"] = Source(f"{stem}post_attention_layernorm.weight", (hidden,))
        layer = LayerArch(GroupedArch(4, 2, 16), feed)
        self.arch = Arch("feed", 128, hidden, (layer,), 64, 1e-6)
        self.ops, self.progress, self.bits, self.share = ReferenceOps(), None, None, None
        self.tensors, self.where, self.done, self.total = checkpoint.tensors, "feed", 0, 1
        for name in {source.tensor for source in self.sources.values()}:
            assert name in self.tensors
        self._check_shapes()


def feed_of(folder: Path, feed: ExpertsArch, layer: int) -> Any:
    checkpoint = open_checkpoint(folder)
    part = Part(checkpoint, feed, f"model.layers.{layer}.", 64)
    return lambda x: (
        _feed(part, part.arch.layers[0], "feed.").run(part.ops, x, torch.zeros(len(x), dtype=torch.int64)).inner
    )


def save_random(kind: str, folder: Path, **values: Any) -> Any:
    torch.manual_seed(3)
    shape = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(kind, **shape, **values)
    peer = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in [*peer.named_parameters(), *peer.named_buffers()]:
        if "mlp" in name or "norm" in name:
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    peer.save_pretrained(folder)
    return peer.eval()


@pytest.mark.parametrize(
    ("kind", "make", "changes"),
    [
        ("deepseek_v2", deepseek_v2_feeds, {"topk_method": "greedy", "routed_scaling_factor": 1.5}),
        ("deepseek_v2", deepseek_v2_feeds, {"topk_method": "group_limited_greedy", "num_experts_per_tok": 3}),
        ("deepseek_v3", deepseek_v3_feeds, {}),
        ("deepseek_v3", deepseek_v3_feeds, {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
    ],
)
def test_deepseek_feeds(kind: str, make: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    peer = save_random(kind, tmp_path, num_key_value_heads=4, **{**DEEPSEEK, **LATENT, **changes})
    config = json.loads((tmp_path / "config.json").read_text())
    dense, sparse = make(Fields(config, "config.json"), 2)
    assert dense.kind == "dense" and dense.width == 96
    assert sparse.shared == 64 and sparse.routing.factor == config["routed_scaling_factor"]
    x = torch.randn(40, 64)
    block = peer.model.layers[1]
    expected = block.mlp(block.post_attention_layernorm(x)[None])[0]
    torch.testing.assert_close(feed_of(tmp_path, sparse, 1)(x), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("coded", [False, True])
def test_gpt_oss_feeds(coded: bool, tmp_path: Path) -> None:
    shape = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 96, "head_dim": 16}
    peer = save_random("gpt_oss", tmp_path, num_key_value_heads=2, sliding_window=16, **shape)
    experts = peer.model.layers[1].mlp.experts
    if coded:
        for name, rounded in code_experts(tmp_path).items():
            if "layers.1." in name:
                getattr(experts, name.rsplit(".", 1)[1]).copy_(rounded)
    feed = gpt_oss_feeds(Fields(json.loads((tmp_path / "config.json").read_text()), "config.json"), 2)[1]
    x = 3 * torch.randn(30, 64)
    block = peer.model.layers[1]
    block.post_attention_layernorm.variance_epsilon = 1e-6
    expected = block.mlp(block.post_attention_layernorm(x)[None])[0][0]
    assert isinstance(feed, ExpertsArch)
    torch.testing.assert_close(feed_of(tmp_path, feed, 1)(x), expected, atol=1e-4, rtol=0)
    if coded:
        rewrite(
            tmp_path,
            lambda t: t.update(
                {"model.layers.1.mlp.experts.down_proj_scales": torch.ones(8, 64, 2, dtype=torch.uint8)}
            ),
        )
        with pytest.raises(ModelError, match=r"down_proj_scales has shape \(8, 64, 2\), expected \(8, 64, 3\)"):
            feed_of(tmp_path, feed, 1)
        rewrite(tmp_path, lambda t: t.update({"model.layers.1.mlp.experts.down_proj_scales": torch.ones(8, 64, 3)}))
        with pytest.raises(ModelError, match="down_proj_scales has dtype F32; it must hold bytes"):
            feed_of(tmp_path, feed, 1)


def test_gguf_feeds_of_deepseek() -> None:
    keys = {"expert_count": 8, "expert_used_count": 2, "feed_forward_length": 96, "expert_feed_forward_length": 32}
    keys |= {
        "expert_shared_count": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }
    keys |= {"expert_group_count": 4, "expert_group_used_count": 2}
    tensors = {f"blk.1.{name}" for name in ("ffn_gate_inp.weight", "exp_probs_b.bias", "ffn_gate_shexp.weight")}
    dense, sparse = gguf_feeds(Fields(keys, "file"), tensors, 2, normalised=False)
    expected = deepseek_v3_feeds(Fields({**DEEPSEEK, "routed_scaling_factor": 2.5}, "config.json"), 2)
    assert [dense, sparse] == expected


# ---- descriptions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts": 0}, "num_experts must lie between 1 and"),
        ({"num_experts": 10**9}, "num_experts must lie between 1 and"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must lie between 1 and"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_refused_descriptions(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        arch_from_config({**QWEN, **change})


@pytest.mark.parametrize(
    ("make", "change", "named"),
    [
        (deepseek_v3_feeds, {"n_group": 3}, "n_group is 3, which does not divide 8 experts"),
        (deepseek_v3_feeds, {"topk_group": 5}, "topk_group is 5, but there are 4 groups"),
        (deepseek_v3_feeds, {"num_experts_per_tok": 5}, "the 2 kept groups have 4 experts"),
        (deepseek_v3_feeds, {"n_group": 8, "topk_group": 8}, "groups of 1 experts have no 2 best"),
        (deepseek_v3_feeds, {"scoring_func": "softmax"}, "scoring_func"),
        (deepseek_v2_feeds, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (deepseek_v2_feeds, {"norm_topk_prob": True}, "norm_topk_prob"),
        (deepseek_v2_feeds, {"routed_scaling_factor": 0}, "routed_scaling_factor"),
    ],
)
def test_refused_routers(make: Any, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        make(Fields({**DEEPSEEK, "topk_method": None, **change}, "config.json"), 2)


def test_missing_and_odd_tensors(tmp_path: Path) -> None:
    make_peer("qwen3_moe", tmp_path)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    kept = safetensors.torch.load_file(tmp_path / "model.safetensors")[name]
    rewrite(tmp_path, lambda t: t.pop(name))
    with pytest.raises(ModelError, match=r"experts\.5\.up_proj\.weight is missing"):
        load(tmp_path)
    rewrite(tmp_path, lambda t: t.update({name: kept[:, 1:].contiguous()}))
    with pytest.raises(ModelError, match=r"experts\.5\.up_proj\.weight has shape"):
        load(tmp_path)
    rewrite(tmp_path, lambda t: t.update({name: kept, name.replace(".5.", ".8."): kept.clone()}))
    with pytest.raises(ModelError, match=r"experts\.8\.up_proj\.weight is left over"):
        load(tmp_path)


def test_a_gguf_file_without_routers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", make_peer("llama", tmp_path / "folder"), {"expert_count": 8})
    with pytest.raises(ModelError, match="expert_count is 8, but no layer has a router"):
        load_arch(open_checkpoint(tmp_path / "model.gguf"))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_description_survives_its_document(family: str, tmp_path: Path) -> None:
    peer = make_peer(family, tmp_path)
    arch = load_arch(open_checkpoint(tmp_path))
    again = read_arch(json.loads(json.dumps(arch_document(arch))))
    plain = replace(arch, layers=arch.with_mixers(rope=None).layers)
    assert again == plain
    assert arch.parameters == sum(parameter.numel() for parameter in peer.parameters())
