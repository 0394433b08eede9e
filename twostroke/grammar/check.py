"""Tries a new grammar in a child process with limits before it is used: some need minutes, or crash the process.

`GrammarChecker` asks, `main` answers in the child. Torch-free.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from twostroke.confined import AccidentError, Confined, JsonMessage, LimitError, WallTimeError, answer_messages
from twostroke.errors import InputError, TwostrokeError
from twostroke.grammar.lark import to_lark
from twostroke.grammar.library import GrammarError, TokenTable, compile_lark, make_tokenizer, next_tokens, token_table
from twostroke.sampling import Grammar
from twostroke.text.tokenizer import Tokenizer

CPU_SECONDS = 2.0  # to compile a grammar and take its first steps
STEP_SECONDS = 0.1  # CPU time of one step
STEPS = 24
MEMORY = 1 << 30  # bytes beyond what the vocabulary takes
VERDICTS = 1024  # how many are remembered
TOO_MUCH = "takes more time or memory to compile than a request may use; make it simpler"


class NotCheckedError(TwostrokeError):
    """A grammar could not be tried, for a reason that has nothing to do with it: try again."""


class GrammarChecker:
    """Decides whether a grammar can be used. Thread-safe; verdicts are remembered, one grammar is tried at a time.

    What an accident ends (the child is killed or stopped, or other processes take its time) has no verdict.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """vocab: rows of the logits."""
        self.process = Confined(
            "twostroke.grammar.check",
            lambda: token_table(tokenizer, vocab)._asdict(),
            seconds=CPU_SECONDS,
            memory=MEMORY,
        )
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # "" or what is wrong
        self._lock = threading.Lock()  # of the verdicts; not held while a grammar is tried

    def prepare(self, grammar: Grammar) -> None:
        """InputError if the grammar cannot be used, NotCheckedError if that could not be found out."""
        key = _digest(grammar)
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._try(grammar)
        with self._lock:
            self._verdicts[key] = verdict
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict:
            raise InputError(f"grammar: {verdict}.")

    def knows(self, grammar: Grammar) -> bool:
        """Whether `prepare` answers at once."""
        with self._lock:
            return _digest(grammar) in self._verdicts

    def _try(self, grammar: Grammar) -> str:
        try:
            return str(self.process.ask({"kind": grammar.kind, "source": grammar.source})["error"])
        except (AccidentError, WallTimeError):
            raise NotCheckedError("grammar: it could not be tried now, send the request again.") from None
        except LimitError:
            return TOO_MUCH

    def warm(self) -> None:
        """Start the child process, so that the first caller does not wait for it."""
        self.process.start()

    def close(self) -> None:
        self.process.close()


def _digest(grammar: Grammar) -> bytes:
    return blake2b(f"{grammar.kind} {grammar.source}".encode(), digest_size=16).digest()


# ---- in the child --------------------------------------------------------------------------------------------------


def main() -> None:
    def prepare(setup: JsonMessage) -> Any:
        table = TokenTable(**setup)
        tokenizer = make_tokenizer(table)
        return lambda message: {"error": _tried(tokenizer, table.ends, Grammar(message["kind"], message["source"]))}

    answer_messages(prepare)


def _tried(tokenizer: Any, ends: list[int], grammar: Grammar) -> str:
    """Compile the grammar and walk a few random steps. What is wrong with it, or ""."""
    try:
        matcher = compile_lark(tokenizer, to_lark(grammar))
        choice = random.Random(0)
        for step in range(STEPS):
            started = time.process_time()
            allowed, may_end = next_tokens(matcher)
            allowed[ends] = False
            choices = allowed.nonzero()[0]
            if not len(choices) and not may_end:
                return "matches no text that this model can write" if step == 0 else ""
            if not len(choices):
                return ""
            matcher.consume_token(int(choice.choice(choices)))
            if time.process_time() - started > STEP_SECONDS:
                return "takes too long to follow; make it simpler"
    except (InputError, GrammarError) as error:
        return str(error).removeprefix("grammar.source: ").rstrip(".")
    return ""
