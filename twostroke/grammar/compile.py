"""Compiled grammars of one vocabulary. Torch-free."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from twostroke.config import DEFAULT_GAP
from twostroke.errors import InputError
from twostroke.grammar.check import GrammarChecker
from twostroke.grammar.lark import to_lark
from twostroke.grammar.library import GrammarError, compile_lark, make_tokenizer, token_table
from twostroke.sampling import Grammar
from twostroke.text.tokenizer import Tokenizer

COMPILED = 64  # how many grammars are kept ready


class GrammarCompiler:
    """Compiles grammars and keeps them. Thread-safe; one thread can compile while another takes steps."""

    def __init__(
        self, tokenizer: Tokenizer, vocab: int, max_gap: Callable[[], float] = lambda: DEFAULT_GAP["cpu"]
    ) -> None:
        """vocab: rows of the logits, which may be more or fewer than the tokenizer's tokens. max_gap: the setting as it
        is now, from which the time that a grammar may take follows."""
        self.vocab = vocab
        self.max_gap = max_gap
        self.checker = GrammarChecker(tokenizer, vocab)
        self._tokenizer = tokenizer
        self._library_tokenizer: Any = None
        self._ready: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()  # of what is ready; not held while a grammar is compiled
        self._reading = threading.Lock()  # of the library's tokenizer

    def prepare(self, grammar: Grammar) -> None:
        """Try a grammar and compile it. InputError if it is wrong, matches nothing, or takes too much."""
        if self._known(grammar) is not None:
            return
        self.checker.prepare(grammar)
        try:
            self.compile(grammar)
        except GrammarError as error:
            raise InputError(f"grammar: {error}.") from None

    def compile(self, grammar: Grammar) -> Any:
        """The library's matcher at the start of a grammar that was tried before. Copy it to move it."""
        matcher = self._known(grammar)
        if matcher is None:
            self.warm()
            matcher = compile_lark(self._library_tokenizer, to_lark(grammar))
            with self._lock:
                self._ready[grammar] = matcher
                if len(self._ready) > COMPILED:
                    self._ready.popitem(last=False)
        return matcher

    def warm(self) -> None:
        """Read the vocabulary. It takes up to a second, in which no other thread runs; later calls return at once."""
        with self._reading:
            if self._library_tokenizer is None:
                self._library_tokenizer = make_tokenizer(token_table(self._tokenizer, self.vocab))

    def close(self) -> None:
        """End the process that tries grammars."""
        self.checker.close()

    def _known(self, grammar: Grammar) -> Any:
        with self._lock:
            matcher = self._ready.get(grammar)
            if matcher is not None:
                self._ready.move_to_end(grammar)
            return matcher
