"""From GGUF metadata to `Arch`. Torch-free.

GGUF says less than config.json: some facts are in which tensors exist (a tied head, biases) and some only in
llama.cpp's code (Gemma's window pattern, SmolLM3's layers without positions). Both kinds are written down here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twostroke.errors import ModelError
from twostroke.model.arch import Arch, DenseArch, FeedArch, GroupedArch, LayerArch, Rope
from twostroke.model.compressed_gguf import compressed_fields
from twostroke.model.experts import gguf_feeds
from twostroke.model.families import Reach, deepseek_v4, grouped_layers
from twostroke.model.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, Fields
from twostroke.model.latent import LatentArch
from twostroke.model.rope import divided, latent_scale, make_rope, plain_frequencies
from twostroke.ops.interface import Activation
from twostroke.record import Record

Values = Callable[[str], Sequence[float]]  # the numbers of a small tensor


class Gguf(Record):
    """What a family function may look at."""

    keys: Fields  # metadata under the architecture's prefix
    shapes: Mapping[str, tuple[int, ...]]
    values: Values


def arch_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], values: Values, where: str = "GGUF metadata"
) -> Arch:
    """shapes: every tensor's shape in torch order; values: reads a small tensor (rotary factors)."""
    family = Fields(metadata, where).text("general.architecture")
    make = _FAMILIES.get(family)
    if make is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelError(f"{where}: general.architecture {family!r:.80} is not known; known: {known}.")
    keys = Fields(metadata, where, f"{family}.")
    if family not in _MIXTURES:
        keys.only("expert_count", 0)
    return make(Gguf(keys, shapes, values))


def _llama(g: Gguf) -> Arch:
    """Llama, Mistral, Mixtral and SmolLM2: converters write all of them as `llama`."""
    window, count = g.keys.integer("attention.sliding_window", 0, least=0, most=MAX_POSITIONS), _layers(g)
    feeds = gguf_feeds(g.keys, g.shapes, count, normalised=True)
    return _arch(g, "llama", [Reach(window or None, _whole_head_rope(g))] * count, feeds=feeds)


def _olmoe(g: Gguf) -> Arch:
    g.keys.only("attention.clamp_kqv", 0.0)
    count = _layers(g)
    feeds = gguf_feeds(g.keys, g.shapes, count, normalised=False)
    return _arch(g, "olmoe", [Reach(None, _rope(g))] * count, feeds=feeds)


def _qwen3_moe(g: Gguf) -> Arch:
    g.keys.only("attention.sliding_window", 0)
    count = _layers(g)
    feeds = gguf_feeds(g.keys, g.shapes, count, normalised=True)
    return _arch(g, "qwen3_moe", [Reach(None, _rope(g))] * count, feeds=feeds)


def _smollm3(g: Gguf) -> Arch:
    rope = _whole_head_rope(g)
    return _arch(g, "smollm3", [Reach(None, None if (i + 1) % 4 == 0 else rope) for i in range(_layers(g))])


def _qwen(g: Gguf) -> Arch:
    g.keys.only("attention.sliding_window", 0)
    return _arch(g, g.keys.prefix[:-1], [Reach(None, _rope(g))] * _layers(g))


def _gemma3(g: Gguf) -> Arch:
    """Five windowed layers for each full one; a scaling of the rotation is for the full layers alone."""
    c, head_dim, count = g.keys, _head_dim(g), _layers(g)
    c.only("attn_logit_softcapping", 0.0)
    local = make_rope("default", c, c.number("rope.freq_base_swa", 10_000.0), head_dim, _positions(g))
    pattern = c.integer("attention.sliding_window_pattern", 6)
    window = c.integer("attention.sliding_window", most=MAX_POSITIONS)
    full = Reach(None, _rope(g, theta=1_000_000.0))
    hidden = _hidden(g)
    # The 27B model, the only one with 62 layers, divides by hidden / heads; no key says so.
    divisor = hidden / _heads(g) if count == 62 else head_dim
    return _arch(
        g,
        "gemma3",
        [Reach(window, local) if (i + 1) % pattern else full for i in range(count)],
        activation="gelu_tanh",
        out_norms=True,
        embedding_scale=float(hidden) ** 0.5,
        scale=float(divisor) ** -0.5,
        logit_softcap=c.number("final_logit_softcapping", 0.0),
    )


def _phi3(g: Gguf) -> Arch:
    """Divisors of the rotation come as tensors; which list is used follows rope.py's rule for longrope."""
    c, dim, positions = g.keys, _rotated(g), _positions(g)
    original = c.integer("rope.scaling.original_context_length", positions, most=MAX_POSITIONS)
    rope = make_rope("default", c, c.number("rope.freq_base", 10_000.0), dim, positions)
    name = f"rope_factors_{'long' if positions > original else 'short'}.weight"
    if name in g.shapes:
        rope = divided(rope.frequencies, _factors(g, name, dim), c.number("rope.scaling.attn_factor", 1.0))
    window = c.integer("attention.sliding_window", 0, least=0, most=MAX_POSITIONS)
    return _arch(g, "phi3", [Reach(window or None, rope)] * _layers(g))


