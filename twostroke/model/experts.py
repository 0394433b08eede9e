"""The experts that a checkpoint's description declares: from config.json or GGUF keys to feeds. Torch-free.

Every rule of choosing is data (`ops.interface.Routing`); a family says which keys hold the numbers and which rule its
code applies. The functions are for the families in families.py and families_gguf.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from twostroke.model.arch import DenseArch, ExpertsArch, FeedArch
from twostroke.model.fields import MAX_LAYERS, Fields
from twostroke.ops.interface import Activation, Routing
from twostroke.record import replace

MAX_EXPERTS = 1 << 14


def qwen3_moe_feeds(c: Fields, count: int) -> list[FeedArch]:
    """Experts on every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    routing = _routing(c, _experts(c, "num_experts", "num_local_experts"), normalised=c.flag("norm_topk_prob", False))
    sparse = ExpertsArch(routing, c.integer("moe_intermediate_size"))
    step, dense_layers = c.integer("decoder_sparse_step", 1, most=MAX_LAYERS), c.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or not all(type(layer) is int for layer in dense_layers):
        raise c.error("mlp_only_layers", "must be a list of layer numbers")
    dense = DenseArch(c.integer("intermediate_size"))
    return [dense if i in dense_layers or (i + 1) % step else sparse for i in range(count)]


def mixtral_feeds(c: Fields, count: int) -> list[FeedArch]:
    routing = _routing(c, _experts(c, "num_local_experts", "num_experts"), normalised=True)
    return [ExpertsArch(routing, c.integer("intermediate_size"))] * count


def olmoe_feeds(c: Fields, count: int) -> list[FeedArch]:
    routing = _routing(c, _experts(c, "num_experts", "num_local_experts"), normalised=c.flag("norm_topk_prob", False))
    return [ExpertsArch(routing, c.integer("intermediate_size"))] * count


def gpt_oss_feeds(c: Fields, count: int) -> list[FeedArch]:
    """The softmax is over the chosen alone, which is the softmax over all, divided by the sum of the chosen."""
    c.only("swiglu_alpha", 1.702)
    c.only("swiglu_limit", 7.0, 7)
    experts = _experts(c, "num_local_experts", "num_experts")
    width = c.integer("intermediate_size")
    feed = ExpertsArch(_routing(c, experts, normalised=True), width, "swiglu_oai", router_bias=True, expert_bias=True)
    return [feed] * count


def deepseek_v2_feeds(c: Fields, count: int) -> list[FeedArch]:
    """Softmax scores; with `group_limited_greedy` a group counts as its best expert. Weights are never normalised."""
    c.only("norm_topk_prob", False)
    c.only("scoring_func", "softmax")
    method = c.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise c.error("topk_method", f"is {method!r:.80}; supported are greedy and group_limited_greedy")
    groups = (1, 1) if method == "greedy" else _groups(c)
    return _deepseek(c, count, _routing(c, _experts(c, "n_routed_experts"), factor=_factor(c, 1.0), groups=groups))


def deepseek_v3_feeds(c: Fields, count: int) -> list[FeedArch]:
    """Sigmoid scores; a learnt number for each expert takes part in the choice; a group counts as its two best."""
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    routing = _routing(
        c,
        _experts(c, "n_routed_experts"),
        scores="sigmoid",
        normalised=c.flag("norm_topk_prob", True),
        factor=_factor(c, 2.5),
        groups=_groups(c),
        group_best=2,
    )
    return _deepseek(c, count, routing, corrected=True)


def deepseek_v4_feeds(c: Fields, count: int) -> list[FeedArch]:
    """Scores are √softplus; the first layers have a table that names the experts of each token."""
    c.only("scoring_func", "sqrtsoftplus")
    c.only("norm_topk_prob", True)
    c.only("swiglu_limit", 10.0, 10)
    c.only("n_shared_experts", 1)
    routing = _routing(
        c, _experts(c, "n_routed_experts"), scores="sqrt_softplus", normalised=True, factor=_factor(c, 1.5)
    )
    width = c.integer("moe_intermediate_size")
    sparse = ExpertsArch(routing, width, "swiglu_10", shared=width, corrected=True)
    by_token = replace(sparse, corrected=False, by_token=True)
    given = c.get("mlp_layer_types")
    if given is None:
        first = c.integer("num_hash_layers", 3, least=0, most=MAX_LAYERS)
        return [by_token if i < first else sparse for i in range(count)]
    kinds = {"hash_moe": by_token, "moe": sparse}
    if not isinstance(given, list) or len(given) != count or any(kind not in tuple(kinds) for kind in given):
        raise c.error("mlp_layer_types", f"must be a list of {count} entries, each hash_moe or moe")
    return [kinds[kind] for kind in given]


