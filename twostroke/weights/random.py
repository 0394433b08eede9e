"""Random weights in the shape of an architecture, made on the device: for benchmarks, where values do not matter."""

from __future__ import annotations

import torch

from twostroke.model.arch import Arch, LayerArch, Rope
from twostroke.model.transformer import Transformer, rope_table
from twostroke.ops.cuda.backend import CudaOps, Weight
from twostroke.ops.interface import Attention, Layer, Norm

THETA = 500_000.0


def llama_shape(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, *, vocab: int = 128_256,
    tied_head: bool = False, max_positions: int = 131_072,
) -> Arch:  # fmt: skip
    rope = Rope(tuple(THETA ** (-2 * i / head_dim) for i in range(head_dim // 2)))
    return Arch(
        family="llama", vocab=vocab, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        layers=(LayerArch(rope=rope),) * layers, max_positions=max_positions, norm_eps=1e-5, tied_head=tied_head,
    )  # fmt: skip


LLAMA_8B = llama_shape(4096, 14_336, 32, 32, 8, 128)
LLAMA_1B = llama_shape(2048, 8192, 16, 32, 8, 64, tied_head=True)


def random_model(arch: Arch, ops: CudaOps, max_positions: int, seed: int = 0) -> Transformer:
    """Normal weights with the deviation that keeps activations near 1."""
    generator = torch.Generator(ops.device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Weight:
        weight = torch.empty(rows, columns, dtype=ops.dtype, device=ops.device)
        return ops.adopt(weight.normal_(std=columns**-0.5, generator=generator))

    def norm() -> Norm:
        return Norm(torch.ones(arch.hidden, device=ops.device), arch.norm_eps)

    ropes = {layer.rope: rope_table(layer.rope, max_positions, ops.device) for layer in set(arch.layers) if layer.rope}

    def layer(shape: LayerArch) -> Layer:
        attention = Attention(
            arch.heads, arch.kv_heads, arch.head_dim, arch.scale, shape.window or 0, arch.attention_softcap,
            ropes[shape.rope] if shape.rope else None,
        )  # fmt: skip
        width = arch.heads * arch.head_dim
        return Layer(
            attention_norm=norm(),
            qkv=matrix(width + 2 * arch.kv_heads * arch.head_dim, arch.hidden),
            attention=attention,
            output=matrix(arch.hidden, width),
            feed_norm=norm(),
            gate_up=matrix(2 * arch.ffn, arch.hidden),
            down=matrix(arch.hidden, arch.ffn),
        )

    embedding = matrix(arch.vocab, arch.hidden)
    return Transformer(
        arch, ops, embedding=embedding, layers=[layer(shape) for shape in arch.layers], final_norm=norm(),
        head=embedding if arch.tied_head else matrix(arch.vocab, arch.hidden), max_positions=max_positions,
    )  # fmt: skip
