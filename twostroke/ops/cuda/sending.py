"""Matrices on their way from a file to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.ops.cuda.weights import as_tensor
from twostroke.ops.formats import Stored

STAGED = 1 << 25  # elements that are sent at a time


class Sender:
    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self._staged: list[tuple[Tensor, torch.cuda.Event]] = []  # pinned memory, and when its last part was sent

    def stacked(self, parts: Sequence[Stored], dtype: torch.dtype | None = None) -> Tensor:
        """One matrix of all parts, in `dtype` (None: that of the activations)."""
        width = parts[0].shape[1]
        out = torch.empty(sum(part.shape[0] for part in parts), width, dtype=dtype or self.dtype, device=self.device)
        start = 0
        for part in parts:
            step = max(1, STAGED // width)  # decode a little at a time: no float copy of the whole matrix
            for a in range(0, part.shape[0], step):
                rows = as_tensor(part.rows(a, min(a + step, part.shape[0])))
                self._send(rows, out[start : start + rows.shape[0]])
                start += rows.shape[0]
        return out

    def forget(self) -> None:
        """All matrices are there."""
        self._staged.clear()

    def _send(self, rows: Tensor, out: Tensor) -> None:
        """Large copies go through pinned memory, in turns: several threads fill one part while another is sent."""
        alike = rows.dtype == out.dtype == self.dtype
        if self.device.type != "cuda" or not alike or rows.numel() < STAGED // 16:
            out.copy_(rows)
            return
        if not self._staged:
            self._staged = [(torch.empty(STAGED, dtype=self.dtype, pin_memory=True), torch.cuda.Event()) for _ in "ab"]
        self._staged.reverse()
        buffer, sent = self._staged[0]
        sent.synchronize()
        buffer[: rows.numel()].view(rows.shape).copy_(rows)
        out.copy_(buffer[: rows.numel()].view(rows.shape), non_blocking=True)
        sent.record()
