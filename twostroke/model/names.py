"""Our parameter names, and where each lies in a checkpoint. Torch-free.

A parameter may be some rows of a fused tensor, may have its rows in another order, or may lack an offset:
- GGUF of the llama kind stores q and k for rotating neighbouring dimensions (0 with 1, 2 with 3 …), we rotate halves
  (i with i + dim/2). Whole rows move, so quantized rows can be put back as bytes.
- Gemma multiplies by 1 + w: transformers stores w, GGUF stores 1 + w.
- Phi-3 fuses q, k, v and gate, up.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from twostroke.model.arch import Arch, DenseArch, GroupedArch, LayerArch

FileKind = Literal["gguf", "safetensors"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where one parameter comes from."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    rows: tuple[int, int] | None = None  # the parameter's rows of a fused tensor
    paired_heads: int = 0  # number of heads whose rows lie in neighbouring pairs and must be put into halves
    add: float = 0.0


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
_FUSED = {"qkv": ("self_attn.qkv_proj", "attn_qkv"), "gate_up": ("mlp.gate_up_proj", "ffn_up")}
_PAIRED_FAMILIES = ("llama", "mistral", "smollm3")  # in GGUF

# Tensors that carry no weights of the language model: buffers, and the image half of a multimodal checkpoint.
_IGNORABLE = re.compile(
    r".*rotary_emb\.inv_freq|rope_freqs\.weight|rope_factors_(long|short)\.weight"
    r"|(model\.)?(vision_tower|multi_modal_projector)\..*"
)
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")  # of transformers' text models


def ignorable(tensor: str, arch: Arch) -> bool:
    """True for tensors that may be left over."""
    return bool(_IGNORABLE.fullmatch(tensor)) or (arch.tied_head and tensor.endswith("lm_head.weight"))


def parameter_sources(arch: Arch, kind: FileKind, present: Collection[str]) -> dict[str, Source]:
    """Every parameter of `arch`, `layers.3.q` and the like, with its place. present: the checkpoint's tensor names."""
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
    mixer, feed = layer.mixer, layer.feed
    assert isinstance(mixer, GroupedArch) and isinstance(feed, DenseArch)  # the parts that have names here
    spelling = 1 if gguf else 0
    sources = {}
    norms = {name: (spell, arch.hidden) for name, spell in _norm_names(layer).items()}
    if mixer.qk_norm:
        norms |= {name: (spell, mixer.head_dim) for name, spell in _QK_NORMS.items()}
    for name, (spell, width) in norms.items():
        sources[name] = Source(f"{stem}{spell[spelling]}.weight", (width,), add=add)
    shapes = _matrix_shapes(arch.hidden, mixer, feed)
    fused = {ours: f"{stem}{_FUSED[ours][spelling]}" for ours in _FUSED} if arch.family == "phi3" else {}
    if "qkv" in fused and f"{fused['qkv']}.weight" not in present and f"{stem}attn_q.weight" in present:
        del fused["qkv"]  # some GGUF files hold Phi-3's q, k and v apart
    apart = set(_PROJECTIONS) - {part for whole in fused for part in _parts(whole)}
    paired = gguf and arch.family in _PAIRED_FAMILIES
    for name in (n for n in _PROJECTIONS if n in apart):
        heads = {"q": mixer.heads, "k": mixer.kv_heads}.get(name, 0) if paired else 0
        tensor = f"{stem}{_PROJECTIONS[name][spelling]}"
        sources[name] = Source(f"{tensor}.weight", shapes[name], paired_heads=heads)
        if _has_bias(mixer, name):
            sources[f"{name}_bias"] = Source(f"{tensor}.bias", shapes[name][:1], paired_heads=heads)
    for whole, tensor in fused.items():
        sources |= _split(mixer, tensor, _parts(whole), shapes)
    return sources


def _norm_names(layer: LayerArch) -> dict[str, tuple[str, str]]:
    return _SANDWICH_NORMS if layer.out_norms else _LAYER_NORMS


def _parts(fused: str) -> tuple[str, ...]:
    return ("q", "k", "v") if fused == "qkv" else ("gate", "up")


def _has_bias(mixer: GroupedArch, name: str) -> bool:
    return (mixer.qkv_bias and name in ("q", "k", "v")) or (mixer.output_bias and name == "output")


def _matrix_shapes(hidden: int, mixer: GroupedArch, feed: DenseArch) -> dict[str, tuple[int, int]]:
    queries, keys = mixer.width, mixer.kv_heads * mixer.head_dim
    return {
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "output": (hidden, queries),
        "gate": (feed.width, hidden),
        "up": (feed.width, hidden),
        "down": (hidden, feed.width),
    }


def _split(
    mixer: GroupedArch, tensor: str, parts: tuple[str, ...], shapes: dict[str, tuple[int, int]]
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
