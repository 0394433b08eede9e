"""A model with random weights, made on the device: speed does not depend on their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from twostroke.model.arch import Arch, DenseArch, ExpertsArch, FeedArch, GroupedArch, LayerArch, MixerArch, Rope
from twostroke.model.latent import Latent, LatentArch
from twostroke.model.layers import Dense, Experts, Feed, Grouped, Layer, Mixer, SharedExpert
from twostroke.model.transformer import Transformer
from twostroke.ops.interface import Attention, ExpertSet, Gate, LatentAttention, Norm, Routing
from twostroke.weights.load import RopeTables

if TYPE_CHECKING:  # the shapes below serve without Triton
    from torch import Tensor

    from twostroke.ops.cuda.backend import CudaOps, CudaWeight, ExpertWeight

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


def turns(dim: int, theta: float) -> Rope:
    return Rope(tuple(theta ** (-2 * i / dim) for i in range(dim // 2)))


def qwen3_30b_shape(layers: int = 48) -> Arch:
    """Qwen3-30B-A3B's: 8 of 128 experts."""
    mixer = GroupedArch(32, 4, 128, rope=turns(128, 1e6), qk_norm=True)
    feed = ExpertsArch(Routing(128, 8, normalised=True), 768)
    return Arch(
        family="qwen3_moe", vocab=151_936, hidden=2048, max_positions=131_072, norm_eps=1e-6,
        layers=(LayerArch(mixer, feed),) * layers,
    )  # fmt: skip


def v2_lite_shape(layers: int = 27) -> Arch:
    """DeepSeek-V2-Lite's: latent attention, 6 of 64 experts and one of twice the width that every token uses."""
    mixer = LatentArch(16, 512, 128, 64, 128, rope=turns(64, 1e4))
    feeds = (DenseArch(10_944), *(ExpertsArch(Routing(64, 6), 1408, shared=2816),) * (layers - 1))
    return Arch(
        family="deepseek_v2", vocab=102_400, hidden=2048, max_positions=163_840, norm_eps=1e-6,
        layers=tuple(LayerArch(mixer, feed) for feed in feeds),
    )  # fmt: skip


def gpt_oss_shape(hidden: int, width: int, experts: int, layers: int, heads: int, kv_heads: int, vocab: int) -> Arch:
    """gpt-oss': 4 experts are chosen, every other layer has a window of 128 tokens."""
    mixers = [
        GroupedArch(heads, kv_heads, 64, window, turns(64, 150_000.0), sinks=True, qkv_bias=True, output_bias=True)
        for window in (128, None)
    ]
    routing = Routing(experts, 4, normalised=True)
    feed = ExpertsArch(routing, width, "swiglu_oai", router_bias=True, expert_bias=True)
    return Arch(
        family="gpt_oss", vocab=vocab, hidden=hidden, max_positions=131_072, norm_eps=1e-5,
        layers=tuple(LayerArch(mixers[index % 2], feed) for index in range(layers)),
    )  # fmt: skip


GPT_OSS_20B = gpt_oss_shape(2880, 2880, 32, 24, 64, 8, 201_088)


