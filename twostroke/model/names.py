"""Our parameter names, and where each lies in a checkpoint. Torch-free.

A parameter may be some rows of a fused tensor, may have its rows in another order, or may lack an offset:
- GGUF of the llama kind stores q and k for rotating neighbouring dimensions (0 with 1, 2 with 3 …), we rotate halves
  (i with i + dim/2). Whole rows move, so quantized rows can be put back as bytes.
- Gemma multiplies by 1 + w: transformers stores w, GGUF stores 1 + w.
- Phi-3 fuses q, k, v and gate, up.
- DeepSeek rotates neighbouring dimensions at the end of each query head and of the shared key, in both kinds of files.
  Its up-projections of the latent are one tensor, or two in newer GGUF files, which hold those of the keys transposed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from twostroke.model.arch import Arch, DenseArch, ExpertsArch, GroupedArch, LayerArch, MixerArch
from twostroke.model.compressed_gguf import gguf_compressed_sources
from twostroke.model.compressed_names import compressed_sources
from twostroke.model.expert_names import expert_sources
from twostroke.model.latent import LatentArch
from twostroke.model.source import Source

FileKind = Literal["gguf", "safetensors"]


# The one place where the two spellings stand side by side: ours, transformers', GGUF's.
_LAYER_NORMS = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "feed_norm": ("post_attention_layernorm", "ffn_norm"),
}
_SANDWICH_NORMS = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention_out_norm": ("post_attention_layernorm", "post_attention_norm"),
    "feed_norm": ("pre_feedforward_layernorm", "ffn_norm"),
    "feed_out_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
}
_QK_NORMS = {"q_norm": ("self_attn.q_norm", "attn_q_norm"), "k_norm": ("self_attn.k_norm", "attn_k_norm")}
_PROJECTIONS = {
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "output": ("self_attn.o_proj", "attn_output"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}
_LATENT = {
    "q": ("self_attn.q_proj", "attn_q"),
    "q_a": ("self_attn.q_a_proj", "attn_q_a"),
    "q_b": ("self_attn.q_b_proj", "attn_q_b"),
    "kv_a": ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    "latent_norm": ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    "query_norm": ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    "kv_b": ("self_attn.kv_b_proj", "attn_kv_b"),
    "output": ("self_attn.o_proj", "attn_output"),
}
_FUSED = {"qkv": ("self_attn.qkv_proj", "attn_qkv"), "gate_up": ("mlp.gate_up_proj", "ffn_up")}
_PAIRED_FAMILIES = ("llama", "mistral", "smollm3")  # in GGUF

# Tensors that carry no weights of the language model: buffers, and the image half of a multimodal checkpoint.
_IGNORABLE = re.compile(
    r".*rotary_emb\.inv_freq|rope_freqs\.weight|rope_factors_(long|short)\.weight"
    r"|(model\.)?(vision_tower|multi_modal_projector|mm_projector)\..*"
)
_LAYER = re.compile(r"(?:(?:language_model\.|model\.)*layers|blk)\.(\d{1,6})\.|(?:model\.)?mtp\.(\d{1,6})\.")
# Families with layers after the last one that predict further tokens; they are not run.
_DRAFT_LAYERS = ("deepseek_v3", "deepseek_v4")
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")  # of transformers' text models


def ignorable(tensor: str, arch: Arch) -> bool:
    """True for tensors that may be left over."""
    layer = _LAYER.match(tensor) if arch.family in _DRAFT_LAYERS else None
    if layer is not None and (layer[1] is None or int(layer[1]) >= len(arch.layers)):
        return True
    return bool(_IGNORABLE.fullmatch(tensor)) or (arch.tied_head and tensor.endswith("lm_head.weight"))


def parameter_sources(arch: Arch, kind: FileKind, present: Collection[str]) -> dict[str, Source]:
    """Every parameter of `arch`, `layers.3.q` and the like, with its place. present: the checkpoint's tensor names."""
    if arch.family == "deepseek_v4":
        return gguf_compressed_sources(arch) if kind == "gguf" else compressed_sources(arch, present)
    gguf = kind == "gguf"
    prefix = "" if gguf else _find_prefix(present)
    add = 1.0 if arch.family == "gemma3" and not gguf else 0.0
    wide, tall = (arch.vocab, arch.hidden), (arch.hidden,)
    sources = {
        "embedding": Source("token_embd.weight" if gguf else f"{prefix}embed_tokens.weight", wide),
        "final_norm": Source("output_norm.weight" if gguf else f"{prefix}norm.weight", tall, add=add),
    }
    if not arch.tied_head:
        sources["head"] = Source("output.weight" if gguf else _find_head(present), wide)
    for index, layer in enumerate(arch.layers):
        stem = f"blk.{index}." if gguf else f"{prefix}layers.{index}."
        for name, source in _layer_sources(arch, layer, gguf, stem, add, present).items():
            sources[f"layers.{index}.{name}"] = source
    return sources


