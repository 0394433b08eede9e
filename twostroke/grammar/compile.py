"""Grammars as masks: which tokens may come next in an answer that must belong to a language. Torch-free.

The state of a grammar is a pure function of the grammar and the answer's tokens. It is kept beside the request only to
save time: after a preemption, a failed step or in another process it is made again from the tokens.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from twostroke.errors import InputError
from twostroke.grammar.check import GrammarChecker
from twostroke.grammar.library import GrammarError, compile_lark, make_tokenizer, next_tokens, reason
from twostroke.grammar.text import to_lark
from twostroke.sampling import Grammar
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import Choice, RequestState, Status

COMPILED = 64  # grammars kept ready
STEP_SECONDS = 1.0  # CPU that one mask may take before its request is ended; fuel ends it long before

DEAD = "the grammar allows no token here that this model can write"
TOO_SHORT = "the grammar's text is complete before min_tokens"
TOO_SLOW = "the grammar takes too long to follow"


class GrammarState:
    """Where an answer stands in its grammar."""

    def __init__(self, start: Any):
        """start: the library's matcher at the grammar's start; it is copied, never moved."""
        self._start = start
        self._matcher = start.deep_copy()
        self.tokens: list[int] = []  # taken in so far

    def advance(self, token: int) -> None:
        """Take one token in."""
        if not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} does not continue the grammar's text: {reason(self._matcher)}")
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if not 0 <= count <= len(self.tokens):
            raise ValueError(f"cannot take back {count} of {len(self.tokens)} tokens")
        if count == 0:
            return
        del self.tokens[len(self.tokens) - count :]
        if not self._matcher.rollback(count):  # an error in the grammar cannot be taken back, the start can be copied
            self._matcher = self._start.deep_copy()
            if self.tokens and not self._matcher.consume_tokens(self.tokens):
                raise GrammarError(reason(self._matcher))

    def follow(self, tokens: Sequence[int], start: int) -> None:
        """Be at the end of tokens[start:], from wherever this state is. Answers only grow: their ends tell enough."""
        known = len(self.tokens)
        if known > len(tokens) - start or (known and tokens[start + known - 1] != self.tokens[-1]):
            common = _common(self.tokens, tokens[start:])
            self.rollback(known - common)
        for token in tokens[start + len(self.tokens) :]:
            self.advance(token)

    def next_tokens(self) -> tuple[np.ndarray, bool]:
        """Booleans by token id, and whether the text may end here."""
        return next_tokens(self._matcher)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest beginning that both have."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


class GrammarCompiler:
    """Compiled grammars of one vocabulary. Thread-safe, and made to compile in one thread while another takes steps."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        """vocab: rows of the logits, which may be more or fewer than the tokenizer's words."""
        self.words = Words(tokenizer, vocab)
        self.checker = GrammarChecker(self.words.as_message)
        self._tokenizer: Any = None
        self._ready: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()  # of what is ready; never held while something is compiled
        self._building = threading.Lock()

    def prepare(self, grammar: Grammar) -> None:
        """Try a grammar and compile it. InputError if it is wrong, matches nothing, or takes too much."""
        if self._known(grammar) is not None:
            return
        self.checker.prepare(grammar)
        try:
            self.compile(grammar)
        except GrammarError as error:
            raise InputError(f"grammar: {error}.") from None

    def state(self, grammar: Grammar) -> GrammarState:
        """A state at the start of a grammar. One that nobody compiled before, or that was dropped, is compiled here."""
        return GrammarState(self.compile(grammar))

    def compile(self, grammar: Grammar) -> Any:
        """For a grammar that was tried where its request was taken in: compile it, and keep it ready."""
        matcher = self._known(grammar)
        if matcher is None:
            self.warm()
            matcher = compile_lark(self._tokenizer, to_lark(grammar))
            with self._lock:
                self._ready[grammar] = matcher
                if len(self._ready) > COMPILED:
                    self._ready.popitem(last=False)
        return matcher

    def warm(self) -> None:
        """Read the vocabulary: a second for a large one, in which this process does nothing else. Once is enough."""
        with self._building:
            if self._tokenizer is None:
                words = self.words
                self._tokenizer = make_tokenizer(words.spelled(), words.special(), words.ends())

    def _known(self, grammar: Grammar) -> Any:
        with self._lock:
            matcher = self._ready.get(grammar)
            if matcher is not None:
                self._ready.move_to_end(grammar)
            return matcher


class Words:
    """The vocabulary as the grammar library wants it: one entry for each row of the logits."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self.tokenizer = tokenizer
        self.vocab = vocab

    def spelled(self) -> list[bytes]:
        return [self.tokenizer.token_bytes(number) for number in range(self.vocab)]

    def special(self) -> list[int]:
        """Tokens that are no text: a grammar has them only where it names them."""
        return sorted(number for number in self.tokenizer.special_ids if number < self.vocab)

    def ends(self) -> list[int]:
        return sorted(number for number in self.tokenizer.eos_ids if number < self.vocab)

    def as_message(self) -> dict[str, Any]:
        words = [word.decode("latin-1") for word in self.spelled()]
        return {"words": words, "special": self.special(), "ends": self.ends()}


class RowMasks(NamedTuple):
    """By row of the logits: the tokens a grammar allows, or why its request cannot go on."""

    allowed: dict[int, np.ndarray]
    errors: dict[int, str]
    unmasked: frozenset[int] = frozenset()  # rows after a draft that the grammar does not go on from: choose nothing


NO_MASKS = RowMasks({}, {})


class GrammarRows:
    """The states of all requests under way that have a grammar, by request id."""

    def __init__(self, compiler: GrammarCompiler):
        self.compiler = compiler
        self.states: dict[int, tuple[RequestState, GrammarState]] = {}

    def masks(self, choices: Sequence[Choice]) -> RowMasks:
        """choices: those of one step, in the order of their rows of logits; a request's own are adjacent."""
        if self.states:
            self._forget_finished()
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

    def _mask_rows(self, choices: list[Choice], row: int, allowed: dict[int, np.ndarray]) -> None:
        """The masks of one request. Rows after a draft that the grammar forbids need none: they are rejected."""
        state = self._state(choices[0].request)
        state.follow(choices[0].tokens, choices[0].request.prompt_length)
        allowed[row] = self._mask(state, choices[0])
        taken = 0
        try:
            for index, choice in enumerate(choices[1:], 1):
                draft = choice.tokens[-1]
                if not allowed[row + index - 1][draft] or draft in choice.request.stop_ids:
                    break
                state.advance(draft)
                taken += 1
                allowed[row + index] = self._mask(state, choice)
        except GrammarError:
            allowed.pop(row + taken, None)  # the text cannot go on after this draft
        state.rollback(taken)

    def _mask(self, state: GrammarState, choice: Choice) -> np.ndarray:
        started = time.thread_time()
        mask = allowed_tokens(state, choice, self.compiler.words.vocab)
        if time.thread_time() - started > STEP_SECONDS:
            raise GrammarError(TOO_SLOW)
        return mask

    def _state(self, request: RequestState) -> GrammarState:
        known = self.states.get(request.id)
        if known is not None and known[0] is request:
            return known[1]
        assert request.params.grammar is not None
        state = self.compiler.state(request.params.grammar)
        self.states[request.id] = (request, state)
        return state

    def _forget_finished(self) -> None:
        for number in [n for n, (request, _) in self.states.items() if request.status is Status.FINISHED]:
            del self.states[number]


def allowed_tokens(state: GrammarState, choice: Choice, vocab: int) -> np.ndarray:
    """The mask of one request: what continues the text and, where the text may end, what ends it.

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
