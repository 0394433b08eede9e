"""The specification of every op: plain torch, float64 inside, one row at a time. Obvious and slow.

A row's result is computed from that row alone, so it cannot depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.ops.compressed_interface import CompressedAttention, CompressedRows
from twostroke.ops.formats import Stored, dequantize
from twostroke.ops.interface import BLOCK, Attention, Batch, ExpertSet, Gate, KVLayer, LatentAttention, Norm, Ops
from twostroke.ops.reference.cached import rotated, seen, stored_keys
from twostroke.ops.reference.entries import attend_lists
from twostroke.ops.reference.kv_codec import decode_kv, write_kv
from twostroke.ops.reference.latent import attend_latents
from twostroke.ops.reference.routing import route

ATTENTION_STEP = 64  # positions whose weights share a scale, where attention multiplies bytes


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceMatrix:
    weight: Tensor  # (out, in), float64 as `pack` makes it
    bias: Tensor | None  # (out,) float32


class ReferenceOps(Ops):
    name = "reference"
    device = torch.device("cpu")

    def __init__(self, byte_attention: bool = False):
        """byte_attention: over int8 and int4 K and V, queries and weights are rounded to 8 bits too (attended_bytes),
        as in the native CPU kernels. GPU kernels do not round them."""
        self.byte_attention = byte_attention

    def pack(self, parts: Sequence[Stored], bias: Tensor | None = None) -> ReferenceMatrix:
        return ReferenceMatrix(torch.cat([torch.from_numpy(dequantize(part)).double() for part in parts]), bias)

    def weight_bytes(self, weight: ReferenceMatrix) -> int:
        return weight.weight.nbytes

    def embed(self, table: ReferenceMatrix, tokens: Tensor, scale: float) -> Tensor:
        return table.weight[tokens].float() * scale

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        wide = x.double()
        rms = torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + norm.eps)
        return (wide / rms * norm.weight.double()).float()

    def linear(
        self, x: Tensor, weight: ReferenceMatrix, *, before: Norm | Gate | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        if isinstance(before, Norm):
            x = self.norm(x, before)
        elif isinstance(before, Gate):
            x = gated(x, before)
        matrix = weight.weight.double()
        rows = [matrix @ row.double() for row in x]
        out = torch.stack(rows).float() if rows else x.new_empty(0, matrix.shape[0])
        if weight.bias is not None:
            out = out + weight.bias
        if add_to is None:
            return out
        return add_to.add_(out)

    def experts(self, x: Tensor, norm: Norm, experts: ExpertSet, tokens: Tensor | None = None) -> Tensor:
        normed, out = self.norm(x, norm), torch.zeros_like(x)
        logits = self.linear(normed, experts.router)
        for row in range(len(x)):
            given = None if experts.table is None or tokens is None else experts.table[int(tokens[row])].tolist()
            for expert, weight in route(logits[row], experts.correction, experts.routing, given):
                inner = self.linear(normed[row : row + 1], experts.gate_up[expert])
                out[row] += weight * self.linear(inner, experts.down[expert], before=experts.gate)[0]
        return out

    def attend(self, qkv: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int) -> Tensor:
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
        q, k, v = qkv.view(-1, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)
        if attention.query_norm is not None:
            q = self.norm(q, attention.query_norm)
        if attention.key_norm is not None:
            k = self.norm(k, attention.key_norm)
        if attention.rope is not None:
            q, k = (rotated(x, attention.rope, batch.positions) for x in (q, k))
        in_bytes = self.byte_attention and kv.value_scales is not None
        if in_bytes:
            q, k = spread(q) / spread_size(dim), spread(centered(k, attention))
        blocks = batch.groups[group]
        write_kv(kv, blocks.slots, k, v)
        out = torch.empty_like(q)
        for request in range(len(batch.contexts)):
            for row in range(int(batch.starts[request]), int(batch.starts[request + 1])):
                places = seen(int(batch.positions[row]), attention.window)
                keys, values = stored(kv, blocks.tables[request], places)
                if in_bytes:
                    assert kv.value_scales is not None
                    value_scales = kv.value_scales[blocks.tables[request][places // BLOCK].long(), :, places % BLOCK]
                    out[row] = attended_bytes(q[row], keys, values, value_scales, places, attention)
                else:
                    out[row] = attended(q[row], keys, values, attention)
        return out.flatten(1)  # (T, heads · head_dim)

    def attend_latent(
        self, q: Tensor, kv: Tensor, attention: LatentAttention, cache: KVLayer, batch: Batch, group: int
    ) -> Tensor:
        return attend_latents(self, q, kv, attention, cache, batch, group)

    def attend_compressed(
        self, parts: CompressedRows, attention: CompressedAttention, cache: KVLayer, batch: Batch, group: int
    ) -> Tensor:
        return attend_lists(self, parts, attention, ((cache, group), *cache.further), batch)

    def argmax(self, logits: Tensor) -> Tensor:
        best = logits.amax(dim=-1, keepdim=True)
        index = torch.arange(logits.shape[-1])
        first = torch.where(logits == best, index, logits.shape[-1]).amin(dim=-1)
        return torch.where(logits.isnan().any(dim=-1), -1, first)


def gated(x: Tensor, gate: Gate) -> Tensor:
    """activation(gate) · up of (T, gate | up)."""
    left, up = x.double().chunk(2, dim=-1)
    if gate.activation == "swiglu_oai":
        left, up = left.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (left / (1 + torch.exp(-1.702 * left)) * (up + 1)).float()
    if gate.activation == "swiglu_10":
        left, up = left.clamp(max=10.0), up.clamp(-10.0, 10.0)
    if gate.activation in ("silu", "swiglu_10"):
        active = left / (1 + torch.exp(-left))
    else:
        active = 0.5 * left * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (left + 0.044715 * left**3)))
    return (active * up).float()


def centered(k: Tensor, attention: Attention) -> Tensor:
    return k if attention.key_center is None else k - torch.as_tensor(attention.key_center)


def spread_size(dim: int) -> int:
    """The largest power of two that divides dim."""
    return dim & -dim


def spread(x: Tensor) -> Tensor:
    """Every fifth element of a head is negated, then each run of spread_size elements gets its Walsh-Hadamard
    transform: q · k becomes spread_size times what it was, and a large element is shared out over its run. Sums in the
    order of the butterflies."""
    size = spread_size(x.shape[-1])
    signs = torch.ones(x.shape[-1], dtype=x.dtype)
    signs[::5] = -1
    runs = (x * signs).unflatten(-1, (-1, size))
    half = 1
    while half < size:
        pairs = runs.unflatten(-1, (-1, 2, half))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        runs = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return runs.flatten(-2)


def stored(kv: KVLayer, table: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """K and V at these positions, as stored: each (n, kv_heads, head_dim)."""
    block, offset = table[places // BLOCK].long(), places % BLOCK
    value_scales = None if kv.value_scales is None else kv.value_scales[block, :, offset]
    assert kv.values is not None
    return stored_keys(kv, table, places), decode_kv(kv.values[block, :, offset], value_scales, kv.format)


def scored(q: Tensor, keys: Tensor, attention: Attention) -> Tensor:
    """q (heads, D), keys (n, kv_heads, D) -> (heads, n), before the softmax."""
    scores = torch.einsum("hd,nhd->hn", q.double(), shared(keys.double(), attention)) * attention.scale
    return attention.softcap * torch.tanh(scores / attention.softcap) if attention.softcap else scores


def shared(x: Tensor, attention: Attention) -> Tensor:
    """(n, kv_heads, …) -> (n, heads, …): neighbouring query heads read one K/V head."""
    return x.repeat_interleave(attention.heads // attention.kv_heads, dim=1)


def attended(q: Tensor, keys: Tensor, values: Tensor, attention: Attention) -> Tensor:
    """One query: q (heads, D), keys and values (n, kv_heads, D) -> (heads, D)."""
    weights = softened(scored(q, keys, attention), attention)
    return torch.einsum("hn,nhd->hd", weights, shared(values.double(), attention)).float()


def softened(scores: Tensor, attention: Attention) -> Tensor:
    """The softmax of (heads, n) scores. A sink takes its share of a head's weights and has no value."""
    if attention.sinks is None:
        return torch.softmax(scores, dim=1)
    sinks = torch.as_tensor(attention.sinks).double().unsqueeze(1)
    return torch.softmax(torch.cat((scores, sinks), dim=1), dim=1)[:, :-1]


def attended_bytes(
    q: Tensor, keys: Tensor, values: Tensor, value_scales: Tensor, places: Tensor, attention: Attention
) -> Tensor:
    """The same where both products multiply bytes. q and keys are spread, and q is rounded to 8 bits with one scale for
    a head. The weight of a key times the scale of its value is rounded too, with one scale for a step of 64 positions.
    value_scales: (n, heads of K and V)."""
    weights = softened(scored(rounded(q.double()), keys, attention), attention)
    scales = shared(value_scales.double(), attention).T  # (heads, n)
    worth = weights * scales
    for step in places.div(ATTENTION_STEP, rounding_mode="floor").unique():
        among = places // ATTENTION_STEP == step
        worth[:, among] = rounded(worth[:, among])
    weights = torch.where(scales > 0, worth / scales, 0.0)
    return torch.einsum("hn,nhd->hd", weights, shared(values.double(), attention)).float()


def rounded(x: Tensor) -> Tensor:
    """x with each row turned into codes of 8 bits with one scale, and back; a row of zeros stays one."""
    step = x.abs().amax(dim=-1, keepdim=True) / 127
    return torch.where(step > 0, torch.round(x / step) * step, 0.0)
