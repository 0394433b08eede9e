"""The CUDA backend: cuBLAS for large products, our Triton kernels for everything else.

Which kernel serves which case is decided here, by measurement (docs/gpu-kernels.md). Activations are bfloat16 or
float32, and weights are kept in the same type. Under Triton's interpreter the same code runs on a CPU, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from twostroke.ops.compressed_interface import CompressedAttention, CompressedRows
from twostroke.ops.cuda.compressed import CompressedKernels
from twostroke.ops.cuda.copies import FloatCopies
from twostroke.ops.cuda.cuts import UNDIVIDED, AttentionKind, Cut, DeviceBatch, cut_step
from twostroke.ops.cuda.kept import kept_codes, kept_expert
from twostroke.ops.cuda.kernels import draft_decode
from twostroke.ops.cuda.kernels import gemv as gemv_
from twostroke.ops.cuda.kernels import rows as rows_
from twostroke.ops.cuda.kernels.cascade import cascade_attention, members_of_tile
from twostroke.ops.cuda.kernels.decode import DecodeScratch, split_count
from twostroke.ops.cuda.kernels.decoded import decoded_product
from twostroke.ops.cuda.kernels.dense import attend_long
from twostroke.ops.cuda.kernels.exact_matmul import exact_product
from twostroke.ops.cuda.kernels.experts import route
from twostroke.ops.cuda.kernels.few_rows import FewExperts, few_rows_experts
from twostroke.ops.cuda.kernels.four_bits import from_int4
from twostroke.ops.cuda.kernels.grouped import grouped_experts
from twostroke.ops.cuda.kernels.latent import FEW_HEADS, few_heads_parts, latent_attention, latent_tile
from twostroke.ops.cuda.kernels.latent_ends import enter, head_product, leave, store_latents
from twostroke.ops.cuda.kernels.launch import hash_functions
from twostroke.ops.cuda.kernels.one_row import one_row
from twostroke.ops.cuda.kernels.one_row_int4 import WIDEST, one_row_int4
from twostroke.ops.cuda.kernels.prefill import prefill_attention, tile_rows
from twostroke.ops.cuda.kernels.quantized import (
    Int4,
    Narrow,
    rows_of,
    to_fp8,
    to_int4,
    to_int8,
)
from twostroke.ops.cuda.kernels.rope import rotate_and_store
from twostroke.ops.cuda.kernels.rows import ACTIVATIONS
from twostroke.ops.cuda.kernels.split_rows import shares_of, split_product
from twostroke.ops.cuda.sending import Sender
from twostroke.ops.cuda.singles import attend_singles
from twostroke.ops.cuda.streams import CudaStreams
from twostroke.ops.cuda.weights import (
    CudaWeight,
    ExpertWeight,
    FloatMatrix,
    LaidExperts,
    SharedWeights,
    lay_experts,
    lay_few,
)
from twostroke.ops.formats import Stored
from twostroke.ops.interface import BLOCK, Attention, Batch, ExpertSet, Gate, KVLayer, LatentAttention, Norm, Ops

WIDE_ROWS = 2048  # rows of a wide product made at a time
FEW_ROWS = 32  # that our product with float weights multiplies faster than the library
FETCHED = 512  # bytes of each row of weights that a product of few rows asks for while its norm or gate is computed
FEW_OF_EXPERTS = 8  # rows of which each reads its experts by itself
SOME_OF_EXPERTS = 64  # rows up to which the expert that every row takes is read beside the others, in parts
FEW_STREAMS = 8  # of latent attention, whose products read each head's matrix for each of them
AnyAttention = Attention | LatentAttention | CompressedAttention


class CudaOps(Ops):
    name = "cuda"
    device: torch.device
    one_order = False  # whether sums are added in an order that depends on neither rows nor phase
    shares_steps = True  # steps may be padded, and divided among the attention kernels beforehand

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cuda",
        quantize: str | None = None,
        keep: bool = False,
    ):
        """quantize: pack matrices into "fp8", "int8" or "int4" instead of `dtype`. keep: matrices that come in codes
        which there are kernels for stay in them (kept.py)."""
        hash_functions()
        self.dtype, self.device, self.quantize, self.keep = dtype, torch.device(device), quantize, keep
        self.few_rows = FEW_ROWS if self.device.type == "cuda" and dtype != torch.float32 else 0
        self.scratch, self.compressed = DecodeScratch(self.device), CompressedKernels()
        self.copies = FloatCopies(dtype)
        self._norms: dict[Norm, Norm] = {}
        self.sender = Sender(dtype, self.device)
        self.streams = CudaStreams(self.sender)
        self._following: dict[CudaWeight, Tensor] = {}  # by matrix: what to prefetch at the end of a product with it
        self._kinds: dict[AnyAttention, AttentionKind] = {}
        self._cuts: tuple[Batch | None, dict[AttentionKind, Cut]] = (None, {})
        self._experts: dict[ExpertSet, LaidExperts] = {}
        self._few_experts: dict[tuple[ExpertSet, bool], FewExperts | None] = {}
        self._done = torch.zeros(FEW_OF_EXPERTS, dtype=torch.int32, device=self.device)  # counters of routers

    # ---- weights -------------------------------------------------------------------------------------------------

    def pack(self, parts: Sequence[Stored], bias: Tensor | None = None) -> CudaWeight:
        return self._kept(parts, bias) or self.adopt(self.sender.stacked(parts), bias)

    def pack_expert(self, parts: Sequence[Stored], bias: Tensor | None = None) -> ExpertWeight:
        return self._kept_expert(parts, bias) or self.adopt_expert(self.sender.stacked(parts), bias)

    def _kept(self, parts: Sequence[Stored], bias: Tensor | None) -> CudaWeight | None:
        return kept_codes(parts, self._placed(bias), self.device) if self.keep else None

    def _kept_expert(self, parts: Sequence[Stored], bias: Tensor | None) -> ExpertWeight | None:
        return kept_expert(parts, self._placed(bias), self.device) if self.keep else None

    def _placed(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(self.device, torch.float32)

    def pack_precisely(self, parts: Sequence[Stored], bias: Tensor | None = None) -> CudaWeight:
        return FloatMatrix(self.sender.stacked(parts), self._placed(bias))

    def pack_outer(self, parts: Sequence[Stored], bias: Tensor | None = None) -> CudaWeight:
        return self._kept(parts, bias) or self.adopt(self.sender.stacked(parts), bias, outer=True)

    def adopt(self, weight: Tensor, bias: Tensor | None = None, *, outer: bool = False) -> CudaWeight:
        """A matrix that is on the device already. outer: the embedding or the head, which become int8."""
        bias = self._placed(bias)
        if self.quantize == "int4" and not outer:
            return to_int4(weight, bias)
        if self.quantize is not None and weight.shape[0] % 16 == 0 and weight.shape[1] % 64 == 0:
            return to_fp8(weight, bias) if self.quantize == "fp8" and not outer else to_int8(weight, bias)
        return FloatMatrix(weight, bias)

    def adopt_expert(self, weight: Tensor, bias: Tensor | None = None) -> ExpertWeight:
        found = self.adopt(weight, bias)
        return from_int4(found) if isinstance(found, Int4) else found

    def weight_bytes(self, weight: ExpertWeight) -> int:
        return weight.weight.nbytes if isinstance(weight, FloatMatrix) else weight.codes.nbytes + weight.scales.nbytes

    def read_in_order(self, weights: Sequence[CudaWeight]) -> None:
        """Called when all weights are there. Wide matrices are prefetched. Others gain nothing: the kernels before them
        leave the memory idle anyway."""
        self.sender.forget()
        for weight, following in zip(weights, [*weights[1:], weights[0]], strict=True):
            if not isinstance(following, FloatMatrix) and following.codes.shape[0] > following.inputs:
                self._following[weight] = following.codes

    # ---- rows ----------------------------------------------------------------------------------------------------

    def embed(self, table: CudaWeight, tokens: Tensor, scale: float) -> Tensor:
        if not isinstance(table, FloatMatrix):
            return rows_of(table, tokens, scale, self.dtype)
        return rows_.embed(table.weight, tokens, scale, self.dtype)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rows_.rms_norm(x, norm.weight, norm.eps)

    def experts(self, x: Tensor, norm: Norm, experts: ExpertSet, tokens: Tensor | None = None) -> Tensor:
        if self._alone(x):
            found = self._few_rows_experts(x, norm, experts, None, None, tokens)
            assert found is not None
            return found
        normed = self.norm(x, norm)
        laid = self._laid(experts)
        logits = self._router_logits(normed, laid.router.weight)
        ids, weights = route(logits, laid.router.bias, experts.correction, experts.routing, experts.table, tokens)
        return grouped_experts(normed, ids, weights, laid.gate_up, laid.down, ACTIVATIONS[experts.gate.activation])

    def add_experts(
        self, x: Tensor, norm: Norm, experts: ExpertSet, shared: tuple[CudaWeight, CudaWeight] | None
    ) -> Tensor | None:
        if self.one_order or len(x) > SOME_OF_EXPERTS or not x.is_contiguous() or experts.table is not None:
            return None
        given = None if shared is None else SharedWeights(*shared)
        if self._alone(x):
            return self._few_rows_experts(x, norm, experts, given, x)
        laid = self.laid_few(experts, given)
        if laid is None:
            return None
        normed = self.norm(x, norm)
        logits = self._router_logits(normed, laid.router)
        ids, weights = route(logits, laid.bias, laid.correction, laid.routing, parts=laid.parts)
        return grouped_experts(
            normed, ids, weights, laid.gate_up, laid.down, laid.activation, shared=laid.shared, out=x
        )  # fmt: skip

    def _alone(self, x: Tensor) -> bool:
        """Whether each row reads its experts by itself."""
        return x.shape[0] <= FEW_OF_EXPERTS and not self.one_order

    def _router_logits(self, normed: Tensor, router: Tensor) -> Tensor:
        logits = torch.empty(len(normed), router.shape[0], dtype=torch.float32, device=normed.device)
        exact_product(normed, router, logits, False)
        return logits

    def laid_few(self, experts: ExpertSet, shared: SharedWeights | None) -> FewExperts | None:
        """None as in lay_few."""
        key = experts, shared is not None
        if key not in self._few_experts:
            self._few_experts[key] = lay_few(experts, shared)
        return self._few_experts[key]

    def _few_rows_experts(
        self, x: Tensor, norm: Norm, experts: ExpertSet, shared: SharedWeights | None, out: Tensor | None,
        tokens: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        laid, narrow = self.laid_few(experts, shared), self._narrow(norm)
        if laid is None:
            return None
        return few_rows_experts(x, narrow.weight, narrow.eps, laid, tokens, self._done, out)

    def _laid(self, experts: ExpertSet) -> LaidExperts:
        found = self._experts.get(experts)
        if found is None:
            found = self._experts[experts] = lay_experts(experts)
        return found

    def linear(
        self, x: Tensor, weight: CudaWeight, *, before: Norm | Gate | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        if isinstance(weight, FloatMatrix):
            if x.shape[0] == 1 and x.is_contiguous():
                return self._one_row(x, weight, before, add_to)
            if x.shape[0] <= self.few_rows:
                return self._few_rows(x, weight, before, add_to)
        elif x.shape[0] <= self.copies.rows(weight):
            return self._some_rows(x, weight, before, add_to)
        x = self._prepared(x, before)
        matrix = (weight.weight if isinstance(weight, FloatMatrix) else self.copies.of(weight)).t()
        if add_to is not None:
            add_to.addmm_(x, matrix)
            return add_to if weight.bias is None else add_to.add_(weight.bias)
        out = product(x, matrix)
        return out if weight.bias is None else out.add_(weight.bias)

    def gated(self, x: Tensor, weight: CudaWeight, norm: Norm, gate: Gate) -> Tensor | None:
        if isinstance(weight, FloatMatrix) or not self.gates_early(x, weight):
            return None
        out = torch.empty(1, weight.codes.shape[0] // 2, dtype=x.dtype, device=x.device)
        return self._one_narrow_row(x, weight, norm, out, gate=self._before(gate)[0])

    def gates_early(self, x: Tensor, weight: CudaWeight) -> bool:
        if isinstance(weight, FloatMatrix) or x.shape[0] != 1 or not x.is_contiguous():
            return False
        return not isinstance(weight, Int4) or weight.codes.shape[1] <= WIDEST * 64

    def _one_row(self, x: Tensor, weight: FloatMatrix, before: Norm | Gate | None, add_to: Tensor | None) -> Tensor:
        out = torch.empty(1, weight.weight.shape[0], dtype=x.dtype, device=x.device) if add_to is None else add_to
        kind, norm = self._before(before)
        return gemv_.gemv(
            x, weight.weight, weight.bias, out, before=kind, norm=norm.weight if norm else None,
            eps=norm.eps if norm else 0.0, add=add_to is not None,
        )  # fmt: skip

    def _few_rows(self, x: Tensor, weight: FloatMatrix, before: Norm | Gate | None, add_to: Tensor | None) -> Tensor:
        n, k = weight.weight.shape
        out = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device) if add_to is None else add_to
        x, fetch, add = self._prepared(x, before), 0 if before is None else FETCHED, add_to is not None
        shares = shares_of(n, k, x.shape[0])
        if shares > 1:
            split_product(x, weight.weight, out, add, shares, fetch=fetch)
        else:
            exact_product(x, weight.weight, out, add, fetch=fetch)
        return out if weight.bias is None else out.add_(weight.bias)

    def _some_rows(self, x: Tensor, weight: Narrow, before: Norm | Gate | None, add_to: Tensor | None) -> Tensor:
        """x times the codes."""
        rows, add = x.shape[0], add_to is not None
        out = torch.empty(rows, weight.codes.shape[0], dtype=x.dtype, device=x.device) if add_to is None else add_to
        if rows == 1 and x.is_contiguous():
            return self._one_narrow_row(x, weight, before, out, add=add)
        kind, norm = self._before(before)
        return decoded_product(
            x, weight.codes, weight.scales, weight.bias, out, weight.format, before=kind,
            norm=norm.weight if norm else None, eps=norm.eps if norm else 0.0, add=add,
        )  # fmt: skip

    def _one_narrow_row(
        self, x: Tensor, weight: Narrow, before: Norm | Gate | None, out: Tensor, *, add: bool = False, gate: int = 0
    ) -> Tensor:
        kind, norm = self._before(before)
        run = one_row_int4 if isinstance(weight, Int4) else partial(one_row, fmt=weight.format)
        return run(
            x, weight.codes, weight.scales, weight.bias, out, before=kind, norm=norm.weight if norm else None,
            eps=norm.eps if norm else 0.0, add=add, gate=gate, following=self._following.get(weight),
        )  # fmt: skip

    def _before(self, before: Norm | Gate | None) -> tuple[int, Norm | None]:
        """What a kernel does to x first, as its number, and the norm's weights."""
        if isinstance(before, Gate):
            return ACTIVATIONS[before.activation], None
        return (rows_.NOTHING, None) if before is None else (rows_.NORM, self._narrow(before))

    def _prepared(self, x: Tensor, before: Norm | Gate | None) -> Tensor:
        if isinstance(before, Norm):
            return rows_.rms_norm(x, before.weight, before.eps)
        return rows_.gated(x, ACTIVATIONS[before.activation]) if isinstance(before, Gate) else x

    def _narrow(self, norm: Norm) -> Norm:
        """The norm with its weight in the activations' type, where that loses nothing: half the bytes to read."""
        found = self._norms.get(norm)
        if found is None:
            narrow = norm.weight.to(self.dtype)
            found = self._norms[norm] = Norm(narrow, norm.eps) if torch.equal(narrow.float(), norm.weight) else norm
        return found

    def argmax(self, logits: Tensor) -> Tensor:
        tokens = logits.argmax(dim=-1)  # a NaN counts as the largest
        best = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return torch.where(best.isnan(), -1, tokens)

    # ---- attention -----------------------------------------------------------------------------------------------

    def attend(self, qkv: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int) -> Tensor:
        cut = self._cut(batch, attention)
        width = attention.heads * attention.head_dim
        out = torch.empty(qkv.shape[0], width, dtype=qkv.dtype, device=qkv.device)
        streams = isinstance(batch, DeviceBatch) and batch.streams and cut.cascade is None
        if streams and kv.format != "fp8":  # compiled for fp8, the fused kernel weighs the newest token wrongly
            attend_singles(qkv, attention, kv, batch, group, out, self.scratch, cut, fused=True)
            return out
        if cut.queries and draft_decode.serves(attention, kv, batch, group):
            return draft_decode.draft_attention(
                qkv, attention, kv, batch, group, out, self.scratch, queries=cut.queries
            )
        q, k = rotate_and_store(qkv, attention, kv, batch, group, keep_k=bool(cut.long), streams=streams)
        if cut.cascade is not None:
            members, shared = cut.cascade
            cascade_attention(
                q, attention, kv, batch, group, self.scratch, members=members, shared=shared, splits=cut.splits
            )
        if cut.single_count:
            attend_singles(q, attention, kv, batch, group, out, self.scratch, cut, fused=False)
        if cut.tiles is not None:
            prefill_attention(
                q, attention, kv, batch, group, out, cut.tiles, splits=cut.tile_splits, queries=cut.queries
            )
        for request, (first, count, context) in zip(cut.long, cut.rows, strict=True):
            v = qkv[:, -attention.kv_heads * attention.head_dim :]
            table = batch.groups[group].tables[request]
            out = attend_long(q, k, v, attention, kv, table, first, count, context, out)
        return out

    def attend_latent(
        self, q: Tensor, kv: Tensor, attention: LatentAttention, cache: KVLayer, batch: Batch, group: int
    ) -> Tensor:
        assert isinstance(attention.key_up, FloatMatrix) and isinstance(attention.value_up, FloatMatrix)
        rows, heads, latent = q.shape[0], attention.heads, attention.latent
        query, sums, out = (
            torch.empty(rows, heads, width, dtype=q.dtype, device=q.device)
            for width in (latent + attention.rope_dim, latent, attention.value_dim)
        )
        streams = isinstance(batch, DeviceBatch) and batch.streams
        if streams and rows <= FEW_STREAMS and heads <= FEW_HEADS and not self.one_order:
            enter(q, kv, query, attention.key_up.weight, attention, cache, batch, group)
            parts = few_heads_parts(query, attention, cache, batch, group, self.scratch, None, rows)
            leave(parts, attention, attention.value_up.weight, batch, out)
            return out.flatten(1)
        plain = q.unflatten(1, (heads, -1))[:, :, : attention.plain_dim]
        head_product(plain, attention.key_up.weight, query[:, :, :latent])
        store_latents(q, kv, query, attention, cache, batch, group, streams)
        cut = self._cut(batch, attention)
        if cut.single_count:
            latent_attention(
                query, attention, cache, batch, group, sums, self.scratch, tiles=cut.singles, count=cut.single_count,
                splits=cut.splits, single=True, exact=self.one_order,
            )  # fmt: skip
        if cut.tiles is not None:
            splits = split_count(batch.groups[group].tables.shape[1] * BLOCK) if cut.tile_splits > 1 else 0
            latent_attention(
                query, attention, cache, batch, group, sums, self.scratch, tiles=cut.tiles, count=cut.tiles.shape[0],
                splits=splits, single=False, exact=self.one_order,
            )  # fmt: skip
        head_product(sums, attention.value_up.weight, out)
        return out.flatten(1)

    def attend_compressed(
        self, parts: CompressedRows, attention: CompressedAttention, cache: KVLayer, batch: Batch, group: int
    ) -> Tensor:
        return self.compressed.attend(parts, attention, ((cache, group), *cache.further), batch)

    def kind(self, attention: AnyAttention) -> AttentionKind:
        if isinstance(attention, CompressedAttention):
            return UNDIVIDED
        found = self._kinds.get(attention)
        if found is None:
            latent = isinstance(attention, LatentAttention)
            found = self._latent_kind(attention) if latent else self._kind(attention)  # type: ignore[arg-type]
            self._kinds[attention] = found
        return found

    def _latent_kind(self, attention: LatentAttention) -> AttentionKind:
        rows, heads = latent_tile(self.dtype, attention.heads, self.one_order)
        return AttentionKind(rows // heads, False, -(-attention.heads // heads), 0)

    def _kind(self, attention: Attention) -> AttentionKind:
        share = attention.heads // attention.kv_heads
        queries = tile_rows(self.dtype, attention.head_dim, share) // share
        plain = attention.window == 0 and attention.softcap == 0 and attention.sinks is None
        members = 0 if attention.window else members_of_tile(attention)
        return AttentionKind(queries, plain and self._dense_ok(attention), attention.kv_heads, members)

    def _dense_ok(self, attention: Attention) -> bool:
        return self.dtype == torch.bfloat16 and self.device.type == "cuda" and attention.head_dim in (64, 128)

    def _cut(self, batch: Batch, attention: Attention | LatentAttention) -> Cut:
        """The same for every layer of its kind, so made once a step."""
        kind = self.kind(attention)
        if isinstance(batch, DeviceBatch) and batch.cuts is not None:
            return batch.cuts[kind]
        if self._cuts[0] is not batch:
            self._cuts = (batch, {})
        found = self._cuts[1].get(kind)
        if found is None:
            found = self._cuts[1][kind] = self._make_cut(batch, kind)
        return found

    def _make_cut(self, batch: Batch, kind: AttentionKind) -> Cut:
        known = isinstance(batch, DeviceBatch) and batch.counts is not None and batch.lengths is not None
        counts = batch.counts if known else np.diff(batch.starts.cpu().numpy())  # type: ignore[attr-defined]
        lengths = batch.lengths if known else batch.contexts.cpu().numpy()  # type: ignore[attr-defined]
        if isinstance(batch, DeviceBatch) and batch.streams:
            return Cut(None, batch.contexts.shape[0], batch.splits or split_count(int(lengths.max())), None, 1)
        mine = cut_step(counts, lengths, kind)
        singles, tiles = self._upload(mine.singles), self._upload(mine.tiles)
        return Cut(
            singles, len(mine.singles), mine.splits, tiles if len(mine.tiles) else None, mine.tile_splits,
            mine.long, mine.rows,
        )  # fmt: skip

    def _upload(self, array: np.ndarray) -> Tensor:
        """Waits for the device, as every copy from memory that is not pinned does."""
        return torch.from_numpy(array).to(self.device)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix. A wide result of many rows is made in parts: cuBLAS is 8 % faster on them (L2 keeps the weights)."""
    if x.shape[0] < 2 * WIDE_ROWS or matrix.shape[1] < 16384:
        return torch.mm(x, matrix)
    out = torch.empty(x.shape[0], matrix.shape[1], dtype=x.dtype, device=x.device)
    parts = -(-x.shape[0] // WIDE_ROWS)
    for a, b in zip(x.chunk(parts), out.chunk(parts), strict=True):
        torch.mm(a, matrix, out=b)
    return out
