"""Tries a grammar in a process of its own, where it may run out of time, memory or stack and take nobody with it.

Both ends are here: `GrammarChecker` asks, `main` answers in the child. They speak JSON lines. The child limits its own
CPU time and memory, so that it also ends when nobody is left to stop it. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from twostroke.errors import InputError
from twostroke.sampling import Grammar

CPU_SECONDS = 2.0  # to compile a grammar and take its first steps
WALL_SECONDS = 20.0  # the same on a machine with other things to do
START_SECONDS = 60.0
STEP_SECONDS = 0.1  # CPU of one step
STEPS = 24
MEMORY = 1 << 30  # bytes beyond what the vocabulary takes
VERDICTS = 1024  # remembered
TOO_MUCH = "takes more time or memory to compile than a request may use; make it simpler"


class GrammarChecker:
    """Says whether a grammar is fit for use. Thread-safe; verdicts are remembered, one grammar is tried at a time."""

    def __init__(self, vocabulary: Callable[[], dict[str, Any]]):
        """vocabulary: what the child makes its tokenizer from, asked for when it starts."""
        self._vocabulary = vocabulary
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # "" or what is wrong
        self._child: _Child | None = None
        self._lock = threading.Lock()

    def prepare(self, grammar: Grammar) -> None:
        """InputError if the grammar cannot be used."""
        key = blake2b(f"{grammar.kind} {grammar.source}".encode(), digest_size=16).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is None:
                verdict = self._verdicts[key] = self._try(grammar)
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict:
            raise InputError(f"grammar: {verdict}.")

    def warm(self) -> None:
        """Start the child, so that the first caller need not wait for it."""
        with self._lock:
            self._started()

    def _started(self) -> _Child:
        if self._child is None:
            self._child = _Child(self._vocabulary())
        return self._child

    def _try(self, grammar: Grammar) -> str:
        child = self._started()
        reply = child.ask({"kind": grammar.kind, "source": grammar.source}, WALL_SECONDS + 5)
        if reply is None:
            child.end()
            self._child = None
            return TOO_MUCH
        return str(reply["error"])

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.end()
            self._child = None


class _Child:
    """The asking end of one child process."""

    def __init__(self, vocabulary: dict[str, Any]):
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from twostroke.grammar.check import main; main()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip
        self.unread = b""
        self.end = weakref.finalize(self, _end, self.process)  # at the latest when this process ends
        if self.ask(vocabulary, START_SECONDS) is None:
            self.end()
            raise RuntimeError("the process that checks grammars does not start")

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer; None if the child ended or the time is over."""
        assert self.process.stdin is not None
        try:
            data = memoryview(json.dumps(message).encode() + b"\n")
            while data:
                data = data[self.process.stdin.write(data) :]
        except OSError:
            return None
        line = self._line(time.monotonic() + seconds)
        return None if line is None else json.loads(line)

    def _line(self, deadline: float) -> bytes | None:
        assert self.process.stdout is not None
        output = self.process.stdout.fileno()
        while b"\n" not in self.unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                return None
            data = os.read(output, 1 << 16)
            if not data:
                return None
            self.unread += data
        line, _, self.unread = self.unread.partition(b"\n")
        return line


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


# ---- in the child --------------------------------------------------------------------------------------------------


def main() -> None:
    from twostroke.grammar.library import make_tokenizer

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints is not an answer
    vocabulary = json.loads(sys.stdin.readline())
    tokenizer = make_tokenizer(
        [word.encode("latin-1") for word in vocabulary["words"]], vocabulary["special"], vocabulary["ends"]
    )
    _limit_memory()
    _answer(answers, {})
    for line in sys.stdin:
        message = json.loads(line)
        _limit_time(CPU_SECONDS, WALL_SECONDS)
        error = _tried(tokenizer, vocabulary["ends"], Grammar(message["kind"], message["source"]))
        _limit_time(0, 0)
        _answer(answers, {"error": error})


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _limit_time(cpu: float, wall: float) -> None:
    """Both signals end the process, wherever it is."""
    signal.setitimer(signal.ITIMER_PROF, cpu)
    signal.setitimer(signal.ITIMER_REAL, wall)


def _limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # not everywhere
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _tried(tokenizer: Any, ends: list[int], grammar: Grammar) -> str:
    """Compile it and walk a few random steps. What is wrong with it, or nothing."""
    from twostroke.grammar.library import GrammarError, compile_lark, next_tokens
    from twostroke.grammar.text import to_lark

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
