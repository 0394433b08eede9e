"""Heads for random models: every token has one successor, by far the most likely one whatever the layers add."""

from __future__ import annotations

import torch

from twostroke.model.transformer import Transformer
from twostroke.ops.cuda.weights import FloatMatrix

LARGE = 30.0  # deviation of the embeddings: the layers' random outputs stay small beside them


def give_successors(model: Transformer, errors: float, seed: int = 0) -> None:
    """errors: the share of tokens whose successor is another one than in a model with none."""
    assert isinstance(model.embedding, FloatMatrix)
    table = model.embedding.weight
    vocab, generator = table.shape[0], torch.Generator().manual_seed(seed)
    successor = torch.randperm(vocab, generator=generator)
    wrong = torch.randperm(vocab, generator=generator)[: round(errors * vocab)]
    successor[wrong] = successor[wrong].roll(1)
    table.mul_(LARGE / table.std())
    assert isinstance(model.head, FloatMatrix)
    if model.head.weight.data_ptr() == table.data_ptr():  # the head was the embedding
        model.head = FloatMatrix(torch.empty_like(table), None)
    head = model.head.weight  # captured steps read it where it is
    head[successor.to(table.device)] = table
    head.mul_(1 / LARGE)
