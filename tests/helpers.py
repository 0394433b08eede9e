"""Run a Transformer over token sequences with trivially allocated KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.ops.tensors import batch_arrays
from twostroke.kv.layout import make_layout
from twostroke.kv.storage import KVStorage
from twostroke.model.transformer import Transformer
from twostroke.ops.interface import BLOCK, Batch, GroupBlocks, KVFormat


class Sequences:
    """Several token sequences growing side by side in one pool; every sequence has its own, scattered blocks."""

    def __init__(self, model: Transformer, count: int, length: int, kv_format: KVFormat = "float32", seed: int = 0):
        layout = make_layout(model.arch, kv_format)
        self.model, self.groups = model, len(layout.groups)
        self.columns = -(-length // BLOCK)
        blocks = count * self.columns * self.groups
        self.kv = KVStorage(layout, blocks, kv_format, model.ops.device)
        self.kv.data[:] = 255  # what a pool holds before it is written must not matter: all ones are not a number
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        self.tables = order.view(self.groups, count, self.columns)
        self.computed = [0] * count

    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Compute the given new tokens of the given sequences in one batch; logits of every row, in order."""
        logits = self.model.logits(self.model.forward(self.batch(work), self.kv))
        return torch.from_numpy(logits) if self.model.ops.device is None else logits

    def batch(self, work: Sequence[tuple[int, Sequence[int]]]) -> Batch:
        """The given new tokens of the given sequences, which count as computed; all rows' logits are wanted.
        Arrays of the kind that the model computes with."""
        tokens = torch.tensor([t for _, new in work for t in new])
        positions = torch.cat([torch.arange(self.computed[s], self.computed[s] + len(new)) for s, new in work])
        counts = torch.tensor([len(new) for _, new in work])
        owner = torch.repeat_interleave(torch.tensor([s for s, _ in work]), counts)
        for sequence, new in work:
            self.computed[sequence] += len(new)
        batch = Batch(
            tokens=tokens,
            positions=positions,
            starts=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(torch.int32),
            contexts=torch.tensor([self.computed[s] for s, _ in work], dtype=torch.int32),
            groups=tuple(self._group(g, [s for s, _ in work], owner, positions) for g in range(self.groups)),
            logit_rows=torch.arange(len(tokens)),
        )
        device = self.model.ops.device
        return batch_arrays(batch) if device is None else moved(batch, device)

    def _group(self, group: int, sequences: list[int], owner: Tensor, positions: Tensor) -> GroupBlocks:
        entry = self.kv.layout.groups[group].entry
        blocks = self.tables[group][owner, positions // entry.span].long()
        slots = blocks * (entry.span // entry.tokens) + positions % entry.span // entry.tokens
        return GroupBlocks(slots, self.tables[group][sequences])


def moved(batch: Batch, device: torch.device) -> Batch:
    groups = tuple(GroupBlocks(group.slots.to(device), group.tables.to(device)) for group in batch.groups)
    parts = (batch.tokens, batch.positions, batch.starts, batch.contexts)
    tokens, positions, starts, contexts = (part.to(device) for part in parts)
    return Batch(tokens, positions, starts, contexts, groups, batch.logit_rows.to(device))


def run_tokens(
    model: Transformer, tokens: Sequence[int], chunks: Sequence[int] | None = None, kv_format: KVFormat = "float32"
) -> Tensor:
    """Logits at every position of one sequence, computed in chunks of the given sizes (None: one prefill)."""
    sequences = Sequences(model, 1, len(tokens), kv_format)
    out, start = [], 0
    for size in chunks or [len(tokens)]:
        out.append(sequences.step([(0, tokens[start : start + size])]))
        start += size
    assert start == len(tokens)
    return torch.cat(out).cpu()
