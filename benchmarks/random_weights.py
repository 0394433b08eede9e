"""A model with random weights, made on the device: speed does not depend on their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from twostroke.model.arch import Arch, DenseArch, GroupedArch, LayerArch, Rope
from twostroke.model.layers import Dense, Grouped, Layer
from twostroke.model.transformer import Transformer
from twostroke.ops.interface import Attention, Gate, Norm
from twostroke.weights.load import RopeTables

if TYPE_CHECKING:  # the shapes below serve without Triton
    from twostroke.ops.cuda.backend import CudaOps, CudaWeight

THETA = 500_000.0


def llama_shape(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, *, vocab: int = 128_256,
    tied_head: bool = False, max_positions: int = 131_072,
) -> Arch:  # fmt: skip
    rope = Rope(tuple(THETA ** (-2 * i / head_dim) for i in range(head_dim // 2)))
    return Arch(
        family="llama", vocab=vocab, hidden=hidden, max_positions=max_positions, norm_eps=1e-5, tied_head=tied_head,
        layers=(LayerArch(GroupedArch(heads, kv_heads, head_dim, rope=rope), DenseArch(ffn)),) * layers,
    )  # fmt: skip


LLAMA_8B = llama_shape(4096, 14_336, 32, 32, 8, 128)
LLAMA_1B = llama_shape(2048, 8192, 16, 32, 8, 64, tied_head=True)


def random_model(arch: Arch, ops: CudaOps, max_positions: int, seed: int = 0) -> Transformer:
    """Normal weights with a deviation that keeps activations near 1."""
    generator = torch.Generator(ops.device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> CudaWeight:
        weight = torch.empty(rows, columns, dtype=ops.dtype, device=ops.device)
        return ops.adopt(weight.normal_(std=columns**-0.5, generator=generator))

    def norm() -> Norm:
        return Norm(torch.ones(arch.hidden, device=ops.device), arch.norm_eps)

    ropes = RopeTables(max_positions, ops.device)

    def layer(shape: LayerArch) -> Layer:
        mixer, feed = shape.mixer, shape.feed
        assert isinstance(mixer, GroupedArch) and isinstance(feed, DenseArch)
        qkv, output, gate_up, down = (
            matrix(product.outputs, product.inputs) for product in shape.products(arch.hidden)
        )
        attention = Attention(
            mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.factor, mixer.window or 0, mixer.softcap,
            ropes.get(mixer.rope),
        )  # fmt: skip
        return Layer(Grouped(norm(), qkv, attention, output), Dense(norm(), gate_up, Gate(feed.activation), down))

    embedding = matrix(arch.vocab, arch.hidden)
    return Transformer(
        arch, ops, embedding=embedding, layers=[layer(shape) for shape in arch.layers], final_norm=norm(),
        head=embedding if arch.tied_head else matrix(arch.vocab, arch.hidden), max_positions=max_positions,
    )  # fmt: skip
