"""The weights of compressed attention, packed for a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.model.compressed import Compressed, CompressedArch
from twostroke.ops.arrays import placed
from twostroke.ops.compressed_interface import CompressedAttention, Compressor, Indexer
from twostroke.ops.interface import Norm

if TYPE_CHECKING:
    from twostroke.weights.load import Parameters, RopeTables


def load_compressed(parameters: Parameters, mixer: CompressedArch, stem: str, ropes: RopeTables) -> Compressed:
    rope = ropes.get(mixer.rope)
    assert rope is not None
    compressor = _compressor(parameters, mixer, stem, "", mixer.dim) if mixer.ratio else None
    indexer, names = None, ["q_a", "key", *(("values", "logits") if mixer.ratio else ())]
    if mixer.index is not None:
        own = _compressor(parameters, mixer, stem, "index_", mixer.index.dim)
        indexer = Indexer(mixer.index.heads, mixer.index.dim, mixer.index.chosen, own)
        names += ["index_values", "index_logits", "index_weights"]
    ones = placed(np.ones(mixer.dim, np.float32), parameters.ops.device)
    attention = CompressedAttention(
        heads=mixer.heads,
        dim=mixer.dim,
        window=mixer.window,
        scale=float(mixer.dim) ** -0.5,
        rope=rope,
        query_norm=Norm(ones, parameters.arch.norm_eps),
        key_norm=parameters.norm(f"{stem}key_norm"),
        sinks=parameters.vector(f"{stem}sinks"),
        compressor=compressor,
        indexer=indexer,
    )
    return Compressed(
        arch=mixer,
        norm=parameters.norm(f"{stem}attention_norm"),
        down=parameters.matrix(*(f"{stem}{name}" for name in names)),
        query_norm=parameters.norm(f"{stem}query_norm"),
        queries=parameters.matrix(f"{stem}q_b"),
        index_queries=parameters.matrix(f"{stem}index_q") if mixer.index is not None else None,
        attention=attention,
        output_groups=tuple(parameters.matrix(f"{stem}output_groups.{group}") for group in range(mixer.groups)),
        output=parameters.matrix(f"{stem}output"),
    )


def _compressor(parameters: Parameters, mixer: CompressedArch, stem: str, name: str, dim: int) -> Compressor:
    return Compressor(
        ratio=mixer.ratio,
        dim=dim,
        overlap=mixer.overlap,
        bias=parameters.vector(f"{stem}{name}places"),
        norm=parameters.norm(f"{stem}{name}entry_norm"),
    )
