"""Of which layers a start compiles the attention."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.random_weights import random_model, turns
from twostroke.model.arch import Arch, DenseArch, GroupedArch, LayerArch
from twostroke.ops.cuda.backend import CudaOps
from twostroke.run.cuda.warm_up import kinds_of_attention


def test_layers_with_windows_and_sinks_are_kinds_of_their_own() -> None:
    """Each has kernels of its own, though some share a way of dividing steps."""
    forms = ((None, False), (24, False), (None, True), (24, True), (24, True), (None, False))
    mixers = [GroupedArch(2, 1, 16, window, turns(16, 100.0), sinks=sinks) for window, sinks in forms]
    layers = tuple(LayerArch(mixer, DenseArch(32)) for mixer in mixers)
    arch = Arch(family="llama", vocab=64, hidden=32, layers=layers, max_positions=64, norm_eps=1e-5)
    model = random_model(arch, CudaOps(torch.float32, "cpu"), 64)
    assert kinds_of_attention(model) == [0, 1, 2, 3]
