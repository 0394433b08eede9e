"""The mixers of DeepSeek V4 from its config.json. Torch-free."""

from __future__ import annotations

from typing import Any

from twostroke.model.arch import Rope
from twostroke.model.compressed import CompressedArch, IndexArch
from twostroke.model.fields import MAX_HEADS, MAX_POSITIONS, Fields
from twostroke.model.rope import make_rope
from twostroke.ops.interface import BLOCK

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # in older configs a layer is named by its ratio
_RATIOS = {SPARSE: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}  # older key, default
_MAX_RATIO = 4096
LANES = 16


def compressed_mixers(c: Fields, count: int, heads: int, dim: int) -> list[CompressedArch]:
    """One for each layer."""
    groups = c.integer("o_groups", 8, most=MAX_HEADS)
    if heads % groups:
        raise c.error("o_groups", f"is {groups}, which does not divide {heads} heads")
    rope_dim = _rope_dim(c, dim)
    ratios = {SLIDING: 0} | {kind: _ratio(c, kind, *names) for kind, names in _RATIOS.items()}
    index = IndexArch(
        c.integer("index_n_heads", 64, most=MAX_HEADS),
        c.integer("index_head_dim", 128, most=4096),
        c.integer("index_topk", 512, most=MAX_POSITIONS),
    )
    if index.dim < rope_dim:
        raise c.error("index_head_dim", f"is {index.dim}, less than the {rope_dim} dimensions that are rotated")
    for key, size in (("head_dim", dim), ("index_head_dim", index.dim)):
        if size % LANES:
            raise c.error(key, f"is {size}; that must be a multiple of {LANES}, which the kernels read at a time")
    ropes = {kind: _rope(c, kind != SLIDING, rope_dim) for kind in (SLIDING, SPARSE)}
    made = {
        kind: CompressedArch(
            heads=heads,
            dim=dim,
            rope_dim=rope_dim,
            window=c.integer("sliding_window", 128, most=MAX_POSITIONS),
            query_rank=c.integer("q_lora_rank", 1024),
            groups=groups,
            output_rank=c.integer("o_lora_rank", 1024),
            ratio=ratio,
            index=index if kind == SPARSE else None,
            rope=ropes[SLIDING if kind == SLIDING else SPARSE],
        )
        for kind, ratio in ratios.items()
    }
    return [made[kind] for kind in _kinds(c, count)]


def _kinds(c: Fields, count: int) -> list[str]:
    given: Any = c.get("layer_types")
    key = "layer_types"
    if given is None and c.has("compress_ratios"):
        key, ratios = "compress_ratios", c.get("compress_ratios")
        given = [_kind_of(ratio) for ratio in ratios] if isinstance(ratios, list) else ratios
    if given is None:
        return [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(count)]
    known = (SLIDING, SPARSE, HEAVY)
    if not isinstance(given, list) or len(given) < count or any(kind not in known for kind in given):
        raise c.error(key, f"must be a list of {count} entries, each {SLIDING}, {SPARSE} or {HEAVY}")
    return given[:count]  # some configs list the layers that predict further tokens too


def _kind_of(ratio: Any) -> str | None:
    return _BY_RATIO.get(ratio) if isinstance(ratio, int) else None


def _ratio(c: Fields, kind: str, older: str, default: int) -> int:
    """Tokens of an entry: blocks of the cache hold whole entries, or entries whole blocks."""
    rates = c.section("compress_rates") if c.has("compress_rates") else Fields({}, c.where)
    ratio = c.integer(older, most=_MAX_RATIO) if c.has(older) else rates.integer(kind, default, most=_MAX_RATIO)
    if BLOCK % ratio and ratio % BLOCK:
        raise c.error("compress_rates", f"has {ratio} for {kind}; that must divide {BLOCK} or be a multiple of it")
    return ratio


def _rope_dim(c: Fields, dim: int) -> int:
    if c.has("qk_rope_head_dim"):
        rope_dim = c.even("qk_rope_head_dim", 64, most=dim)
    else:
        rope_dim = int(dim * c.number("partial_rotary_factor", 0.125, most=1.0))
    if rope_dim < 2 or rope_dim % 2:
        raise c.error("partial_rotary_factor", f"rotates {rope_dim} dimensions; that must be an even number above 0")
    return rope_dim


def _rope(c: Fields, compressed: bool, dim: int) -> Rope:
    """Layers with entries have a rotation of their own. YaRN does not enlarge cos and sin there."""
    nested = c.section("rope_parameters") if c.has("rope_parameters") else Fields({}, c.where)
    label = "compress" if compressed else "main"
    if nested.has("main") and nested.has("compress"):
        settings = nested.section(label)
    else:
        shared = nested.values or (c.section("rope_scaling").values if c.has("rope_scaling") else {})
        settings = Fields({k: v for k, v in shared.items() if k != "rope_theta"} if compressed else {}, c.where)
    default = c.number("compress_rope_theta", 160_000.0) if compressed else c.number("rope_theta", 10_000.0)
    kind = settings.text("rope_type", settings.text("type", "default"))
    if kind == "yarn" and not settings.has("attention_factor"):
        settings = Fields({**settings.values, "attention_factor": 1.0}, settings.where)
    positions = c.integer("max_position_embeddings", most=MAX_POSITIONS)
    return make_rope(kind, settings, settings.number("rope_theta", default), dim, positions)
