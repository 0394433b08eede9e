"""Several residual streams (ops/streams.py) on the GPU. Their mixing matrices are float32 tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.ops.cuda.kernels.streams import collapse, expand
from twostroke.ops.cuda.sending import Sender
from twostroke.ops.formats import Stored
from twostroke.ops.streams import StreamKernels, StreamMix


class CudaStreams(StreamKernels):
    def __init__(self, sender: Sender):
        self.sender = sender

    def pack(self, parts: Sequence[Stored]) -> Tensor:
        return self.sender.stacked(parts, torch.float32)

    def collapse(self, x: Tensor, mix: StreamMix) -> tuple[Tensor, Tensor]:
        return collapse(x, mix, self.sender.dtype)

    def expand(self, x: Tensor, result: Tensor, weights: Tensor, streams: int) -> Tensor:
        return expand(x, result, weights, streams)