def random_model(arch: Arch, ops: CudaOps, max_positions: int, seed: int = 0, mxfp4: bool = False) -> Transformer:
    """Normal weights with a deviation that keeps activations near 1. mxfp4: experts have random codes of it."""
    from twostroke.ops.cuda.kernels.four_bits import random_mxfp4  # needs Triton
    from twostroke.ops.cuda.weights import FloatMatrix

    generator = torch.Generator(ops.device).manual_seed(seed)

    def matrix(rows: int, columns: int, *, outer: bool = False, bias: bool = False) -> CudaWeight:
        weight = torch.empty(rows, columns, dtype=ops.dtype, device=ops.device)
        weight.normal_(std=columns**-0.5, generator=generator)
        return ops.adopt(weight, vector(rows, bias), outer=outer)

    def floats(rows: int, columns: int, bias: Tensor | None = None) -> CudaWeight:
        """One that is not rounded to fewer bits."""
        return FloatMatrix(torch.empty(rows, columns, dtype=ops.dtype, device=ops.device).normal_(
            std=columns**-0.5, generator=generator), bias)  # fmt: skip

    def vector(size: int, there: bool, deviation: float = 0.1) -> Tensor | None:
        return torch.randn(size, generator=generator, device=ops.device) * deviation if there else None

    def stack(count: int, rows: int, columns: int, biased: bool) -> tuple[ExpertWeight, ...]:
        """So many matrices of experts; floats lie beside each other."""
        if mxfp4:
            return tuple(random_mxfp4(rows, columns, vector(rows, biased), generator) for _ in range(count))
        whole = torch.empty(count, rows, columns, dtype=ops.dtype, device=ops.device)
        whole.normal_(std=columns**-0.5, generator=generator)
        return tuple(ops.adopt_expert(one, vector(rows, biased)) for one in whole)

    def norm(width: int = arch.hidden) -> Norm:
        return Norm(torch.ones(width, device=ops.device), arch.norm_eps)

    ropes = RopeTables(max_positions, ops.device)

    def make_mixer(mixer: MixerArch) -> Mixer:
        shapes = {product.name: (product.outputs, product.inputs) for product in mixer.products(arch.hidden)}
        if isinstance(mixer, LatentArch):
            rope = ropes.get(mixer.rope)
            assert rope is not None and mixer.query_rank is None
            latent = LatentAttention(
                mixer.heads, mixer.latent, mixer.plain_dim, mixer.rope_dim, mixer.value_dim, mixer.factor, rope,
                norm(mixer.latent), floats(*shapes["key_up"]), floats(*shapes["value_up"]),
            )  # fmt: skip
            latents, output = matrix(*shapes["latents"]), matrix(*shapes["output"])
            return Latent(norm(), latents, mixer.query_width, None, None, latent, output)
        assert isinstance(mixer, GroupedArch)
        heads = (norm(mixer.head_dim), norm(mixer.head_dim)) if mixer.qk_norm else (None, None)
        attention = Attention(
            mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.factor, mixer.window or 0, mixer.softcap,
            ropes.get(mixer.rope), *heads, sinks=vector(mixer.heads, mixer.sinks, 1.0),
        )  # fmt: skip
        qkv = matrix(*shapes["qkv"], bias=mixer.qkv_bias)
        return Grouped(norm(), qkv, attention, matrix(*shapes["output"], bias=mixer.output_bias))

    def make_feed(feed: FeedArch) -> Feed:
        shapes = {product.name: (product.outputs, product.inputs) for product in feed.products(arch.hidden)}
        if isinstance(feed, DenseArch):
            return Dense(norm(), matrix(*shapes["gate_up"]), Gate(feed.activation), matrix(*shapes["down"]))
        assert isinstance(feed, ExpertsArch)
        count, biased = feed.routing.experts, feed.expert_bias
        experts = ExpertSet(
            feed.routing, floats(*shapes["router"], vector(count, feed.router_bias)), None,
            stack(count, *shapes["gate_up"], biased), Gate(feed.activation), stack(count, *shapes["down"], biased),
        )  # fmt: skip
        shared = None
        if feed.shared:
            shared = SharedExpert(matrix(*shapes["shared_gate_up"]), matrix(*shapes["shared_down"]))
        return Experts(norm(), experts, shared)

    layers = [Layer(make_mixer(shape.mixer), make_feed(shape.feed)) for shape in arch.layers]
    embedding = matrix(arch.vocab, arch.hidden, outer=True)
    return Transformer(
        arch, ops, embedding=embedding, layers=layers, final_norm=norm(),
        head=embedding if arch.tied_head else matrix(arch.vocab, arch.hidden, outer=True), max_positions=max_positions,
    )  # fmt: skip
