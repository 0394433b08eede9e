"""The CUDA backend with one order of additions: a row's bits depend neither on its phase nor on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.cuts import AttentionKind, DeviceBatch
from twostroke.ops.cuda.kernels.decode import split_count
from twostroke.ops.cuda.kernels.exact_attention import exact_attention
from twostroke.ops.cuda.kernels.exact_matmul import Products
from twostroke.ops.cuda.kernels.rope import rotate_and_store
from twostroke.ops.cuda.weights import CudaWeight, ExpertWeight, FloatMatrix
from twostroke.ops.formats import Stored
from twostroke.ops.interface import BLOCK, Attention, Batch, Gate, KVLayer, Norm


class ExactCudaOps(CudaOps):
    one_order = True

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cuda", keep: bool = False):
        """keep: experts that come in MXFP4 stay in it. Their numbers are exact in bfloat16, and every tile adds them in
        one order."""
        super().__init__(dtype, device, keep=keep)
        self.products = Products()

    def _kept(self, parts: Sequence[Stored], bias: Tensor | None) -> CudaWeight | None:
        return None  # products are of floats

    def _kept_expert(self, parts: Sequence[Stored], bias: Tensor | None) -> ExpertWeight | None:
        coded = self.keep and all(part.format == "MXFP4" for part in parts)
        return super()._kept_expert(parts, bias) if coded else None

    def linear(
        self, x: Tensor, weight: CudaWeight, *, before: Norm | Gate | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        assert isinstance(weight, FloatMatrix)
        out = self.products(self._prepared(x, before), weight.weight, add_to)
        return out if weight.bias is None else out.add_(weight.bias)

    def attend(self, qkv: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int) -> Tensor:
        cut = self._cut(batch, attention)
        width = attention.heads * attention.head_dim
        out = torch.empty(qkv.shape[0], width, dtype=qkv.dtype, device=qkv.device)
        streams = isinstance(batch, DeviceBatch) and batch.streams
        # The bits of a norm's sum, and of codes near a rounding border, are those of rotate_and_store.
        fused = streams and attention.query_norm is None and kv.key_scales is None
        q = qkv
        if not fused:
            q, _ = rotate_and_store(qkv, attention, kv, batch, group, keep_k=False, streams=streams, exact=True)
        splits = split_count(batch.groups[group].tables.shape[1] * BLOCK)  # of any context that the tables hold
        if cut.single_count:
            exact_attention(
                q, attention, kv, batch, group, out, self.scratch, tiles=cut.singles, count=cut.single_count,
                splits=splits, single=True, fused=fused,
            )  # fmt: skip
        if cut.tiles is not None:
            exact_attention(
                q, attention, kv, batch, group, out, self.scratch, tiles=cut.tiles, count=cut.tiles.shape[0],
                splits=splits if cut.tile_splits > 1 else 0, single=False,
            )  # fmt: skip
        return out

    def _kind(self, attention: Attention) -> AttentionKind:
        """Neither the vendor's kernel nor tiles of several requests are used: both add in an order of their own."""
        return super()._kind(attention)._replace(dense=False, members=0)
