"""Attention of the requests of a step that have one new token each: which kernel serves them."""

from __future__ import annotations

from torch import Tensor

from twostroke.ops.cuda.cuts import Cut
from twostroke.ops.cuda.kernels.decode import DecodeScratch, decode_attention
from twostroke.ops.cuda.kernels.even_decode import even_attention, serves
from twostroke.ops.cuda.kernels.tall_decode import tall_attention
from twostroke.ops.interface import Attention, Batch, KVLayer


def attend_singles(
    q: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int, out: Tensor, scratch: DecodeScratch,
    cut: Cut, *, fused: bool,
) -> None:  # fmt: skip
    """fused: q holds the projections of q, k and v."""
    narrow = kv.key_scales is not None
    if not narrow and cut.cascade is None and serves(q, attention, cut.single_count, fused):
        even_attention(
            q, attention, kv, batch, group, out, scratch, requests=cut.single_count, listed=cut.singles, fused=fused
        )
        return
    run = tall_attention if narrow else decode_attention
    run(
        q, attention, kv, batch, group, out, scratch, requests=cut.single_count, listed=cut.singles, splits=cut.splits,
        fused=fused, scale=cut.scale, shared=cut.cascade and cut.cascade.shared,
    )  # fmt: skip