def _find_prefix(present: Collection[str]) -> str:
    return next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in present), _PREFIXES[0])


def _find_head(present: Collection[str]) -> str:
    old = "language_model.lm_head.weight"
    return old if old in present else "lm_head.weight"


def _layer_sources(
    arch: Arch, layer: LayerArch, gguf: bool, stem: str, add: float, present: Collection[str]
) -> dict[str, Source]:
    spelling = 1 if gguf else 0
    norms = _norm_names(arch, layer).items()
    sources = {name: Source(f"{stem}{spell[spelling]}.weight", (arch.hidden,), add=add) for name, spell in norms}
    sources |= _mixer_sources(arch, layer.mixer, gguf, stem, add, present)
    if isinstance(layer.feed, ExpertsArch):
        return sources | expert_sources(arch.hidden, layer.feed, gguf, stem, present)
    return sources | _feed_sources(arch, layer, gguf, stem)


def _mixer_sources(
    arch: Arch, mixer: MixerArch, gguf: bool, stem: str, add: float, present: Collection[str]
) -> dict[str, Source]:
    if isinstance(mixer, LatentArch):
        return _latent_sources(mixer, arch.hidden, gguf, stem, present)
    assert isinstance(mixer, GroupedArch)  # the other kind that has names here
    return _grouped_sources(arch, mixer, gguf, stem, add, present)


def _grouped_sources(
    arch: Arch, mixer: GroupedArch, gguf: bool, stem: str, add: float, present: Collection[str]
) -> dict[str, Source]:
    spelling = 1 if gguf else 0
    sources = {}
    heads_of = {"q_norm": mixer.heads, "k_norm": mixer.kv_heads} if mixer.wide_qk_norm else {}
    for name, spell in _QK_NORMS.items() if mixer.qk_norm or mixer.wide_qk_norm else ():
        sources[name] = Source(f"{stem}{spell[spelling]}.weight", (mixer.head_dim * heads_of.get(name, 1),), add=add)
    if mixer.sinks:
        sources["sinks"] = Source(f"{stem}{'attn_sinks.weight' if gguf else 'self_attn.sinks'}", (mixer.heads,))
    shapes = _attention_shapes(arch.hidden, mixer)
    whole = f"{stem}{_FUSED['qkv'][spelling]}"
    if arch.family == "phi3" and not (f"{whole}.weight" not in present and f"{stem}attn_q.weight" in present):
        sources |= _split(mixer, whole, ("q", "k", "v"), shapes)  # some GGUF files hold Phi-3's q, k and v apart
    paired = gguf and arch.family in _PAIRED_FAMILIES
    for name in (n for n in shapes if n not in sources):
        heads = {"q": mixer.heads, "k": mixer.kv_heads}.get(name, 0) if paired else 0
        tensor = f"{stem}{_PROJECTIONS[name][spelling]}"
        sources[name] = Source(f"{tensor}.weight", shapes[name], paired_heads=heads)
        if _has_bias(mixer, name):
            sources[f"{name}_bias"] = Source(f"{tensor}.bias", shapes[name][:1], paired_heads=heads)
    return sources


