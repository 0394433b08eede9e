"""The state of an answer in its grammar, and the masks of a step: which tokens may come next. Torch-free.

A state is a pure function of the grammar and the answer's tokens. It is kept to save time only: after a preemption,
after a failed step or in another process it is computed again from the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from twostroke.errors import InputError
from twostroke.grammar.budget import GrammarBudgets
from twostroke.grammar.compile import GrammarCompiler
from twostroke.grammar.library import GrammarError, next_tokens, reason
from twostroke.types import Choice, RequestState, Status

SPECIAL = b"\xff"  # before the number of a token that is no text, in the library's bytes
DEAD = "the grammar allows no token here that this model can write"
TOO_SHORT = "the grammar's text is complete before min_tokens"


class GrammarState:
    """Where an answer stands in its grammar."""

    def __init__(self, start: Any):
        """start: the library's matcher at the start of the grammar. It is copied and stays at the start."""
        self._start = start
        self._matcher = start.deep_copy()
        self.tokens: list[int] = []  # consumed so far

    def advance(self, token: int) -> None:
        """Consume one token."""
        if not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} does not continue the grammar's text: {reason(self._matcher)}")
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        if not 0 <= count <= len(self.tokens):
            raise ValueError(f"cannot take back {count} of {len(self.tokens)} tokens")
        if count == 0:
            return
        del self.tokens[len(self.tokens) - count :]
        if not self._matcher.rollback(count):  # after an error the library cannot go back
            self._matcher = self._start.deep_copy()
            if self.tokens and not self._matcher.consume_tokens(self.tokens):
                raise GrammarError(reason(self._matcher))

    def follow(self, tokens: Sequence[int], start: int) -> None:
        """Move to the end of tokens[start:]. Answers only grow, so comparing the last consumed token is enough."""
        known = len(self.tokens)
        if known > len(tokens) - start or (known and tokens[start + known - 1] != self.tokens[-1]):
            common = _common(self.tokens, tokens[start:])
            self.rollback(known - common)
        for token in tokens[start + len(self.tokens) :]:
            self.advance(token)

    def forced_bytes(self) -> bytes:
        """What every continuation of the text starts with, up to a token that is no text. A copy is asked: the library
        leaves a matcher in an error where the forced text reaches such a token."""
        return bytes(self._matcher.deep_copy().compute_ff_bytes()).partition(SPECIAL)[0]

    def next_tokens(self) -> tuple[np.ndarray, bool]:
        """Booleans by token id, and whether the text may end here."""
        return next_tokens(self._matcher)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


class RowMasks(NamedTuple):
    """What grammars say of each row of the logits: the tokens that a grammar allows, or why its request cannot go
    on."""

    allowed: dict[int, np.ndarray]
    errors: dict[int, str]
    unmasked: frozenset[int] = frozenset()  # rows after a draft that the grammar rejects: nothing is chosen there


NO_MASKS = RowMasks({}, {})


class GrammarRows:
    """The grammar states of all running requests that have a grammar, by request id."""

    def __init__(self, compiler: GrammarCompiler):
        self.compiler = compiler
        self.states: dict[int, tuple[RequestState, GrammarState]] = {}
        self.budgets = GrammarBudgets(compiler.max_gap)

    def masks(self, choices: Sequence[Choice]) -> RowMasks:
        """choices: those of one step, in the order of their rows of logits; a request's own are adjacent."""
        if self.states:
            self._forget_finished()
        if all(choice.request.params.grammar is None for choice in choices):
            return NO_MASKS
        bound = [choice.request for choice in choices if choice.request.params.grammar is not None]
        self.budgets.begin_step(bound, (request for request, _ in self.states.values()))
        allowed: dict[int, np.ndarray] = {}
        errors: dict[int, str] = {}
        unmasked: set[int] = set()
        row = 0
        for _, mine in groupby(choices, key=lambda choice: id(choice.request)):
            verified = list(mine)
            if verified[0].request.params.grammar is not None:
                try:
                    self._mask_rows(verified, row, allowed)
                except (GrammarError, InputError) as error:
                    errors[row] = str(error)
                    self.states.pop(verified[0].request.id, None)
                unmasked.update(set(range(row, row + len(verified))) - allowed.keys())
            row += len(verified)
        return RowMasks(allowed, errors, frozenset(unmasked))

    def forced_bytes(self, request: RequestState) -> bytes:
        """What every continuation of a request's answer starts with; none before the first masks of its answer."""
        known = self.states.get(request.id)
        if known is None or known[0] is not request:
            return b""
        try:
            with self.budgets.charge(request):
                known[1].follow(request.tokens, request.prompt_length)
                return known[1].forced_bytes()
        except GrammarError:  # the masks of the next step meet it again, and say so
            del self.states[request.id]
            return b""

    def _mask_rows(self, choices: list[Choice], row: int, allowed: dict[int, np.ndarray]) -> None:
        """The masks of one request. Rows after a draft that the grammar forbids need none: they are rejected."""
        request = choices[0].request
        state = self._state(request)
        with self.budgets.charge(request, again=max(0, choices[0].output_length - len(state.tokens) - 1)):
            state.follow(choices[0].tokens, request.prompt_length)
        allowed[row] = self._mask(state, choices[0])
        taken = 0
        try:
            for index, choice in enumerate(choices[1:], 1):
                draft = choice.tokens[-1]
                if not allowed[row + index - 1][draft] or draft in choice.request.stop_ids:
                    break
                with self.budgets.charge(request):
                    state.advance(draft)
                taken += 1
                allowed[row + index] = self._mask(state, choice)
        except GrammarError:  # the text cannot go on after this draft
            del self.states[request.id]  # the library cannot leave an error: computed again when needed
        else:
            state.rollback(taken)

    def _mask(self, state: GrammarState, choice: Choice) -> np.ndarray:
        with self.budgets.charge(choice.request):
            return allowed_tokens(state, choice, self.compiler.vocab)

    def _state(self, request: RequestState) -> GrammarState:
        known = self.states.get(request.id)
        if known is not None and known[0] is request:
            return known[1]
        assert request.params.grammar is not None
        state = GrammarState(self.compiler.compile(request.params.grammar))
        self.states[request.id] = (request, state)
        return state

    def _forget_finished(self) -> None:
        for number in [n for n, (request, _) in self.states.items() if request.status is Status.FINISHED]:
            del self.states[number]


def allowed_tokens(state: GrammarState, choice: Choice, vocab: int) -> np.ndarray:
    """The mask of one choice: tokens that continue the text and, where the text may end, end tokens.

    End tokens are never text. With ignore_eos, and before min_tokens, the text goes on for as long as it can.
    """
    request = choice.request
    allowed, may_end = state.next_tokens()
    allowed = allowed[:vocab]
    ends = list(request.stop_ids)
    allowed[ends] = False
    too_short = choice.output_length < request.params.min_tokens
    if may_end and not ((too_short or request.params.ignore_eos) and allowed.any()):
        if too_short:
            raise GrammarError(TOO_SHORT)
        allowed[ends] = True
    if not allowed.any():
        raise GrammarError(DEAD)
    return allowed
