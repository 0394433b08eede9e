"""The CPU backend in torch calls alone. Exact: a row's bits depend on nothing but the row (tiles.py, cpu_attention.py).

One trap shapes the elementwise code: torch computes silu, gelu and sigmoid with one formula in the vector body of a
tensor and another in its tail, so an element's bits depend on its place. exp, tanh and the arithmetic operators do not
have that flaw (the tests hold them to it), so activations are spelled out with those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.ops.cpu_attention import Stack, attend_stack, cut_step, store, token_stride
from twostroke.ops.formats import Stored, dequantize
from twostroke.ops.interface import BLOCK, Attention, Batch, Gate, KVLayer, Norm, RopeTable
from twostroke.ops.tiles import tiled_product

_COLUMNS = 8192  # widest matrix of one product: bounds the cost of finding its tiles
_CACHED = 1 << 16  # elements that several passes go over: 256 KiB
_CAST = 1 << 18  # weights cast at a time when they are stored narrower than float32: 1 MiB, inside a core's cache


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Transposed runs of columns, (in, columns) each: in this order a BLAS treats nearly all row counts alike."""

    columns: tuple[Tensor, ...]
    bias: Tensor | None  # (out,)
    inputs: int
    outputs: int


class TorchCpuOps:
    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype = torch.float32):
        """dtype: how weights are kept. float16 and bfloat16 halve the memory and cost a cast in every product."""
        self.dtype = dtype
        self._step = Step(None)

    # ---- weights -------------------------------------------------------------------------------------------------

    def pack(self, parts: Sequence[Stored], bias: Tensor | None = None) -> Matrix:
        inputs, outputs = parts[0].shape[1], sum(part.shape[0] for part in parts)
        limit = _COLUMNS if self.dtype == torch.float32 else max(64, _CAST // inputs)
        width = even_width(outputs, limit)
        columns = [torch.empty(inputs, min(width, outputs - a), dtype=self.dtype) for a in range(0, outputs, width)]
        start = 0
        for part in parts:
            step = max(1, (1 << 24) // inputs)  # decode a little at a time: no float copy of the whole matrix
            for a in range(0, part.shape[0], step):
                rows = torch.from_numpy(dequantize(part.rows(a, min(a + step, part.shape[0]))))
                place_rows(columns, width, start + a, rows)
            start += part.shape[0]
        return Matrix(tuple(columns), bias, inputs, outputs)

    def weight_bytes(self, weight: Matrix) -> int:
        return sum(c.nbytes for c in weight.columns)

    def embed(self, table: Matrix, tokens: Tensor, scale: float) -> Tensor:
        width = table.columns[0].shape[1]
        out = torch.empty(tokens.shape[0], table.inputs)
        run = tokens // width
        for index in run.unique().tolist():
            mine = (run == index).nonzero().flatten()
            out[mine] = table.columns[index].index_select(1, tokens[mine] - index * width).T.float()
        return out.mul_(scale) if scale != 1.0 else out

    # ---- one row at a time, many rows at once --------------------------------------------------------------------

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rms = (length * length).div_(x.shape[-1]).add_(norm.eps).sqrt_()
        return (x / rms).mul_(norm.weight)

    def linear(
        self, x: Tensor, weight: Matrix, *, before: Norm | Gate | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        if isinstance(before, Norm):
            x = self.norm(x, before)
        elif isinstance(before, Gate):
            x = gated(x, before)
        parts = [tiled_product(x, columns.float()) for columns in weight.columns]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if weight.bias is not None:
            out += weight.bias
        return out if add_to is None else add_to.add_(out)

    def argmax(self, logits: Tensor) -> Tensor:
        tokens = logits.argmax(dim=-1)  # a NaN counts as the largest
        best = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return torch.where(best.isnan(), -1, tokens)

    # ---- attention -----------------------------------------------------------------------------------------------

    def attend(self, qkv: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int) -> Tensor:
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
        if self._step.batch is not batch:
            self._step = Step(batch)
        step = self._step
        entries = qkv.view(-1, heads + 2 * kv_heads, dim)
        qk, v = entries[:, : heads + kv_heads], entries[:, heads + kv_heads :]
        if attention.query_norm is not None and attention.key_norm is not None:
            normed = (self.norm(qk[:, :heads], attention.query_norm), self.norm(qk[:, heads:], attention.key_norm))
            qk = torch.cat(normed, dim=1)
        if attention.rope is not None:
            qk = rotated(qk, *step.turns(attention.rope))
        store(kv, step.places(group, kv), qk[:, heads:], v)
        q = qk[:, :heads] * attention.scale
        out = torch.empty(q.shape)
        for stack in step.stacks(group, attention, kv):
            attend_stack(q, out, attention, kv, stack)
        return out.flatten(1)


class Step:
    """What all layers of one step share, worked out by the first that asks."""

    def __init__(self, batch: Batch | None):
        self.batch = batch
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}
        self._places: dict[tuple[int, int, int], Tensor] = {}
        self._stacks: dict[tuple[int, int, int, int, int, int], list[Stack]] = {}

    def turns(self, rope: RopeTable) -> tuple[Tensor, Tensor]:
        """cos and sin of the step's rows, (T, 1, rotary_dim / 2)."""
        assert self.batch is not None
        if id(rope) not in self._turns:
            rows = self.batch.positions
            self._turns[id(rope)] = (rope.cos[rows].unsqueeze(1), rope.sin[rows].unsqueeze(1))
        return self._turns[id(rope)]

    def places(self, group: int, kv: KVLayer) -> Tensor:
        """Rows of the pool that the step's K and V are written to, (T · kv_heads,)."""
        assert self.batch is not None
        key = (group, token_stride(kv), kv.keys.shape[1])
        if key not in self._places:
            slots = self.batch.groups[group].slots
            rows = slots // BLOCK * key[1] + slots % BLOCK
            self._places[key] = (rows[:, None] + torch.arange(key[2]) * BLOCK).flatten()
        return self._places[key]

    def stacks(self, group: int, attention: Attention, kv: KVLayer) -> list[Stack]:
        assert self.batch is not None
        a, stride = attention, token_stride(kv)
        key = (group, stride, a.window, a.heads, a.kv_heads, a.head_dim)
        if key not in self._stacks:
            self._stacks[key] = cut_step(self.batch, group, attention, stride)
        return self._stacks[key]


def even_width(total: int, limit: int) -> int:
    """Width of the runs that `total` columns are cut into: at most `limit`, nearly equal, whole cache lines."""
    runs = -(-total // limit)
    return min(total, -(-total // runs // 64) * 64) if runs > 1 else total


def place_rows(columns: list[Tensor], width: int, start: int, rows: Tensor) -> None:
    """Put rows (n, in) of the matrix, `start` on, into the transposed runs."""
    done = 0
    while done < rows.shape[0]:
        index, offset = divmod(start + done, width)
        count = min(width - offset, rows.shape[0] - done)
        columns[index][:, offset : offset + count] = rows[done : done + count].T
        done += count


def gated(x: Tensor, gate: Gate) -> Tensor:
    """A few rows at a time, so that the passes over them stay in a core's cache."""
    width = x.shape[1] // 2
    out = torch.empty(x.shape[0], width)
    step = max(1, _CACHED // width)
    for start in range(0, x.shape[0], step):
        rows = x[start : start + step]
        activate(rows[:, :width], out[start : start + step], gate).mul_(rows[:, width:])
    return out


def activate(x: Tensor, out: Tensor, gate: Gate) -> Tensor:
    if gate.activation == "silu":
        torch.neg(x, out=out).exp_().add_(1)
        return torch.div(x, out, out=out)
    torch.mul(x, x, out=out).mul_(x).mul_(0.044715).add_(x).mul_((2 / torch.pi) ** 0.5)
    return out.tanh_().add_(1).mul_(x).mul_(0.5)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, heads, D); cos and sin (T, 1, rotary_dim / 2)."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty(x.shape)
    torch.mul(first, cos, out=out[..., :half]).sub_(second * sin)
    torch.mul(second, cos, out=out[..., half : 2 * half]).add_(first * sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
