"""A rank of a GPU's engine in a process of its own, on a CPU under Triton's interpreter."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton

import torch

from tests import interpreter
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.exact import ExactCudaOps
from twostroke.ranks import cards
from twostroke.ranks import rank as rank_main


def interpreted(device: str, dtype: str, threads: int, quantize: str | None, exact: bool) -> CudaOps:
    assert device == "cuda"
    return ExactCudaOps(torch.float32, "cpu") if exact else CudaOps(torch.float32, "cpu", quantize)


def main(descriptor: str) -> None:
    interpreter.prepare()
    cards.make_ops = interpreted  # type: ignore[assignment]
    cards.take_card = lambda number: None
    cards.free_on_card = lambda: 5000
    rank_main.main(descriptor)
