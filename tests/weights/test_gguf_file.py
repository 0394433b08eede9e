"""GGUF files: what the reference writer wrote comes back, and what cannot be right is refused with a sentence."""

import struct
import time
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from twostroke.errors import ModelError
from twostroke.ops.formats import FORMATS, dequantize, stored_bytes
from twostroke.weights.gguf import open_gguf

U32, STRING, ARRAY = 4, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def build(
    path: Path,
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 32,
    version: int = 3,
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(data))
    return path


def test_metadata_comes_back(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_int32("i32", -70000)
    writer.add_uint64("u64", 2**63 + 1)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e-300)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüß Gott 🙂")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.25, -1.5])
    writer.add_array("bools", [True, False])
    writer.add_array("strings", ["", "a", "ü", "<0x0A>"])
    writer.add_tensor("w", np.arange(6, dtype=np.float32).reshape(2, 3))
    write(writer)
    found = open_gguf(tmp_path / "m.gguf").metadata
    scalars = {k: found[k] for k in ("u8", "i8", "i32", "u64", "f32", "f64", "yes", "text")}
    assert list(scalars.values()) == [200, -5, -70000, 2**63 + 1, 0.5, 1e-300, True, "grüß Gott 🙂"]
    assert found["yes"] is True
    assert type(found["u8"]) is int
    assert found["ints"].tolist() == [1, -2, 3]
    assert found["floats"].tolist() == [0.25, -1.5]
    assert found["bools"].tolist() == [True, False]
    assert found["strings"] == ["", "a", "ü", "<0x0A>"]


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tensors_come_back_in_torch_order(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    rng = np.random.default_rng(0)
    raw = {}
    for name, fmt in FORMATS.items():
        raw[name] = rng.integers(0, 256, (3, 512 // fmt.block * fmt.bytes), dtype=np.uint8)
        writer.add_tensor(name, raw[name], raw_dtype=gguf.GGMLQuantizationType[name])
    floats = rng.standard_normal((2, 3, 5), dtype=np.float32)
    writer.add_tensor("cube", floats)
    write(writer)
    tensors = open_gguf(tmp_path / "m.gguf").tensors
    assert list(tensors) == [*FORMATS, "cube"]
    for name in FORMATS:
        assert (tensors[name].format, tensors[name].shape) == (name, (3, 512))
        assert np.array_equal(tensors[name].data, raw[name].reshape(-1))
    assert np.array_equal(dequantize(tensors["cube"]), floats)


def test_version_2_and_own_alignment_are_read(tmp_path: Path) -> None:
    alignment = entry("general.alignment", U32, struct.pack("<I", 8))
    path = build(tmp_path / "m.gguf", [alignment], [tensor("a"), tensor("b", offset=40)], data=80, version=2)
    assert open_gguf(path).tensors["b"].shape == (8,)


def test_a_large_vocabulary_is_quick(tmp_path: Path) -> None:
    words = struct.pack("<IQ", STRING, 262_144) + b"".join(text(f"token{i}") for i in range(262_144))
    path = build(tmp_path / "m.gguf", [entry("tokens", ARRAY, words)])
    start = time.process_time()
    tokens = open_gguf(path).metadata["tokens"]
    assert time.process_time() - start < 2  # 0.15 s on a quiet core
    assert tokens[-1] == "token262143"


HUGE = 2**64 - 8
BAD = {
    "magic": (b"GGML" + bytes(60), "not a GGUF"),
    "version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "table of"),
    "entry count": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "table of"),
    "empty": (b"", "empty"),
    "short": (b"GGUF\x03", "version"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_headers(tmp_path: Path, case: str) -> None:
    data, reason = BAD[case]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=reason) as caught:
        open_gguf(tmp_path / "m.gguf")
    assert "m.gguf" in str(caught.value)


BAD_ENTRIES = {
    "string length": (entry("k", STRING, struct.pack("<Q", HUGE)), "needs"),
    "array length": (entry("k", ARRAY, struct.pack("<IQ", U32, HUGE)), "needs"),
    "string array length": (entry("k", ARRAY, struct.pack("<IQ", STRING, HUGE)), "needs"),
    "string in array": (entry("k", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE)), "past the end"),
    "array of arrays length": (entry("k", ARRAY, struct.pack("<IQ", ARRAY, HUGE)), "needs"),
    "deep arrays": (entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 30), "nests"),
    "unknown type": (entry("k", 99, bytes(8)), "unknown value type 99"),
    "unknown item type": (entry("k", ARRAY, struct.pack("<IQ", 77, 1)), "unknown value type 77"),
    "not UTF-8": (entry("k", STRING, struct.pack("<Q", 2) + b"\xff\xfe"), "UTF-8"),
    "token not UTF-8": (entry("k", ARRAY, struct.pack("<IQQ", STRING, 1, 1) + b"\xff"), "UTF-8"),
    "endless key": (struct.pack("<Q", 5000) + b"k" * 5000, "name may have"),
    "alignment 0": (entry("general.alignment", U32, bytes(4)), "power of two"),
    "alignment 24": (entry("general.alignment", U32, struct.pack("<I", 24)), "power of two"),
    "alignment text": (entry("general.alignment", STRING, text("32")), "power of two"),
    "one of many": (entry("split.count", 2, struct.pack("<H", 3)), "3 parts"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_bad_metadata(tmp_path: Path, case: str) -> None:
    data, reason = BAD_ENTRIES[case]
    with pytest.raises(ModelError, match=reason):
        open_gguf(build(tmp_path / "m.gguf", [data]))


BAD_TENSORS = {
    "twice": ([tensor("w"), tensor("w", offset=32)], "twice"),
    "overlap": ([tensor("a", (16,)), tensor("b", offset=32)], "overlap"),
    "past the end": ([tensor("w", offset=96)], "ends at byte"),
    "far offset": ([tensor("w", offset=HUGE // 32 * 32)], "ends at byte"),
    "unaligned": ([tensor("w", offset=4)], "aligned"),
    "no dimensions": ([tensor("w", ())], "dimensions"),
    "many dimensions": ([tensor("w", (1,) * 5)], "dimensions"),
    "overflowing product": ([tensor("w", (2**32, 2**32, 2**32, 2**32))], "would take"),
    "no elements": ([tensor("w", (8, 0))], "would take 0"),
    "half a block": ([tensor("w", (48,), kind=8)], "multiple"),
    "unread format": ([tensor("blk.0.w", (256,), kind=16)], "blk.0.w.*IQ2_XXS.*Q4_K"),
    "unknown format": ([tensor("w", (256,), kind=1234)], "type 1234"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors(tmp_path: Path, case: str) -> None:
    tensors, reason = BAD_TENSORS[case]
    with pytest.raises(ModelError, match=reason):
        open_gguf(build(tmp_path / "m.gguf", tensors=tensors, data=stored_bytes("F32", (24,))))


def test_duplicate_key(tmp_path: Path) -> None:
    one = entry("k", U32, bytes(4))
    with pytest.raises(ModelError, match="'k' appears twice"):
        open_gguf(build(tmp_path / "m.gguf", [one, one]))


def test_nested_arrays_within_bounds_are_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQII", U32, 2, 7, 8)
    path = build(tmp_path / "m.gguf", [entry("k", ARRAY, struct.pack("<IQ", ARRAY, 2) + inner * 2)])
    assert [part.tolist() for part in open_gguf(path).metadata["k"]] == [[7, 8], [7, 8]]


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        open_gguf(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="regular"):
        open_gguf(tmp_path)
