"""The lists of what requests change in their logits, as the device takes them (ops/cuda/kernels/edits.py).

A penalty counts the tokens of an answer, or of the prompt too. The list of a request is kept from step to step, so a
step adds what is new. It is a pure function of the tokens: after a preemption it goes on, and another process makes it
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from twostroke.run.sample import needs_adjusting
from twostroke.types import Choice, RequestState, Status

ListPair = tuple[np.ndarray, np.ndarray]  # ids, and a number for each: int32
NOTHING: ListPair = (np.zeros(0, np.int32), np.zeros(0, np.int32))


class TokenCounts:
    """Tokens, each once, and a count for each."""

    def __init__(self, tokens: Iterable[int] = ()):
        """tokens: with a count of 0."""
        self.places = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
        size = len(self.places)
        self._pairs = np.zeros((2, max(64, 2 * size)), np.int32)
        self._pairs[0, :size] = list(self.places)

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            place = self.places.setdefault(token, len(self.places))
            if place == self._pairs.shape[1]:
                self._pairs = np.concatenate((self._pairs, np.zeros_like(self._pairs)), axis=1)
            self._pairs[0, place] = token
            self._pairs[1, place] += 1

    def copy(self) -> TokenCounts:
        same = TokenCounts()
        same.places, same._pairs = dict(self.places), self._pairs.copy()
        return same

    def lists(self) -> ListPair:
        ids, counts = self._pairs[:, : len(self.places)]
        return ids, counts


class SeenTokens:
    """The tokens of one request, and how often its answer holds each."""

    def __init__(self, request: RequestState):
        self.request = request
        everything = request.params.repetition_penalty != 1.0
        self.counts = TokenCounts(request.tokens[: request.prompt_length] if everything else ())
        self.counted = request.prompt_length  # tokens of the request that are counted, or need not be

    def lists(self, tokens: Sequence[int]) -> ListPair:
        """tokens: of the request, and drafts after them that may be taken back."""
        certain = min(len(tokens), len(self.request.tokens))
        self.counts.add(tokens[self.counted : certain])
        self.counted = max(self.counted, certain)
        if len(tokens) == certain:
            return self.counts.lists()
        tried = self.counts.copy()
        tried.add(tokens[certain:])
        return tried.lists()


class Edits(NamedTuple):
    """What `EditLists` has on the device."""

    places: np.ndarray
    penalties: np.ndarray
    ids: np.ndarray
    values: np.ndarray


class EditedRows:
    """The lists of all running requests with penalties, by request id."""

    def __init__(self) -> None:
        self.seen: dict[int, SeenTokens] = {}

    def edits(self, choices: Iterable[tuple[int, Choice]]) -> Edits:
        """choices: with their rows of logits."""
        self._forget_finished()
        places, penalties, pairs = list[tuple[int, ...]](), list[tuple[float, ...]](), [NOTHING]
        end = 0
        for row, choice in choices:
            if not needs_adjusting(choice):
                continue
            request, params, begin = choice.request, choice.request.params, end
            ahead = -1 if len(choice.tokens) == choice.position else request.row
            ends = []
            for pair in (self._tokens(choice), biases(choice), stops(choice)):
                if len(pair[0]):
                    pairs.append(pair)
                    end += len(pair[0])
                ends.append(end)
            places.append((row, ahead, begin, *ends))
            penalties.append((params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
        ids, values = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return Edits(
            np.array(places, np.int32).reshape(-1, 6), np.array(penalties, np.float32).reshape(-1, 3), ids, values
        )  # fmt: skip

    def _tokens(self, choice: Choice) -> ListPair:
        request, params = choice.request, choice.request.params
        if params.repetition_penalty == 1.0 and not params.presence_penalty and not params.frequency_penalty:
            return NOTHING
        seen = self.seen.get(request.id)
        if seen is None or seen.request is not request:
            seen = self.seen[request.id] = SeenTokens(request)
        return seen.lists(choice.tokens)

    def _forget_finished(self) -> None:
        for number in [n for n, seen in self.seen.items() if seen.request.status is Status.FINISHED]:
            del self.seen[number]


def biases(choice: Choice) -> ListPair:
    given = choice.request.params.logit_bias
    if not given:
        return NOTHING
    return np.array(list(given), np.int32), np.array(list(given.values()), np.float32).view(np.int32)


def stops(choice: Choice) -> ListPair:
    """The tokens that would end the answer before its minimal length."""
    if choice.output_length >= choice.request.params.min_tokens:
        return NOTHING
    ids = np.array(list(choice.request.stop_ids), np.int32)
    return ids, np.zeros_like(ids)