def _latent_sources(
    mixer: LatentArch, hidden: int, gguf: bool, stem: str, present: Collection[str]
) -> dict[str, Source]:
    def tensor(name: str) -> str:
        return f"{stem}{_LATENT[name][1 if gguf else 0]}"

    width, tail = mixer.query_width, mixer.rope_dim if mixer.interleaved else 0
    matrices = {"kv_a": (mixer.cached, hidden), "output": (hidden, mixer.heads * mixer.value_dim)}
    if mixer.query_rank:
        matrices |= {"q_a": (mixer.query_rank, hidden), "q_b": (width, mixer.query_rank)}
    else:
        matrices["q"] = (width, hidden)
    heads = {"q": mixer.heads, "q_b": mixer.heads, "kv_a": 1} if tail else {}
    sources = {}
    for name, shape in matrices.items():
        sources[name] = Source(f"{tensor(name)}.weight", shape, None, heads.get(name, 0), tail)
        if mixer.bias and name in ("q_a", "kv_a", "output"):
            sources[f"{name}_bias"] = Source(f"{tensor(name)}.bias", shape[:1], None, heads.get(name, 0), tail)
    sources["latent_norm"] = Source(f"{tensor('latent_norm')}.weight", (mixer.latent,))
    if mixer.query_rank:
        sources["query_norm"] = Source(f"{tensor('query_norm')}.weight", (mixer.query_rank,))
    if gguf and f"{stem}attn_k_b.weight" in present:
        sources["k_b"] = Source(f"{stem}attn_k_b.weight", (mixer.heads, mixer.latent, mixer.plain_dim))
        sources["v_b"] = Source(f"{stem}attn_v_b.weight", (mixer.heads, mixer.value_dim, mixer.latent))
    else:
        rows = mixer.heads * (mixer.plain_dim + mixer.value_dim)
        sources["kv_b"] = Source(f"{tensor('kv_b')}.weight", (rows, mixer.latent))
    return sources


def _feed_sources(arch: Arch, layer: LayerArch, gguf: bool, stem: str) -> dict[str, Source]:
    feed, spelling = layer.feed, 1 if gguf else 0
    assert isinstance(feed, DenseArch)  # the kind that has names here
    wide, tall = (feed.width, arch.hidden), (arch.hidden, feed.width)
    sources = {"down": Source(f"{stem}{_PROJECTIONS['down'][spelling]}.weight", tall)}
    if arch.family == "phi3":
        return sources | _split(
            None, f"{stem}{_FUSED['gate_up'][spelling]}", ("gate", "up"), {"gate": wide, "up": wide}
        )
    return sources | {n: Source(f"{stem}{_PROJECTIONS[n][spelling]}.weight", wide) for n in ("gate", "up")}


def _norm_names(arch: Arch, layer: LayerArch) -> dict[str, tuple[str, str]]:
    if arch.family == "gpt_oss":  # GGUF calls the feed's norm after the place where it stands
        return {**_LAYER_NORMS, "feed_norm": ("post_attention_layernorm", "post_attention_norm")}
    return _SANDWICH_NORMS if layer.out_norms else _LAYER_NORMS


def _has_bias(mixer: GroupedArch | None, name: str) -> bool:
    if mixer is None:
        return False
    return (mixer.qkv_bias and name in ("q", "k", "v")) or (mixer.output_bias and name == "output")


def _attention_shapes(hidden: int, mixer: GroupedArch) -> dict[str, tuple[int, int]]:
    queries, keys = mixer.width, mixer.kv_heads * mixer.head_dim
    return {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "output": (hidden, queries)}


def _split(
    mixer: GroupedArch | None, tensor: str, parts: tuple[str, ...], shapes: dict[str, tuple[int, int]]
) -> dict[str, Source]:
    """Rows of a fused tensor, one run for each part."""
    total = sum(shapes[part][0] for part in parts)
    sources, start = {}, 0
    for part in parts:
        rows = (start, start + shapes[part][0])
        sources[part] = Source(f"{tensor}.weight", (total, shapes[part][1]), rows)
        if _has_bias(mixer, part):
            sources[f"{part}_bias"] = Source(f"{tensor}.bias", (total,), rows)
        start = rows[1]
    return sources