def _deepseek(g: Gguf) -> Arch:
    """V2 and V3. Newer files describe the cached entry as one key head, and the heads under keys that end in _mla."""
    c = g.keys
    rope_dim = c.even("rope.dimension_count", 64, most=MAX_HEAD_DIM)
    whole = c.integer(
        "attention.key_length_mla" if c.has("attention.key_length_mla") else "attention.key_length", most=MAX_HEAD_DIM
    )
    if whole <= rope_dim:
        raise c.error("attention.key_length", f"is {whole}, not above the {rope_dim} rotated dimensions")
    value_key = "attention.value_length_mla" if c.has("attention.value_length_mla") else "attention.value_length"
    settings = _scaling(g)
    mixer = LatentArch(
        heads=_heads(g),
        latent=c.integer("attention.kv_lora_rank", most=MAX_HEAD_DIM),
        plain_dim=whole - rope_dim,
        rope_dim=rope_dim,
        value_dim=c.integer(value_key, most=MAX_HEAD_DIM),
        query_rank=c.integer("attention.q_lora_rank") if c.has("attention.q_lora_rank") else None,
        scale=latent_scale(_scaling_kind(g), settings, whole),
        rope=make_rope(_scaling_kind(g), settings, c.number("rope.freq_base", 10_000.0), rope_dim, _positions(g)),
        bias="blk.0.attn_kv_a_mqa.bias" in g.shapes,
    )
    all_dense = c.integer("leading_dense_block_count", 0, least=0) >= _layers(g)
    dense = [DenseArch(c.integer("feed_forward_length"))] * _layers(g)
    feeds = dense if all_dense else gguf_feeds(c, g.shapes, _layers(g), normalised=False)
    return Arch(
        family="deepseek_v3" if any(name.endswith("exp_probs_b.bias") for name in g.shapes) else "deepseek_v2",
        vocab=_vocab(g),
        hidden=_hidden(g),
        layers=tuple(LayerArch(mixer, feed) for feed in feeds),
        max_positions=_positions(g),
        norm_eps=c.number("attention.layer_norm_rms_epsilon", most=1.0),
        tied_head="output.weight" not in g.shapes,
    )


def _gpt_oss(g: Gguf) -> Arch:
    """Windows on every other layer, the first one included. The rotation's ramp is not rounded to whole pairs."""
    c, count = g.keys, _layers(g)
    settings = _scaling(g)
    settings.values = {**settings.values, "truncate": False}
    theta = c.number("rope.freq_base", 150_000.0)
    rope = make_rope(_scaling_kind(g), settings, theta, _rotated(g), _positions(g))
    window = c.integer("attention.sliding_window", 128, most=MAX_POSITIONS)
    reaches = [Reach(None if i % 2 else window, rope) for i in range(count)]
    feeds = gguf_feeds(c, g.shapes, count, normalised=True, activation="swiglu_oai")
    return _arch(g, "gpt_oss", reaches, feeds=feeds)


def _deepseek_v4(g: Gguf) -> Arch:
    """Rotations are scaled in layers with entries alone. The layers may count those that predict further tokens."""
    scaling = {key: value for key, value in _scaling(g).values.items() if value is not None}
    count, further = _layers(g), g.keys.integer("nextn_predict_layers", 0, least=0, most=MAX_LAYERS)
    if further < count and f"blk.{count - further}.nextn.eh_proj.weight" in g.shapes:
        count -= further
    found = {
        "vocab_size": _vocab(g),
        "num_hidden_layers": count,
        "rope_scaling": {**scaling, "rope_type": _scaling_kind(g)},
    }
    return deepseek_v4(compressed_fields(g.keys, found))


_MIXTURES = (
    "llama",
    "olmoe",
    "qwen3moe",
    "deepseek2",
    "deepseek4",
    "gpt-oss",
)  # families that read the keys of experts
_FAMILIES: dict[str, Callable[[Gguf], Arch]] = {
    "llama": _llama,
    "smollm3": _smollm3,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "deepseek2": _deepseek,
    "deepseek4": _deepseek_v4,
    "gpt-oss": _gpt_oss,
    "olmoe": _olmoe,
    "qwen3moe": _qwen3_moe,
}


# ---- what the families share -------------------------------------------------------------------------------------


