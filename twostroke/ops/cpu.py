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

from twostroke.ops.cpu_attention import Stack, attend_stack, cut_pieces, row_counts, stack_pieces
from twostroke.ops.formats import Stored, dequantize
from twostroke.ops.interface import Attention, Batch, Gate, KVLayer, Norm, RopeTable
from twostroke.ops.kv_codec import write_kv
from twostroke.ops.tiles import tiled_product

_COLUMNS = 8192  # widest matrix of one product: bounds the cost of finding its tiles
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
        self._stacks: tuple[Batch | None, dict[tuple[int, int, int, int, int], list[Stack]]] = (None, {})

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
        for index, columns in enumerate(table.columns):
            mine = (tokens // width == index).nonzero().flatten()
            if len(mine):
                out[mine] = columns[:, tokens[mine] - index * width].T.float()
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
        if len(weight.columns) == 1:
            out = product(x, weight.columns[0])
        else:
            out = torch.cat([product(x, columns) for columns in weight.columns], dim=1)
        if weight.bias is not None:
            out += weight.bias
        return out if add_to is None else add_to.add_(out)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    # ---- attention -----------------------------------------------------------------------------------------------

    def attend(self, qkv: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int) -> Tensor:
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
        q, k, v = qkv.view(-1, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)
        if attention.query_norm is not None:
            q = self.norm(q, attention.query_norm)
        if attention.key_norm is not None:
            k = self.norm(k, attention.key_norm)
        if attention.rope is not None:
            cos, sin = (t[batch.positions].unsqueeze(1) for t in (attention.rope.cos, attention.rope.sin))
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        write_kv(kv, batch.groups[group].slots, k, v)
        q = q * attention.scale
        out = torch.empty_like(q)
        for stack in self._stacks_of(batch, group, attention):
            attend_stack(q, out, attention, kv, stack)
        return out.flatten(1)

    def _stacks_of(self, batch: Batch, group: int, attention: Attention) -> list[Stack]:
        """How the step's rows are stacked: the same for every layer of a group, so found once for a batch."""
        if self._stacks[0] is not batch:
            self._stacks = (batch, {})
        share, sizes = attention.heads // attention.kv_heads, row_counts(attention.head_dim, torch.get_num_threads())
        key = (group, attention.window, share, attention.kv_heads, attention.head_dim)
        found = self._stacks[1].get(key)
        if found is None:
            pieces = cut_pieces(batch, attention.window, share, attention.kv_heads, sizes)
            tables = batch.groups[group].tables
            found = stack_pieces(pieces, tables, attention.window, share, attention.kv_heads, sizes)
            self._stacks[1][key] = found
        return found


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


def product(x: Tensor, columns: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], columns.shape[1])
    return tiled_product(x, columns.float(), out)


def gated(x: Tensor, gate: Gate) -> Tensor:
    left, up = x.chunk(2, dim=-1)
    if gate.activation == "silu":
        return (left / left.neg().exp_().add_(1)).mul_(up)
    inner = (left * left).mul_(left).mul_(0.044715).add_(left).mul_((2 / torch.pi) ** 0.5)
    return inner.tanh_().add_(1).mul_(left).mul_(0.5).mul_(up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, heads, D); cos and sin (T, 1, rotary_dim / 2)."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty(x.shape)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


__all__ = ["Matrix", "RopeTable", "TorchCpuOps"]
