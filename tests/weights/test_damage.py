"""Damaged files of every kind: our own error or a successful read, in bounded time and memory, and nothing else."""

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from twostroke.errors import ModelError
from twostroke.ops.formats import dequantize
from twostroke.weights.checkpoint import open_checkpoint

CASES = 400
Mutation = Callable[[bytes, random.Random], bytes]


def good_gguf(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(50)])
    writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(50)])
    writer.add_array("tokenizer.ggml.flags", [True, False] * 5)
    for i in range(3):
        writer.add_tensor(f"blk.{i}.weight", np.ones((4, 32), np.float32))
        raw = np.zeros((4, 34), np.uint8)
        writer.add_tensor(f"blk.{i}.packed", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def good_safetensors(path: Path) -> bytes:
    save_file({f"layer.{i}.weight": np.ones((4, 8), np.float32) for i in range(6)}, path)
    return path.read_bytes()


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def splice_number(data: bytes, rng: random.Random) -> bytes:
    """Put an extreme integer somewhere: the classic way to an overflow or a giant allocation."""
    value = rng.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1, len(data), len(data) * 8])
    width = rng.choice([4, 8])
    at = rng.randrange(len(data) - width)
    return data[:at] + struct.pack("<Q", value)[:width] + data[at + width :]


def shuffle(data: bytes, rng: random.Random) -> bytes:
    """Repeat or drop a stretch, as a broken download does."""
    a, b, c = sorted(rng.randrange(len(data)) for _ in range(3))
    return data[:b] + data[a:b] + data[c:]


def header_only(mutate: Mutation, length: int) -> Mutation:
    """Keep the damage where it is interesting: in a small file most bytes are weights, which may hold anything."""
    return lambda data, rng: mutate(data[:length], rng) + data[length:]


def open_bounded(path: Path, size: int) -> bool:
    """True when it opened. Memory may grow with the file (objects cost more than bytes), not with its claims."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        checkpoint = open_checkpoint(path)
        for stored in checkpoint.tensors.values():
            dequantize(stored)
        return True
    except ModelError:
        return False
    finally:
        assert tracemalloc.get_traced_memory()[1] - before < 30 * size + 500_000


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("mutate", [cut, flip, splice_number, shuffle])
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
@pytest.mark.usefixtures("traced")
def test_fuzz(tmp_path: Path, kind: str, mutate: Mutation) -> None:
    path = tmp_path / f"model.{kind}"
    data = good_gguf(path) if kind == "gguf" else good_safetensors(path)
    if kind == "safetensors":
        (tmp_path / "config.json").write_text("{}")
    target = path if kind == "gguf" else tmp_path
    assert open_bounded(target, len(data))
    head = data.index(b"layer") if kind == "safetensors" else 0
    rng = random.Random(f"{kind} {mutate.__name__}")
    refused = 0
    for case in range(CASES):
        damage = header_only(mutate, max(head, len(data) // 2)) if case % 2 and mutate is not cut else mutate
        path.write_bytes(damage(data, rng))
        refused += not open_bounded(target, len(data))
    assert refused > CASES // 10  # the mutations do hit the parts that matter


@pytest.mark.usefixtures("traced")
def test_every_cut_of_a_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = good_gguf(path)
    needed = len(data.rstrip(b"\0"))  # the writer pads the end; a cut there loses nothing
    for length in range(0, needed - 4 * 34, 7):
        path.write_bytes(data[:length])
        assert not open_bounded(path, len(data)), f"cut at {length}"


@pytest.mark.usefixtures("traced")
def test_many_tiny_things_stay_proportional(tmp_path: Path) -> None:
    """The worst ratio of objects to bytes: empty strings, empty nested arrays, one-letter keys."""
    path = tmp_path / "m.gguf"
    count = 15_000
    strings = struct.pack("<Q", 1) + b"s" + struct.pack("<IIQ", 9, 8, count) + bytes(8 * count)
    arrays = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 9, count) + struct.pack("<IQ", 0, 0) * count
    keys = b"".join(struct.pack("<Q", 8) + b"%08x" % i + struct.pack("<IB", 0, 1) for i in range(count))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2 + count) + strings + arrays + keys)
    assert open_bounded(path, path.stat().st_size)