def _arch(
    g: Gguf,
    family: str,
    reaches: Sequence[Reach],
    *,
    feeds: Sequence[FeedArch] | None = None,
    activation: Activation = "silu",
    out_norms: bool = False,
    embedding_scale: float = 1.0,
    logit_softcap: float = 0.0,
    scale: float | None = None,
) -> Arch:
    c, heads, head_dim = g.keys, _heads(g), _head_dim(g)
    if c.integer("attention.value_length", head_dim, most=MAX_HEAD_DIM) != head_dim:
        raise c.error("attention.value_length", f"differs from the key length, {head_dim}; that is not supported")
    normed = g.shapes.get("blk.0.attn_q_norm.weight")
    mixer = GroupedArch(
        heads,
        c.integer("attention.head_count_kv", heads, most=MAX_HEADS),
        head_dim,
        scale=scale,
        qk_norm=normed is not None and family != "olmoe",
        wide_qk_norm=normed is not None and family == "olmoe",
        qkv_bias="blk.0.attn_q.bias" in g.shapes or "blk.0.attn_qkv.bias" in g.shapes,
        output_bias="blk.0.attn_output.bias" in g.shapes,
        sinks="blk.0.attn_sinks.weight" in g.shapes,
    )
    if feeds is None:
        feeds = [DenseArch(c.integer("feed_forward_length"), activation)] * len(reaches)
    return Arch(
        family=family,
        vocab=_vocab(g),
        hidden=_hidden(g),
        layers=grouped_layers(mixer, feeds, reaches, c, out_norms),
        max_positions=_positions(g),
        norm_eps=c.number("attention.layer_norm_rms_epsilon", most=1.0),
        embedding_scale=embedding_scale,
        logit_softcap=logit_softcap,
        tied_head="output.weight" not in g.shapes,
    )


def _vocab(g: Gguf) -> int:
    shape = g.shapes.get("token_embd.weight", ())
    if len(shape) != 2 or not 1 <= shape[0] <= MAX_VOCAB:
        raise ModelError(f"{g.keys.where}: token_embd.weight is missing or has the odd shape {shape}.")
    return shape[0]


def _hidden(g: Gguf) -> int:
    return g.keys.integer("embedding_length")


def _heads(g: Gguf) -> int:
    return g.keys.integer("attention.head_count", most=MAX_HEADS)


def _layers(g: Gguf) -> int:
    return g.keys.integer("block_count", most=MAX_LAYERS)


def _positions(g: Gguf) -> int:
    return g.keys.integer("context_length", most=MAX_POSITIONS)


def _head_dim(g: Gguf) -> int:
    return g.keys.even("attention.key_length", _hidden(g) // _heads(g), most=MAX_HEAD_DIM)


def _rotated(g: Gguf) -> int:
    return g.keys.even("rope.dimension_count", _head_dim(g), most=_head_dim(g))


def _factors(g: Gguf, name: str, dim: int) -> tuple[float, ...]:
    if g.shapes[name] != (dim // 2,):
        raise ModelError(f"{g.keys.where}: {name} has shape {g.shapes[name]}, expected ({dim // 2},).")
    found = tuple(float(v) for v in g.values(name))
    if not all(0 < v < float("inf") for v in found):
        raise ModelError(f"{g.keys.where}: {name} must hold finite numbers above 0.")
    return found


def _rope(g: Gguf, theta: float = 10_000.0) -> Rope:
    """`rope_freqs.weight`, where present, holds one divisor for each pair: Llama 3's scaling, worked out by the
    converter. Other kinds of scaling are keys."""
    c, dim = g.keys, _rotated(g)
    theta = c.number("rope.freq_base", theta)
    if "rope_freqs.weight" in g.shapes:
        c.only("rope.scaling.type", "none", "llama3")
        return divided(plain_frequencies(theta, dim), _factors(g, "rope_freqs.weight", dim))
    return make_rope(_scaling_kind(g), _scaling(g), theta, dim, _positions(g))


def _scaling_kind(g: Gguf) -> str:
    kind = g.keys.text("rope.scaling.type", "none")
    return "default" if kind == "none" else kind


def _scaling(g: Gguf) -> Fields:
    """The keys of a scaling under transformers' names. A log multiplier is a tenth of YaRN's mscale_all_dim; such files
    say nothing of mscale, and their cos and sin are not multiplied."""
    c = g.keys
    found = {
        "factor": c.get("rope.scaling.factor"),
        "original_max_position_embeddings": c.get("rope.scaling.original_context_length"),
        "attention_factor": c.get("rope.scaling.attn_factor"),
        "beta_fast": c.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": c.get("rope.scaling.yarn_beta_slow"),
    }
    if c.has("rope.scaling.yarn_log_multiplier"):
        weight = 10 * c.number("rope.scaling.yarn_log_multiplier")
        found |= {"mscale": weight, "mscale_all_dim": weight}
    return Fields(found, f"{c.where}: {c.prefix}rope.scaling")


def _whole_head_rope(g: Gguf) -> Rope:
    """Families whose heads are stored for rotating neighbours; they are re-ordered on load, which needs whole heads."""
    if _rotated(g) != _head_dim(g):
        raise g.keys.error("rope.dimension_count", f"must equal the head size, {_head_dim(g)}, in this family")
    return _rope(g)
