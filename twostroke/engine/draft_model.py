"""The draft model's checkpoint, and whether it fits the target."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from twostroke.embed.description import is_embedder_at
from twostroke.engine.intake import open_tokenizer
from twostroke.errors import ConfigError, ModelError
from twostroke.model.arch import Arch
from twostroke.text.tokenizer import Tokenizer
from twostroke.weights.checkpoint import Checkpoint, locate, open_checkpoint
from twostroke.weights.describe import load_arch
from twostroke.weights.files import OnProgress


class DraftCheckpoint(NamedTuple):
    checkpoint: Checkpoint
    arch: Arch


def open_draft(
    model: str | Path | None, target: Arch, tokenizer: Tokenizer, progress: OnProgress | None
) -> DraftCheckpoint | None:
    """model: None for an engine without a draft model. ConfigError where it cannot draft for the target."""
    if model is None:
        return None
    try:
        path = locate(model, progress)
        if is_embedder_at(path):
            raise ModelError(f"{model}: makes vectors and writes no text. Use a smaller model of the same family.")
        checkpoint = open_checkpoint(path)
        arch = load_arch(checkpoint)
    except ModelError as error:
        raise ModelError(f"draft_model: {error}") from None
    difference = vocabulary_difference(tokenizer, open_tokenizer(checkpoint))
    if difference:
        raise ConfigError(
            f"draft_model {str(model)!r} has another vocabulary than the model ({difference}): its tokens would mean "
            "other text. Use a smaller model of the same family."
        )
    if arch.weights >= target.weights:
        raise ConfigError(
            f"draft_model {str(model)!r} has {arch.weights:,} weights, the model itself {target.weights:,}: a draft "
            "model must be smaller."
        )
    return DraftCheckpoint(checkpoint, arch)


def vocabulary_difference(mine: Tokenizer, other: Tokenizer) -> str:
    """The first token id that means something else in the other vocabulary, in words; empty: they agree. One of them
    may be longer by tokens without text."""
    for number in range(max(mine.vocab_size, other.vocab_size)):
        here, there = mine.token_bytes(number), other.token_bytes(number)
        if here != there and here and there:
            return f"token {number} is {here!r} in one and {there!r} in the other"
        if bool(here) != bool(there) and number not in mine.special_ids | other.special_ids:
            return f"token {number} is {here or there!r} in one and unknown to the other"
    return ""
