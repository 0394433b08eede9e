"""Graphs that are captured a few layers at a time, while the host would wait for the device.

Capturing a step takes the host several times as long as the device needs for it. A step that verifies drafts is worth
that only if drafts go on, and nothing waits for it: such steps run without their drafts until the graph is complete.

Layers are rehearsed before they are captured: they run over padding. What is made at a first run (compiled kernels,
scratch memory, checks of products) must not be made inside a capture.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

LAYERS = 2  # of one graph: about two milliseconds of the host, with their rehearsal

Pieces = Generator[Tensor, None, Tensor]  # a step with a pause after each layer; it returns the tokens


@contextmanager
def capturing(pool: Any) -> Iterator[Any]:
    """A graph of what is launched meanwhile on the current stream. Garbage is collected later: memory of another
    engine that is freed now would end the capture."""
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


class Chain:
    """Graphs that make one step together."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def replay(self) -> None:
        for graph in self.graphs:
            graph.replay()


class Capture:
    """A step's graphs in the making."""

    def __init__(self, rehearsal: Pieces, recording: Pieces, pool: Any):
        """rehearsal: the same step over padding."""
        self.rehearsal, self.recording, self.pool = rehearsal, recording, pool
        self.chain = Chain()

    @torch.inference_mode()
    def advance(self) -> Tensor | None:
        """Capture the next layers, on the current stream. Returns the tensor of the tokens when all are captured."""
        run_layers(self.rehearsal)
        with capturing(self.pool) as graph:
            tokens = run_layers(self.recording)
        self.chain.graphs.append(graph)
        return tokens


def run_layers(pieces: Pieces) -> Tensor | None:
    """The next few of them; with the last ones the head, and the tokens."""
    for _ in range(LAYERS):
        try:
            next(pieces)
        except StopIteration as end:
            return end.value
    return None
