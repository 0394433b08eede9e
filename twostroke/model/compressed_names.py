"""Names of DeepSeek V4's tensors. Torch-free.

Published checkpoints have the names of DeepSeek's own code (embed, layers.0.attn.wq_a …); what transformers saves has
the same inside a layer and its own around them (model.embed_tokens, model.layers.0.attn.wq_a …). One norm differs
inside: attn.kv_norm and attn.norm. GGUF's names are in compressed_gguf.py.
"""

from __future__ import annotations

from collections.abc import Collection

from twostroke.model.arch import Arch, ExpertsArch
from twostroke.model.compressed import CompressedArch
from twostroke.model.source import Source

_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}


def compressed_sources(arch: Arch, present: Collection[str]) -> dict[str, Source]:
    """Every parameter of the model with its place."""
    own = "embed.weight" in present  # DeepSeek's names
    prefix = "" if own else "model."
    wide, all_streams = (arch.vocab, arch.hidden), arch.streams * arch.hidden
    head = "hc_head_" if own else "model.hc_head.hc_"
    sources = {
        "embedding": Source("embed.weight" if own else "model.embed_tokens.weight", wide),
        "final_norm": Source(f"{prefix}norm.weight", (arch.hidden,)),
        "head": Source("head.weight" if "head.weight" in present else "lm_head.weight", wide),
        "streams": Source(f"{head}fn", (arch.streams, all_streams)),
        "streams_base": Source(f"{head}base", (arch.streams,)),
        "streams_scale": Source(f"{head}scale", (1,)),
    }
    for index, layer in enumerate(arch.layers):
        stem = f"{prefix}layers.{index}."
        assert isinstance(layer.mixer, CompressedArch) and isinstance(layer.feed, ExpertsArch)
        found = _streams(arch, stem) | _mixer(arch.hidden, layer.mixer, stem) | _feed(arch, layer.feed, stem)
        if f"{stem}attn.kv_norm.weight" in present:
            found["key_norm"] = Source(f"{stem}attn.kv_norm.weight", (layer.mixer.dim,))
        sources |= {f"layers.{index}.{name}": source for name, source in found.items()}
    return sources


def _streams(arch: Arch, stem: str) -> dict[str, Source]:
    outputs = arch.streams * (2 + arch.streams)
    sources = {
        "attention_norm": Source(f"{stem}attn_norm.weight", (arch.hidden,)),
        "feed_norm": Source(f"{stem}ffn_norm.weight", (arch.hidden,)),
    }
    for ours, theirs in (("attention", "attn"), ("feed", "ffn")):
        sources[f"{ours}_streams"] = Source(f"{stem}hc_{theirs}_fn", (outputs, arch.streams * arch.hidden))
        sources[f"{ours}_streams_base"] = Source(f"{stem}hc_{theirs}_base", (outputs,))
        sources[f"{ours}_streams_scale"] = Source(f"{stem}hc_{theirs}_scale", (3,))
    return sources


def _mixer(hidden: int, mixer: CompressedArch, stem: str) -> dict[str, Source]:
    at = f"{stem}attn."
    size = mixer.width // mixer.groups
    sources = {
        "q_a": Source(f"{at}wq_a.weight", (mixer.query_rank, hidden)),
        "query_norm": Source(f"{at}q_norm.weight", (mixer.query_rank,)),
        "q_b": Source(f"{at}wq_b.weight", (mixer.width, mixer.query_rank)),
        "key": Source(f"{at}wkv.weight", (mixer.dim, hidden)),
        "key_norm": Source(f"{at}norm.weight", (mixer.dim,)),
        "sinks": Source(f"{at}attn_sink", (mixer.heads,)),
        "output": Source(f"{at}wo_b.weight", (hidden, mixer.groups * mixer.output_rank)),
    }
    for group in range(mixer.groups):
        rows = (group * mixer.output_rank, (group + 1) * mixer.output_rank)
        sources[f"output_groups.{group}"] = Source(f"{at}wo_a.weight", (mixer.groups * mixer.output_rank, size), rows)
    if mixer.ratio:
        sources |= _compressor(hidden, mixer, "", mixer.dim, f"{at}compressor.")
    if mixer.index is not None:
        sources |= _compressor(hidden, mixer, "index_", mixer.index.dim, f"{at}indexer.compressor.")
        width = mixer.index.heads * mixer.index.dim
        sources["index_q"] = Source(f"{at}indexer.wq_b.weight", (width, mixer.query_rank))
        sources["index_weights"] = Source(f"{at}indexer.weights_proj.weight", (mixer.index.heads, hidden))
    return sources


def _compressor(hidden: int, mixer: CompressedArch, name: str, dim: int, at: str) -> dict[str, Source]:
    width = 2 * dim if mixer.overlap else dim
    return {
        f"{name}values": Source(f"{at}wkv.weight", (width, hidden)),
        f"{name}logits": Source(f"{at}wgate.weight", (width, hidden)),
        f"{name}places": Source(f"{at}ape", (mixer.ratio, width)),
        f"{name}entry_norm": Source(f"{at}norm.weight", (dim,)),
    }


def _feed(arch: Arch, feed: ExpertsArch, stem: str) -> dict[str, Source]:
    at, count = f"{stem}ffn.", feed.routing.experts
    shapes = {"gate": (feed.width, arch.hidden), "up": (feed.width, arch.hidden), "down": (arch.hidden, feed.width)}
    sources = {"router": Source(f"{at}gate.weight", (count, arch.hidden))}
    if feed.corrected:
        sources["correction"] = Source(f"{at}gate.bias", (count,))
    if feed.by_token:
        sources["table"] = Source(f"{at}gate.tid2eid", (arch.vocab, feed.routing.chosen), integers=True)
    for part, shape in shapes.items():
        sources[f"shared_{part}"] = Source(f"{at}shared_experts.{_EXPERT[part]}.weight", shape)
        for expert in range(count):
            sources[f"experts.{expert}.{part}"] = Source(f"{at}experts.{expert}.{_EXPERT[part]}.weight", shape)
    return sources
