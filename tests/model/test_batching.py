"""Whole models: a sequence's logits have the same bits however its tokens were batched, and with whom."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.helpers import Sequences, run_tokens
from tests.model.test_parity import make_peer, tokens_of
from twostroke.ops.interface import KVFormat
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model

LENGTHS = (150, 61, 17, 90, 3)


@pytest.mark.parametrize(
    ("family", "kv_format"),
    [
        ("llama", "float32"),
        ("llama", "int8"),
        ("qwen2 window", "float16"),
        ("gemma3 scaled", "int4"),
        ("phi3", "bfloat16"),
        ("qwen3_moe", "float32"),
    ],
)
def test_neighbours_and_chunks_do_not_show(family: str, kv_format: KVFormat, tmp_path: Path) -> None:
    make_peer(family, tmp_path)
    model = load_model(open_checkpoint(tmp_path), ReferenceOps(), 256)
    prompts = [tokens_of(length) for length in LENGTHS]
    alone = [run_tokens(model, prompt, kv_format=kv_format) for prompt in prompts]
    dice = random.Random(family)
    for _ in range(3):
        sequences = Sequences(model, len(prompts), max(LENGTHS), kv_format, seed=dice.randrange(99))
        while waiting := [s for s, done in enumerate(sequences.computed) if done < LENGTHS[s]]:
            chosen = dice.sample(waiting, dice.randint(1, len(waiting)))
            starts = [sequences.computed[s] for s in chosen]
            stops = [
                min(LENGTHS[s], start + dice.choice((1, 1, 5, 16, 70))) for s, start in zip(chosen, starts, strict=True)
            ]
            work = [(s, prompts[s][a:b]) for s, a, b in zip(chosen, starts, stops, strict=True)]
            expected = torch.cat([alone[s][a:b] for s, a, b in zip(chosen, starts, stops, strict=True)])
            assert torch.equal(sequences.step(work), expected)
