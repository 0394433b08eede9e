"""The parsers of model files on bytes and values that Hypothesis makes up: a value or one of our errors, in bounded
time and memory."""

from __future__ import annotations

import copy
import json
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import tiny
from tests.text.test_chat import TALK, TEMPLATES, TOOLS
from twostroke.errors import InputError, ModelError
from twostroke.ops.formats import dequantize
from twostroke.text import chat
from twostroke.text.tokenizer import from_folder
from twostroke.weights.gguf import open_gguf
from twostroke.weights.safetensors import open_safetensors

SECONDS = 5.0  # for one file
MEMORY = 4_000_000  # bytes for a file of a few kilobytes
FUZZ = settings(
    max_examples=150, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
NUMBERS = st.sampled_from([0, 1, 2, 7, 31, 32, 33, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
SMALL = st.integers(0, 40)
NAMES = st.sampled_from(
    ["general.architecture", "general.alignment", "split.count", "tokenizer.ggml.tokens", "blk.0.weight", "x", ""]
) | st.text(max_size=12)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@contextmanager
def bounded(memory: int | None = MEMORY) -> Iterator[None]:
    """Only our errors, in time, without memory for sizes that a file merely claims."""
    tracemalloc.start()
    began = time.thread_time()  # whatever else runs here
    try:
        with suppress(ModelError, InputError):
            yield
        assert time.thread_time() - began < SECONDS
        assert memory is None or tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()


# ---- GGUF ----------------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


@st.composite
def gguf_value(draw: Callable[..., Any], depth: int = 0) -> bytes:
    """A type and a value of it, or of another one."""
    kind = draw(st.integers(0, 13))
    if kind == 9 and depth < 3:
        inner = draw(st.integers(0, 13))
        count = draw(SMALL | NUMBERS)
        data = draw(st.binary(max_size=64)) if inner != 9 else draw(gguf_value(depth + 1))
        return struct.pack("<IIQ", 9, inner, count) + data
    if kind == 8:
        return struct.pack("<I", 8) + draw(st.text(max_size=8).map(text) | NUMBERS.map(partial(struct.pack, "<Q")))
    return struct.pack("<I", kind) + draw(st.binary(min_size=0, max_size=8))


@st.composite
def gguf_tensor(draw: Callable[..., Any]) -> bytes:
    sizes = draw(st.lists(SMALL | NUMBERS, max_size=5))
    count = draw(st.just(len(sizes)) | NUMBERS.map(lambda n: n % 2**32))
    kind, place = draw(st.integers(0, 40)), draw(SMALL | NUMBERS)
    return text(draw(NAMES)) + struct.pack("<I", count) + b"".join(struct.pack("<Q", n) for n in sizes) + struct.pack(
        "<IQ", kind, place
    )  # fmt: skip


@st.composite
def gguf_bytes(draw: Callable[..., Any]) -> bytes:
    fields = draw(st.lists(st.tuples(NAMES, gguf_value()), max_size=6))
    tensors = draw(st.lists(gguf_tensor(), max_size=4))
    counts = [draw(st.just(len(found)) | NUMBERS) for found in (tensors, fields)]
    head = b"GGUF" + struct.pack("<IQQ", draw(st.sampled_from([2, 3, 3, 3, 1, 4])), *counts)
    data = head + b"".join(text(name) + value for name, value in fields) + b"".join(tensors)
    return data + draw(st.binary(max_size=300))


@FUZZ
@given(data=gguf_bytes() | st.binary(max_size=200).map(lambda data: b"GGUF" + data) | st.binary(max_size=50))
def test_gguf(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(data)
    with bounded():
        for stored in open_gguf(path).tensors.values():
            dequantize(stored)


# ---- safetensors ---------------------------------------------------------------------------------------------------

ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "X", ""]) | JUNK,
        "shape": st.lists(SMALL | NUMBERS, max_size=4) | JUNK,
        "data_offsets": st.lists(SMALL | NUMBERS | st.integers(-5, 200), max_size=3) | JUNK,
        "more": JUNK,
    },
)


@st.composite
def safetensors_bytes(draw: Callable[..., Any]) -> bytes:
    header = draw(st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), ENTRY | JUNK, max_size=4) | JUNK)
    data = json.dumps(header).encode()
    length = draw(st.just(len(data)) | NUMBERS)
    return struct.pack("<Q", length) + data + draw(st.binary(max_size=200))


@FUZZ
@given(data=safetensors_bytes() | st.binary(max_size=100))
def test_safetensors(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    with bounded():
        for stored in open_safetensors(path).values():
            dequantize(stored)


# ---- tokenizer.json and the files beside it ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("vocabulary"))


def damage(value: Any, data: st.DataObject) -> Any:
    """The same with one part of it replaced or removed."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 5)):
        name = data.draw(st.sampled_from(sorted(value)[:30]))
        if data.draw(st.integers(0, 5)) == 0:
            return {key: inner for key, inner in value.items() if key != name}
        return value | {name: damage(value[name], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 5)):
        place = data.draw(st.integers(0, min(len(value) - 1, 30)))
        return [*value[:place], damage(value[place], data), *value[place + 1 :]]
    return data.draw(JUNK)


FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


@FUZZ
@given(data=st.data())
def test_tokenizer_files(tmp_path_factory: pytest.TempPathFactory, folder: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([FILES[0], *FILES]))
    source = folder / name
    known = json.loads(source.read_text()) if source.is_file() else {"eos_token": "<|im_end|>", "eos_token_id": 2}
    if data.draw(st.integers(0, 9)) == 0:
        written = data.draw(st.binary(max_size=60))
    else:
        written = json.dumps(damage(copy.deepcopy(known), data)).encode()
    place = tmp_path_factory.getbasetemp() / "damaged"
    place.mkdir(exist_ok=True)
    for other in FILES:
        (place / other).unlink(missing_ok=True)
        if other != name and (folder / other).is_file():
            (place / other).write_bytes((folder / other).read_bytes())
    (place / name).write_bytes(written)
    with bounded(memory=None):
        tokenizer = from_folder(place)
        tokenizer.decode(tokenizer.encode("Once upon <|im_end|> 12\n"))
        tokenizer.encode("Once <|im_end|>", parse_special=False)


# ---- chat templates ------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    ["{{", "}}", "{%", "%}", "{#", "#}", " for ", " in ", "messages", " if ", "endif", "endfor", "set x = ", "'", '"',
     "|tojson", ".__class__", "range(10**9)", "loop(", "macro f()", "endmacro", "[0]", ".content", "\\", "\ud800", "\0",
     "namespace()", "raise_exception('x')", "import os", "include 'x'", "extends 'y'", "**", "*10**8", "~"]
) | st.text(max_size=6)  # fmt: skip
ChatTemplate = partial(chat.ChatTemplate, process=chat.renderer())


@st.composite
def templates(draw: Callable[..., Any]) -> str:
    if draw(st.booleans()):
        return "".join(draw(st.lists(PIECES, max_size=12)))
    whole = TEMPLATES[draw(st.sampled_from(sorted(TEMPLATES)))]
    first, last = sorted(draw(st.integers(0, len(whole))) for _ in range(2))
    return whole[:first] + "".join(draw(st.lists(PIECES, max_size=3))) + whole[last:]


@FUZZ
@given(source=templates())
def test_chat_templates(source: str) -> None:
    with bounded(memory=None):
        prompt = ChatTemplate(source).render(TALK, tools=TOOLS)
        assert len(prompt) <= chat.MAX_OUTPUT