def gguf_feeds(
    c: Fields, tensors: Collection[str], count: int, *, normalised: bool, activation: Activation = "silu"
) -> list[FeedArch]:
    """Layers with a router have experts. normalised: what llama.cpp's code does where no key says it."""
    layers = [f"blk.{i}." for i in range(count)]
    if not c.get("expert_count"):
        return [DenseArch(c.integer("feed_forward_length"))] * count
    first = next((stem for stem in layers if f"{stem}ffn_gate_inp.weight" in tensors), None)
    if first is None:
        raise c.error("expert_count", f"is {c.get('expert_count')!r:.80}, but no layer has a router (ffn_gate_inp)")
    corrected = f"{first}exp_probs_b.bias" in tensors
    gating = c.integer("expert_gating_func", 2 if corrected else 1)  # some files of DeepSeek V3 do not say it
    if gating not in (1, 2, 3):
        raise c.error(
            "expert_gating_func", f"is {gating}; supported are 1 (softmax), 2 (sigmoid), 3 (softmax of the chosen)"
        )
    groups = c.integer("expert_group_count", 1, most=MAX_EXPERTS)
    routing = _routing(
        c,
        c.integer("expert_count", most=MAX_EXPERTS),
        "expert_used_count",
        scores="sigmoid" if gating == 2 else "softmax",
        normalised=gating == 3 or c.flag("expert_weights_norm", normalised),
        factor=c.number("expert_weights_scale", 1.0),
        groups=(groups, c.integer("expert_group_used_count", groups, most=groups)),
        group_best=2 if gating == 2 else 1,  # DeepSeek V3 and V2
    )
    width = c.integer("expert_feed_forward_length", c.integer("feed_forward_length"))
    shared = c.integer("expert_shared_count", 0, least=0, most=MAX_EXPERTS) * width
    sparse = ExpertsArch(
        routing,
        width,
        activation,
        shared=shared if f"{first}ffn_gate_shexp.weight" in tensors else 0,
        corrected=corrected,
        router_bias=f"{first}ffn_gate_inp.bias" in tensors,
        expert_bias=f"{first}ffn_gate_exps.bias" in tensors,
    )
    dense = [stem for stem in layers if f"{stem}ffn_gate_inp.weight" not in tensors]
    plain = DenseArch(c.integer("feed_forward_length")) if dense else sparse
    return [plain if stem in dense else sparse for stem in layers]


# ---- what they share ---------------------------------------------------------------------------------------------


def _experts(c: Fields, *keys: str) -> int:
    """The number of experts, under the first of these names that the file has."""
    key = next((key for key in keys if c.has(key)), keys[0])
    return c.integer(key, most=MAX_EXPERTS)


def _routing(
    c: Fields,
    experts: int,
    key: str = "num_experts_per_tok",
    *,
    scores: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax",
    normalised: bool = False,
    factor: float = 1.0,
    groups: Sequence[int] = (1, 1),
    group_best: int = 1,
) -> Routing:
    chosen = c.integer(key, most=MAX_EXPERTS)
    if chosen > experts:
        raise c.error(key, f"is {chosen}, but there are {experts} experts")
    count, kept = groups
    if experts % count:
        raise c.error("n_group", f"is {count}, which does not divide {experts} experts")
    if kept > count:
        raise c.error("topk_group", f"is {kept}, but there are {count} groups")
    size = experts // count
    if chosen > kept * size:
        raise c.error(key, f"is {chosen}, but the {kept} kept groups have {kept * size} experts")
    if group_best > size:
        raise c.error("n_group", f"is {count}: groups of {size} experts have no {group_best} best")
    if count == 1:
        group_best = 1
    return Routing(experts, chosen, scores, normalised, factor, count, kept, group_best)


def _groups(c: Fields) -> tuple[int, int]:
    return c.integer("n_group", 1, most=MAX_EXPERTS), c.integer("topk_group", 1, most=MAX_EXPERTS)


def _factor(c: Fields, default: float) -> float:
    return c.number("routed_scaling_factor", default)


def _deepseek(c: Fields, count: int, routing: Routing, corrected: bool = False) -> list[FeedArch]:
    """The first layers dense, then experts with one that every token uses: it is `n_shared_experts` wide ones."""
    c.only("moe_layer_freq", 1)
    width = c.integer("moe_intermediate_size")
    shared = c.integer("n_shared_experts", 1, least=0, most=MAX_EXPERTS) * width
    sparse = ExpertsArch(routing, width, shared=shared, corrected=corrected)
    first = c.integer("first_k_dense_replace", 0, least=0, most=MAX_LAYERS)
    dense = DenseArch(c.integer("intermediate_size"))
    return [dense if i < first else sparse for i in range(count)]
