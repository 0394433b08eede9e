"""From config.json to `Arch`, one short function for each model family. Torch-free.

A setting that changes the mathematics is either carried into the Arch or refused; none is dropped in silence.
families_gguf.py does the same for GGUF metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from twostroke.errors import ModelError
from twostroke.model.arch import Arch, DenseArch, FeedArch, GroupedArch, LayerArch, Rope
from twostroke.model.compressed_config import compressed_mixers
from twostroke.model.experts import (
    deepseek_v2_feeds,
    deepseek_v3_feeds,
    deepseek_v4_feeds,
    gpt_oss_feeds,
    mixtral_feeds,
    olmoe_feeds,
    qwen3_moe_feeds,
)
from twostroke.model.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, Fields
from twostroke.model.latent import LatentArch
from twostroke.model.quantization import read_scheme
from twostroke.model.rope import latent_scale, make_rope
from twostroke.record import replace


class Reach(NamedTuple):
    """What differs between the attention layers of one model: how far a token sees, and its rotation."""

    window: int | None = None
    rope: Rope | None = None


FULL, SLIDING = "full_attention", "sliding_attention"
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def arch_from_config(config: Mapping[str, Any], where: str = "config.json") -> Arch:
    """The architecture that a transformers config describes; ModelError where it is unknown, absurd or unsupported."""
    fields = Fields(config, where)
    family = fields.text("model_type")
    make = _FAMILIES.get(family)
    if make is None:
        raise ModelError(f"{where}: model_type {family!r:.80} is not known; known: {', '.join(sorted(_FAMILIES))}.")
    read_scheme(fields)
    for key in _EXPERT_KEYS if family not in _MIXTURES else ():
        fields.only(key, 0)
    return make(fields)


def _llama(c: Fields) -> Arch:
    biased = c.flag("attention_bias", False)
    return _arch(c, "llama", [Reach(rope=_rope(c, 10_000.0))] * _layers(c), qkv_bias=biased, output_bias=biased)


def _smollm3(c: Fields) -> Arch:
    """Every fourth layer has no positions; windows, where asked for, are on exactly those layers."""
    rope, biased, count = _rope(c, 2_000_000.0), c.flag("attention_bias", False), _layers(c)
    interval = c.integer("no_rope_layer_interval", 4)
    rotated = _per_layer(c, "no_rope_layers", [int((i + 1) % interval != 0) for i in range(count)], (0, 1))
    window = _window(c) if c.flag("use_sliding_window", False) else None
    default = [SLIDING if window and not turns else FULL for turns in rotated]
    kinds = _per_layer(c, "layer_types", default, (FULL, SLIDING))
    layers = [
        Reach(_need_window(c, window) if kind == SLIDING else None, rope if turns else None)
        for kind, turns in zip(kinds, rotated, strict=True)
    ]
    return _arch(c, "smollm3", layers, qkv_bias=biased, output_bias=biased, tied=True)


def _mistral(c: Fields) -> Arch:
    c.only("layer_types")
    c.only("attention_bias", False)
    return _arch(c, "mistral", [Reach(_window(c), _rope(c, 10_000.0))] * _layers(c))


def _qwen2(c: Fields) -> Arch:
    return _arch(c, "qwen2", _qwen_layers(c), qkv_bias=True)


def _qwen3(c: Fields) -> Arch:
    biased = c.flag("attention_bias", False)
    head_dim = _head_dim(c, 128)
    layers = _qwen_layers(c, head_dim)
    return _arch(c, "qwen3", layers, qkv_bias=biased, output_bias=biased, qk_norm=True, head_dim=head_dim)


def _gemma3(c: Fields) -> Arch:
    """Norms on both sides, five windowed layers for each full one, a rotation of its own for each kind."""
    c.only("use_bidirectional_attention", False)
    c.only("attn_logit_softcapping")  # a key that Gemma 2 used
    head_dim, biased, count = _head_dim(c, 256), c.flag("attention_bias", False), _layers(c)
    pattern = c.integer("sliding_window_pattern", 6)
    default = [SLIDING if (i + 1) % pattern else FULL for i in range(count)]
    kinds = _per_layer(c, "layer_types", default, (FULL, SLIDING))
    kind_of = {
        SLIDING: Reach(_window(c, 4096), _gemma_rope(c, SLIDING, head_dim)),
        FULL: Reach(None, _gemma_rope(c, FULL, head_dim)),
    }
    return _arch(
        c,
        "gemma3",
        [kind_of[kind] for kind in kinds],
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        head_dim=head_dim,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        tied=True,
        out_norms=True,
        embedding_scale=float(_hidden(c)) ** 0.5,
        scale=c.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=c.number("final_logit_softcapping", 0.0),
    )


def _gemma3_with_vision(c: Fields) -> Arch:
    """The text half of a multimodal Gemma 3: its image layers are not loaded."""
    text = c.section("text_config")
    text.only("model_type", "gemma3_text")
    text.only("quantization_config")
    return _gemma3(text)


def _phi3(c: Fields) -> Arch:
    c.only("attention_bias", False)
    kind = _rope_kind(c)
    rope = _rope(c, 10_000.0, partial=True, kind="longrope" if kind in ("su", "yarn") else kind)
    return _arch(c, "phi3", [Reach(_window(c), rope)] * _layers(c))


def _deepseek_v2(c: Fields) -> Arch:
    return _deepseek(c, "deepseek_v2", deepseek_v2_feeds, interleaved=True)


def _deepseek_v3(c: Fields) -> Arch:
    """Moonlight and Kimi K2 are this family too."""
    return _deepseek(c, "deepseek_v3", deepseek_v3_feeds, interleaved=c.flag("rope_interleave", True))


def _kimi_with_vision(c: Fields) -> Arch:
    """The text half of Kimi K2.5: its image layers are not loaded. The head is described beside the text half."""
    text = c.section("text_config")
    text.only("model_type", "kimi_k2", "deepseek_v3")
    if c.has("tie_word_embeddings"):
        text.values = {**text.values, "tie_word_embeddings": c.get("tie_word_embeddings")}
    return _deepseek_v3(text)


def _deepseek(c: Fields, family: str, feeds: Callable[[Fields, int], list[FeedArch]], interleaved: bool) -> Arch:
    """Latent attention in all layers; the first ones have a dense feed, the others experts."""
    c.only("hidden_act", "silu")
    c.only("mlp_bias", False)
    heads, count = _heads(c), _layers(c)
    c.only("num_key_value_heads", heads)
    plain_dim = c.integer("qk_nope_head_dim", 128, most=MAX_HEAD_DIM)
    rope_dim = c.even("qk_rope_head_dim", 64, most=MAX_HEAD_DIM)
    mixer = LatentArch(
        heads=heads,
        latent=c.integer("kv_lora_rank", 512, most=MAX_HEAD_DIM),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=c.integer("v_head_dim", 128, most=MAX_HEAD_DIM),
        query_rank=c.integer("q_lora_rank") if c.has("q_lora_rank") else None,
        scale=latent_scale(_rope_kind(c), _rope_section(c), plain_dim + rope_dim),
        rope=_rope(c, 10_000.0, head_dim=rope_dim),
        interleaved=interleaved,
        bias=c.flag("attention_bias", False),
    )
    all_dense = c.integer("first_k_dense_replace", 0, least=0) >= count
    found = [DenseArch(c.integer("intermediate_size"))] * count if all_dense else feeds(c, count)
    return Arch(
        family=family,
        vocab=c.integer("vocab_size", most=MAX_VOCAB),
        hidden=_hidden(c),
        layers=tuple(LayerArch(mixer, feed) for feed in found),
        max_positions=_positions(c),
        norm_eps=c.number("rms_norm_eps", 1e-6, most=1.0),
        tied_head=c.flag("tie_word_embeddings", False),
    )


def deepseek_v4(c: Fields) -> Arch:
    """Compressed attention over several residual streams, experts in all layers."""
    c.only("hidden_act", "silu")
    for key in ("mlp_bias", "attention_bias", "tie_word_embeddings"):
        c.only(key, False)
    c.only("num_key_value_heads", 1)
    count, dim = _layers(c), c.even("head_dim", 512, most=MAX_HEAD_DIM)
    feeds = deepseek_v4_feeds(c, count)
    mixers = compressed_mixers(c, count, _heads(c), dim)
    return Arch(
        family="deepseek_v4",
        vocab=c.integer("vocab_size", most=MAX_VOCAB),
        hidden=_hidden(c),
        layers=tuple(LayerArch(mixer, feed) for mixer, feed in zip(mixers, feeds, strict=True)),
        max_positions=_positions(c),
        norm_eps=c.number("rms_norm_eps", 1e-6, most=1.0),
        streams=c.integer("hc_mult", 4, least=2, most=64),
        stream_rounds=c.integer("hc_sinkhorn_iters", 20, most=1024),
        stream_eps=c.number("hc_eps", 1e-6, most=1.0),
    )


def _gpt_oss(c: Fields) -> Arch:
    """A sink for each head, windows on every other layer, experts in all."""
    head_dim, biased, count = _head_dim(c, 64), c.flag("attention_bias", True), _layers(c)
    kinds = _per_layer(c, "layer_types", [FULL if i % 2 else SLIDING for i in range(count)], (FULL, SLIDING))
    window, rope = _window(c, 128), _rope(c, 150_000.0, head_dim=head_dim)
    layers = [Reach(_need_window(c, window) if kind == SLIDING else None, rope) for kind in kinds]
    feeds = gpt_oss_feeds(c, count)
    return _arch(c, "gpt_oss", layers, feeds=feeds, head_dim=head_dim, qkv_bias=biased, output_bias=biased, sinks=True)


def _qwen3_moe(c: Fields) -> Arch:
    biased, head_dim, count = c.flag("attention_bias", False), _head_dim(c, 128), _layers(c)
    c.only("use_sliding_window", False)
    reaches = [Reach(rope=_rope(c, 10_000.0, head_dim=head_dim))] * count
    feeds = qwen3_moe_feeds(c, count)
    return _arch(
        c, "qwen3_moe", reaches, feeds=feeds, qkv_bias=biased, output_bias=biased, qk_norm=True, head_dim=head_dim
    )


def _mixtral(c: Fields) -> Arch:
    count = _layers(c)
    reaches = [Reach(_window(c), _rope(c, 1_000_000.0))] * count
    return _arch(c, "mixtral", reaches, feeds=mixtral_feeds(c, count))


def _olmoe(c: Fields) -> Arch:
    """The norms of queries and keys are over all heads together."""
    c.only("clip_qkv")
    biased, count = c.flag("attention_bias", False), _layers(c)
    reaches = [Reach(rope=_rope(c, 10_000.0))] * count
    feeds = olmoe_feeds(c, count)
    return _arch(c, "olmoe", reaches, feeds=feeds, qkv_bias=biased, output_bias=biased, wide_qk_norm=True)


# families that read the keys of experts
_MIXTURES = (
    "qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "deepseek_v4", "gpt_oss",
)  # fmt: skip
_FAMILIES: dict[str, Callable[[Fields], Arch]] = {
    "llama": _llama,
    "smollm3": _smollm3,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3,
    "gemma3": _gemma3_with_vision,
    "phi3": _phi3,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "kimi_k25": _kimi_with_vision,
    "deepseek_v4": deepseek_v4,
    "gpt_oss": _gpt_oss,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
}


# ---- what the families share -------------------------------------------------------------------------------------


def _arch(
    c: Fields,
    family: str,
    reaches: Sequence[Reach],
    *,
    feeds: Sequence[FeedArch] | None = None,
    head_dim: int | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    tied: bool = False,
    out_norms: bool = False,
    embedding_scale: float = 1.0,
    logit_softcap: float = 0.0,
    **attention: Any,
) -> Arch:
    """feeds: of each layer; None: dense ones. attention: fields of GroupedArch that only some families set."""
    c.only(activation_key, activation)
    c.only("mlp_bias", False)
    heads = _heads(c)
    if feeds is None:
        dense = DenseArch(c.integer("intermediate_size"), "silu" if activation == "silu" else "gelu_tanh")
        feeds = [dense] * len(reaches)
    mixer = GroupedArch(
        heads, c.integer("num_key_value_heads", heads, most=MAX_HEADS), head_dim or _head_dim(c), **attention
    )
    return Arch(
        family=family,
        vocab=c.integer("vocab_size", most=MAX_VOCAB),
        hidden=_hidden(c),
        layers=grouped_layers(mixer, feeds, reaches, c, out_norms),
        max_positions=_positions(c),
        norm_eps=c.number("rms_norm_eps", 1e-6, most=1.0),
        embedding_scale=embedding_scale,
        logit_softcap=logit_softcap,
        tied_head=c.flag("tie_word_embeddings", tied),
    )


def grouped_layers(
    mixer: GroupedArch, feeds: Sequence[FeedArch], reaches: Sequence[Reach], c: Fields, out_norms: bool = False
) -> tuple[LayerArch, ...]:
    """Layers that differ in their reach and their feed. ModelError where the numbers do not fit each other."""
    if mixer.heads % mixer.kv_heads:
        raise c.error("num_attention_heads", f"is {mixer.heads}, not a multiple of the {mixer.kv_heads} K/V heads")
    for reach in reaches:
        if reach.rope is not None and reach.rope.dim > mixer.head_dim:
            raise c.error("rope", f"rotates {reach.rope.dim} dimensions of heads that have {mixer.head_dim}")
    wanted = list(zip(reaches, feeds, strict=True))
    made = {
        (reach, feed): LayerArch(replace(mixer, window=reach.window, rope=reach.rope), feed, out_norms)
        for reach, feed in set(wanted)
    }
    return tuple(made[one] for one in wanted)


def _hidden(c: Fields) -> int:
    return c.integer("hidden_size")


def _heads(c: Fields) -> int:
    return c.integer("num_attention_heads", most=MAX_HEADS)


def _layers(c: Fields) -> int:
    return c.integer("num_hidden_layers", most=MAX_LAYERS)


def _positions(c: Fields) -> int:
    return c.integer("max_position_embeddings", most=MAX_POSITIONS)


def _head_dim(c: Fields, default: int | None = None) -> int:
    return c.even("head_dim", default or _hidden(c) // _heads(c), most=MAX_HEAD_DIM)


def _window(c: Fields, default: int | None = None) -> int | None:
    return c.integer("sliding_window", most=MAX_POSITIONS) if c.has("sliding_window") else default


def _need_window(c: Fields, window: int | None) -> int:
    if window is None:
        raise c.error("sliding_window", "is missing or off, but layer_types has sliding layers")
    return window


def _per_layer(c: Fields, key: str, default: list[Any], allowed: tuple[Any, ...]) -> list[Any]:
    """A list with one entry for each layer."""
    value = c.get(key)
    if value is None:
        return default
    if not isinstance(value, list) or len(value) != len(default):
        raise c.error(key, f"must be a list of {len(default)} entries, one for each layer")
    unknown = next((v for v in value if v not in allowed), None)
    if unknown is not None:
        raise c.error(key, f"has {unknown!r:.80}; supported are {', '.join(map(str, allowed))}")
    return value


def _qwen_layers(c: Fields, head_dim: int | None = None) -> list[Reach]:
    """The first max_window_layers layers see everything; windows are off unless use_sliding_window says otherwise."""
    count, rope = _layers(c), _rope(c, 10_000.0, head_dim=head_dim)
    window = _window(c, 4096) if c.flag("use_sliding_window", False) else None
    full = c.integer("max_window_layers", 28, least=0)
    default = [SLIDING if window is not None and i >= full else FULL for i in range(count)]
    kinds = _per_layer(c, "layer_types", default, (FULL, SLIDING))
    return [Reach(_need_window(c, window) if kind == SLIDING else None, rope) for kind in kinds]


# ---- rotary positions: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before -------------


def _rope_section(c: Fields) -> Fields:
    for key in ("rope_parameters", "rope_scaling"):
        if c.has(key):
            return c.section(key)
    return Fields({}, c.where)


def _rope_kind(c: Fields) -> str:
    section = _rope_section(c)
    return section.text("rope_type", section.text("type", "default"))


def _rope(
    c: Fields, theta: float, *, head_dim: int | None = None, partial: bool = False, kind: str | None = None
) -> Rope:
    section = _rope_section(c)
    settings = Fields({**_outer_rope(c), **section.values}, section.where)
    if partial and c.has("original_max_position_embeddings"):  # Phi-3's own key wins over the section's
        settings.values = {**settings.values, **_outer_rope(c)}
    part = settings.number("partial_rotary_factor", 1.0, most=1.0)
    if part != 1.0 and not partial:
        raise settings.error("partial_rotary_factor", f"is {part:g}; this family rotates whole heads")
    dim = int((head_dim or _head_dim(c)) * part)
    return make_rope(kind or _rope_kind(c), settings, settings.number("rope_theta", theta), dim, _positions(c))


def _outer_rope(c: Fields) -> dict[str, Any]:
    keys = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    return {key: c.get(key) for key in keys if c.has(key)}


def _gemma_rope(c: Fields, kind: str, head_dim: int) -> Rope:
    """rope_parameters has one section for each kind of layer; before, rope_scaling was for the full layers alone."""
    local = kind == SLIDING
    theta = c.number("rope_local_base_freq", 10_000.0) if local else c.number("rope_theta", 1_000_000.0)
    settings = Fields({}, c.where)
    if c.has("rope_parameters"):
        sections = c.section("rope_parameters")
        settings = sections.section(kind) if sections.has(kind) else settings
    elif c.has("rope_scaling") and not local:
        settings = c.section("rope_scaling")
    settings.only("partial_rotary_factor", 1.0, 1)
    rope_type = settings.text("rope_type", settings.text("type", "default"))
    return make_rope(rope_type, settings, settings.number("rope_theta", theta), head_dim, _positions(c))
