"""Steps of a model that is divided among ranks, each with a card (ranks/group.py): rank 0 tells the others of a step,
in the bytes that it sends to its own card, and they run the same layers.

A token of a step still in flight is known on rank 0's card alone, so the cards exchange the tokens at the start of a
step. Nothing else differs: no rank waits for its card, and rank 0 plans the next step while one runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from twostroke.errors import RankLostError
from twostroke.kv.storage import KVStorage
from twostroke.model.parallel import ParallelTransformer
from twostroke.model.transformer import Transformer
from twostroke.ops.cuda.backend import CudaOps
from twostroke.run.array_messages import decode, encode
from twostroke.run.cuda.batches import attention_kinds, make_batch
from twostroke.run.cuda.collective import Collective
from twostroke.run.cuda.staging import Staging
from twostroke.run.cuda.steps import Known, Shape

LOOK_SECONDS = 0.05  # between two looks for ranks that are gone, while rank 0 waits for its card


class StepMessage(NamedTuple):
    """A step as rank 0 tells the others of it."""

    shape: Shape
    prompt_rows: int  # whose logits are wanted beside those that choose
    known: Known | None
    numbers: np.ndarray  # int32, all arrays of the step one after the other

    def packed(self) -> bytes:
        return encode(self)

    @classmethod
    def unpacked(cls, body: bytes) -> StepMessage:
        return decode(body, cls)


class Lead(NamedTuple):
    """What rank 0 has of the others."""

    collective: Collective
    tell: Callable[[bytes], None]  # of a step
    lost: Callable[[], bool]  # whether one of them is gone
    reserve: Callable[[int], None]  # blocks of the cache, on each
    free: Callable[[], int]  # bytes of memory on the card that has the fewest

    def wait(self, event: torch.cuda.Event) -> None:
        """A card whose sum misses a part would wait for ever."""
        look = time.monotonic() + LOOK_SECONDS
        while not event.query():
            if time.monotonic() > look:
                if self.lost():
                    self.collective.close()
                    raise RankLostError("a rank is gone")
                look = time.monotonic() + LOOK_SECONDS
            time.sleep(0)


class LeadingTransformer(ParallelTransformer):
    """Rank 0's part of a model on cards. Its runner tells the other ranks of a step."""

    def __init__(self, *parts: Any, lead: Lead, **more: Any):
        super().__init__(*parts, sum_ranks=lead.collective.sum, **more)
        self.lead = lead


def lead_of(model: Transformer) -> Lead | None:
    return model.lead if isinstance(model, LeadingTransformer) else None


class Follower:
    """Any other rank: its part of the model, and its part of the cache once it knows how large that is."""

    def __init__(self, model: ParallelTransformer, ops: CudaOps, collective: Collective):
        self.model, self.collective = model, collective
        self.kinds, self.shares_steps = attention_kinds(model, ops), ops.shares_steps
        self.staging = Staging(ops.device)
        model.sum_ranks = collective.sum

    @torch.inference_mode()
    def step(self, body: bytes, kv: KVStorage) -> None:
        message = StepMessage.unpacked(body)
        arrays = message.shape.arrays(len(kv.layout.groups), message.prompt_rows)
        self.staging.begin(arrays)
        self.staging.filled(arrays)[:] = message.numbers
        there = arrays.views(self.staging.send(arrays))
        self.collective.share(there["tokens"])
        batch = make_batch(message.shape, there, there["tokens"], self.kinds, message.known, self.shares_steps)
        self.model.forward(batch, kv)
