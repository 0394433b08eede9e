"""Five hundred damaged GGUF files that still open. Each of them generates, or its answers end with an error: no file
makes the process crash or hang."""

from __future__ import annotations

import random
import select
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile import tiny_gguf
from tests.serve.server import ROOT
from tests.weights.test_damage import Mutation, flip, splice_number

pytestmark = pytest.mark.slow  # many files

WANTED = 500  # files that open
MOST = 4000  # files that are tried
SECONDS = 600.0  # for one file: only a process that hangs needs so long
KINDS = ("Q4_1", "Q6_K", "F16", "Q8_0")
BAD_FLOATS = (float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e-45, 3e38)
BAD_COUNTS = (0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
COUNTS = (
    b"llama.context_length", b"llama.attention.head_count", b"llama.vocab_size", b"llama.block_count",
    b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id", b"llama.feed_forward_length",
)  # fmt: skip


def bad_weights(data: bytes, rng: random.Random) -> bytes:
    """Random bytes in a stretch of the weights: scales become NaN, infinite and huge."""
    changed, begin = bytearray(data), data_start(data)
    for _ in range(rng.choice([1, 4, 40])):
        at, length = rng.randrange(begin, len(data)), rng.choice([1, 2, 200])
        changed[at : at + length] = rng.randbytes(len(changed[at : at + length]))
    return bytes(changed)


def bad_floats(data: bytes, rng: random.Random) -> bytes:
    """Extreme halves and floats at places where they may be scales or norms."""
    changed, begin = bytearray(data), data_start(data)
    for _ in range(rng.choice([1, 3, 30])):
        at, form = rng.randrange(begin, len(data) - 4) & ~1, rng.choice(["<e", "<f"])
        value = rng.choice(BAD_FLOATS)
        raw = struct.pack("<H", 0x7BFF) if form == "<e" and value == 3e38 else struct.pack(form, value)
        changed[at : at + len(raw)] = raw
    return bytes(changed)


def bad_metadata(data: bytes, rng: random.Random) -> bytes:
    """Another value of one entry."""
    if rng.random() < 0.3:
        at = data.index(b"llama.attention.layer_norm_rms_epsilon") + len(b"llama.attention.layer_norm_rms_epsilon") + 4
        return data[:at] + struct.pack("<f", rng.choice(BAD_FLOATS)) + data[at + 4 :]
    key = rng.choice(COUNTS)
    at = data.index(key) + len(key) + 4  # behind the type
    return data[:at] + struct.pack("<I", rng.choice(BAD_COUNTS)) + data[at + 4 :]


def bad_vocabulary(data: bytes, rng: random.Random) -> bytes:
    """Bytes of tokens, merges and the chat template."""
    begin, end = data.index(b"tokenizer.ggml.tokens"), data.index(b"token_embd.weight")
    return data[:begin] + flip(data[begin:end], rng) + data[end:]


def in_header(mutate: Mutation) -> Mutation:
    def changed(data: bytes, rng: random.Random) -> bytes:
        begin = data_start(data)
        return mutate(data[:begin], rng) + data[begin:]

    return changed


def data_start(data: bytes) -> int:
    """A place behind the header: the last name of a tensor, and what is said of it."""
    return -(-(data.rindex(b"output_norm.weight") + 50) // 32) * 32


MUTATIONS: tuple[Mutation, ...] = (
    bad_weights, bad_floats, bad_metadata, bad_vocabulary, in_header(flip), in_header(splice_number), bad_weights,
    bad_floats,
)  # fmt: skip


class Child:
    """The process that opens the files."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.hostile.generate_each"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, path: Path) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(path, file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], SECONDS)[0]:
            return f"hung: no answer within {SECONDS} s"
        return self.process.stdout.readline() or f"crashed with exit status {self.process.wait()}"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    running = Child()
    yield running
    running.end()


def test_five_hundred_mutated_files_that_open(tmp_path: Path, child: Child) -> None:
    good = [tiny_gguf.write(tmp_path / f"{kind}.gguf", kind).read_bytes() for kind in KINDS]
    mutant = tmp_path / "mutant.gguf"
    words: Counter[str] = Counter()
    opened: Counter[str] = Counter()
    for case in range(MOST):
        if sum(opened.values()) >= WANTED:
            break
        rng = random.Random(case)
        mutate = MUTATIONS[case % len(MUTATIONS)]
        mutant.unlink(missing_ok=True)  # a mapped file must not change
        mutant.write_bytes(mutate(good[case // len(MUTATIONS) % len(KINDS)], rng))
        answer = child.ask(mutant)
        word = answer.split()[0]
        assert word in ("refused", "generated", "failed"), f"case {case}: {answer}"
        words[word] += 1
        opened[mutate.__name__] += word != "refused"
    print(f"\n{dict(words)}; that opened: {dict(opened)}")
    assert words["generated"] + words["failed"] >= WANTED
    assert words["failed"] > WANTED // 20, "too few mutations reach the numbers"
