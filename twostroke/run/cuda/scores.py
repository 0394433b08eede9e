"""Log probabilities as the device makes them (ops/cuda/kernels/scores.py), on their way back to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twostroke.run.sample import LEAST
from twostroke.run.step import PromptRows
from twostroke.types import RequestState, TokenLogprobs


class Scores:
    """The scores of some rows of logits. They may be read once the device is done."""

    def __init__(self, rows: Sequence[int], table: Tensor):
        """rows: of the logits, in the order of the table's lines. table: as `best_scores` makes it, on the host."""
        self.lines, self.table = {row: line for line, row in enumerate(rows)}, table
        self.known: tuple[list[float], list[list[float]], list[list[int]]] | None = None

    def of(self, row: int, token: int, best: int) -> TokenLogprobs:
        """Log probabilities of the model's own distribution, as `logprobs` in run/sample.py makes them."""
        own, values, ids = self.known = self.known or self._read()
        line = self.lines[row]
        return TokenLogprobs(token, own[line], tuple(zip(ids[line][:best], values[line][:best], strict=True)))

    def of_prompt(self, prompt: PromptRows, request: RequestState) -> dict[int, TokenLogprobs]:
        """By position. The rows are those of the prompt's tokens."""
        positions, best = range(prompt.position, prompt.position + prompt.count), request.params.prompt_logprobs or 0
        return {position: self.of(row, request.tokens[position], best) for row, position in enumerate(positions)}

    def _read(self) -> tuple[list[float], list[list[float]], list[list[int]]]:
        table = self.table.numpy()
        best = (table.shape[1] - 2) // 2
        scores = np.maximum(table[:, 1 : 2 + best] - table[:, :1], LEAST)
        ids = np.nan_to_num(table[:, 2 + best :]).astype(np.int64)
        return scores[:, 0].tolist(), scores[:, 1:].tolist(), ids.tolist()


def to_host(table: Tensor) -> Tensor:
    """A copy that the device fills when it is done."""
    out = torch.empty(table.shape, dtype=table.dtype, pin_memory=table.device.type == "cuda")
    return out.copy_(table, non_blocking=True)
