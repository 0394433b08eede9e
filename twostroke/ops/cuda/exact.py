"""The CUDA backend with one order of additions: a row's bits depend neither on its phase nor on its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.copies import SOME
from twostroke.ops.cuda.cuts import AttentionKind, DeviceBatch
from twostroke.ops.cuda.kernels.decode import split_count
from twostroke.ops.cuda.kernels.decoded import ordered_rows
from twostroke.ops.cuda.kernels.exact_attention import exact_attention
from twostroke.ops.cuda.kernels.exact_matmul import Products
from twostroke.ops.cuda.kernels.exact_narrow import NarrowProducts
from twostroke.ops.cuda.kernels.quantized import Narrow
from twostroke.ops.cuda.kernels.rope import rotate_and_store
from twostroke.ops.cuda.weights import CudaWeight, FloatMatrix
from twostroke.ops.interface import BLOCK, Attention, Batch, Gate, KVLayer, Norm


class ExactCudaOps(CudaOps):
    one_order = True

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cuda",
        quantize: str | None = None,
        keep: bool = False,
    ):
        super().__init__(dtype, device, quantize, keep)
        self.products = Products()
        self.narrow_products = NarrowProducts(self.products, SOME)

    def linear(
        self, x: Tensor, weight: CudaWeight, *, before: Norm | Gate | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        if isinstance(weight, FloatMatrix):
            out = self.products(self._prepared(x, before), weight.weight, add_to)
        else:
            out = self.narrow_products(self._ordered(x, weight, before), weight, add_to)
        return out if weight.bias is None else out.add_(weight.bias)

    def _ordered(self, x: Tensor, weight: Narrow, before: Norm | Gate | None) -> Tensor:
        """x after norm or gate, its elements in the order in which the weight's codes are multiplied."""
        kind, norm = self._before(before)
        weights, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        return ordered_rows(x, weight.codes.shape[1], weight.format, kind, weights, eps, plain=True)[0]

    def gates_early(self, x: Tensor, weight: CudaWeight) -> bool:
        """The kernel that does so has an order of its own, and serves one row alone."""
        return False

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
