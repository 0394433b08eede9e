"""A drafter that knows the answer, with errors put in: what it proposes must never change a token."""

from __future__ import annotations

import random
from collections.abc import Sequence

from twostroke.types import UNWRITTEN, Plan, RequestState, Result


class OracleDrafter:
    """answers: by (prompt, temperature) the tokens of each sample. Proposes up to `most` of them, each wrong with
    probability `errors`; of a request that it does not know, tokens drawn at random. last: of the vocabulary."""

    def __init__(self, answers: dict[tuple, list[list[int]]], most: int, errors: float, seed: int = 0, last: int = 299):
        self.answers, self.most, self.errors, self.last = answers, most, errors, last
        self.rng = random.Random(seed)
        self.proposed = 0

    def begin(self, streams: Sequence[RequestState]) -> bool:
        return True

    def reads(self, request: RequestState) -> bool:
        return False

    def catches_up(self, request: RequestState) -> bool:
        return False

    def waits(self) -> bool:
        return True

    def learn(self, plan: Plan, result: Result, seconds: float, elapsed: float) -> None:
        pass

    def forget(self, request: RequestState) -> None:
        pass

    def propose(self, request: RequestState, most: int) -> Sequence[int]:
        count = min(most, self.rng.randint(0, self.most))
        prompt = tuple(request.tokens[: request.prompt_length])
        samples = self.answers.get((prompt, request.params.temperature))
        known = samples[request.sample] if samples is not None and request.sample < len(samples) else []
        draft = known[request.output_length :][:count]
        draft = [token if self.rng.random() >= self.errors else self.rng.randint(3, self.last) for token in draft]
        draft += [self.rng.randint(3, self.last) for _ in range(count - len(draft))]
        self.proposed += len(draft)
        return draft


class RandomModelDrafter(OracleDrafter):
    """Lets the draft model write at random: it reads some prompts, misses parts of texts, and catches up at times."""

    def __init__(self, most: int, seed: int = 0):
        super().__init__({}, most, 0.0, seed)
        self.caught_up = 0

    def reads(self, request: RequestState) -> bool:
        return self.rng.random() < 0.8

    def catches_up(self, request: RequestState) -> bool:
        missed = request.drafted < len(request.tokens) - 1 and self.rng.random() < 0.5
        self.caught_up += missed
        return missed

    def propose(self, request: RequestState, most: int) -> Sequence[int]:
        count = min(most, self.rng.randint(0, self.most))
        self.proposed += count
        return (UNWRITTEN,) * count
