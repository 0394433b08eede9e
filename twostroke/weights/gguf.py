"""GGUF files: typed metadata, then named tensors, one mapped file.

The layout (versions 2 and 3, little endian):

    "GGUF" | version u32 | tensor count u64 | entry count u64
    entries:  key string, type u32, value          string = length u64 + UTF-8; array = type u32 + count u64 + items
    tensors:  name string, dimensions u32, sizes u64 each (innermost first), type u32, offset u64
    padding to `general.alignment` | data, each tensor at an aligned offset from here

A file is untrusted input: every count, length and offset is compared with the bytes that are left before it is
used, so a damaged file costs a `ModelError` and never more memory than a few times its own size.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from twostroke.errors import ModelError
from twostroke.ops.formats import Stored, stored_bytes
from twostroke.record import Record
from twostroke.weights.files import damaged, map_file

# ggml's numbers for the tensor types we read.
_TENSOR_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    26: "I32",
    30: "BF16",
    39: "MXFP4",
}
# Names of other types, only so that the refusal can say what the file holds.
_UNREAD_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_MAX_DEPTH = 2  # arrays in arrays: allowed by the format, used by no known file
_MAX_NESTED = 1 << 16  # such arrays in one file: each costs an object ten times its size on disk
_MAX_NAME = 1024  # bytes of a key or a tensor name: real ones stay under 100, and errors quote them
_MAX_DIMS = 4  # ggml's own limit
_MIN_ENTRY = 8 + 4 + 1  # bytes of the smallest entry: key length, type, a one-byte value
_MIN_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes of the smallest tensor record: name length, dimensions, one size, type, offset


class GGUFFile(Record):
    """What a file says.

    Metadata values are int, float, bool, str, numpy arrays (of numbers or bools) and lists of strings; tensors are
    views of the mapped file, in the file's order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def open_gguf(path: str | Path) -> GGUFFile:
    """Read the metadata and the tensor table; the weights themselves stay on disk until they are touched."""
    path = Path(path)
    cursor = _Cursor(path, map_file(path))
    n_tensors = _read_header(cursor)
    metadata = _read_metadata(cursor)
    _refuse_splits(path, metadata)
    records = _read_records(cursor, n_tensors)
    return GGUFFile(path, metadata, _place(cursor, records, _alignment(path, metadata)))


class _Cursor:
    """A position in the mapped file; `need` is the only way past a length that the file itself states."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0
        self.nested = 0

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.position:
            left = self.size - self.position
            raise damaged(self.path, f"{what} needs {count} bytes at offset {self.position}, only {left} are left")

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        start = self.position
        self.position += count
        return self.buffer[start : self.position]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and length > limit:
            raise damaged(self.path, f"{what} claims {length} bytes, more than the {limit} a name may have")
        data = self.take(length, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise damaged(self.path, f"{what} is not UTF-8 text") from None


def _read_header(cursor: _Cursor) -> int:
    if cursor.take(4, "the file's magic number") != b"GGUF":
        raise ModelError(f"{cursor.path}: not a GGUF file (it does not begin with 'GGUF'); give a .gguf model file.")
    version = cursor.u32("the version")
    if version not in (2, 3):
        kind = "big-endian" if version & 0xFFFF == 0 and version else f"version {version}"
        raise ModelError(
            f"{cursor.path}: a {kind} GGUF file; versions 2 and 3, little endian, are read: convert the model again."
        )
    return cursor.u64("the number of tensors")


def _read_metadata(cursor: _Cursor) -> dict[str, Any]:
    count = cursor.u64("the number of metadata entries")
    cursor.need(count * _MIN_ENTRY, f"a table of {count} metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string("a metadata key", _MAX_NAME)
        if key in metadata:
            raise damaged(cursor.path, f"the metadata key {key!r} appears twice")
        metadata[key] = _read_value(cursor, cursor.u32(f"the type of {key!r}"), key)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.string(f"the text of {key!r}")
    if kind == _ARRAY:
        return _read_array(cursor, key, depth=1)
    value = _read_numbers(cursor, kind, 1, key)[0]
    return value.item()


def _read_array(cursor: _Cursor, key: str, depth: int) -> Any:
    kind = cursor.u32(f"the item type of {key!r}")
    count = cursor.u64(f"the length of {key!r}")
    if kind == _STRING:
        return _read_strings(cursor, count, key)
    if kind != _ARRAY:
        return _read_numbers(cursor, kind, count, key)
    cursor.need(count * 12, f"the {count} arrays of {key!r}")
    cursor.nested += count
    if depth == _MAX_DEPTH or cursor.nested > _MAX_NESTED:
        raise damaged(cursor.path, f"{key!r} nests arrays too deeply or too often")
    return [_read_array(cursor, key, depth + 1) for _ in range(count)]


def _read_numbers(cursor: _Cursor, kind: int, count: int, key: str) -> np.ndarray:
    name = _SCALARS.get(kind)
    if name is None:
        raise damaged(cursor.path, f"{key!r} has the unknown value type {kind}")
    dtype = np.dtype(name)
    data = np.frombuffer(cursor.take(count * dtype.itemsize, f"the value of {key!r}"), dtype)
    return data != 0 if kind == _BOOL else data


def _read_strings(cursor: _Cursor, count: int, key: str) -> list[str]:
    """The hot loop of opening a model: a vocabulary is up to 262,144 strings, so no calls of ours inside it."""
    cursor.need(count * 8, f"the {count} strings of {key!r}")
    buffer, size, position = cursor.buffer, cursor.size, cursor.position
    length_at = struct.Struct("<Q").unpack_from
    found: list[bytes] = []
    try:
        for _ in range(count):
            start = position + 8
            position = start + length_at(buffer, position)[0]
            if position > size:
                raise damaged(cursor.path, f"string {len(found)} of {key!r} runs past the end of the file")
            found.append(buffer[start:position])
    except struct.error:
        raise damaged(cursor.path, f"the list {key!r} runs past the end of the file") from None
    cursor.position = position
    return _decode(cursor.path, found, key)


def _decode(path: Path, found: list[bytes], key: str) -> list[str]:
    """All at once where no string holds the separator: half the time of one by one."""
    try:
        strings = b"\0".join(found).decode("utf-8").split("\0")
        if len(strings) == len(found):
            return strings
    except UnicodeDecodeError:
        pass
    strings = []
    try:
        for one in found:
            strings.append(one.decode("utf-8"))
    except UnicodeDecodeError:
        raise damaged(path, f"string {len(strings)} of {key!r} is not UTF-8 text") from None
    return strings


def _refuse_splits(path: Path, metadata: dict[str, Any]) -> None:
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise ModelError(
            f"{path}: one of {parts} parts of a split model; join them first (llama.cpp's gguf-split --merge does it)."
        )


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 0 < value <= 1 << 30 or value & (value - 1):
        raise damaged(path, f"general.alignment is {value!r}, not a power of two")
    return value


class _Record(NamedTuple):
    """One line of the tensor table; `offset` counts from the start of the data."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _read_records(cursor: _Cursor, count: int) -> list[_Record]:
    cursor.need(count * _MIN_TENSOR, f"a table of {count} tensors")
    records = [_read_record(cursor) for _ in range(count)]
    if len({record.name for record in records}) != count:
        raise damaged(cursor.path, "a tensor name appears twice")
    return records


def _read_record(cursor: _Cursor) -> _Record:
    name = cursor.string("a tensor's name", _MAX_NAME)
    dims = cursor.u32(f"the dimensions of tensor {name!r}")
    if not 1 <= dims <= _MAX_DIMS:
        raise damaged(cursor.path, f"tensor {name!r} claims {dims} dimensions (1 to {_MAX_DIMS} are possible)")
    sizes = struct.unpack(f"<{dims}Q", cursor.take(8 * dims, f"the shape of tensor {name!r}"))
    kind = cursor.u32(f"the type of tensor {name!r}")
    offset = cursor.u64(f"the offset of tensor {name!r}")
    format_name = _TENSOR_TYPES.get(kind)
    if format_name is None:
        raise ModelError(
            f"{cursor.path}: tensor {name!r} is stored as {_UNREAD_TYPES.get(kind, f'type {kind}')}, which is not "
            f"read; use a file quantized to one of {', '.join(_TENSOR_TYPES.values())}."
        )
    shape = tuple(reversed(sizes))
    try:
        nbytes = stored_bytes(format_name, shape)
    except ValueError as error:
        raise damaged(cursor.path, f"tensor {name!r}: {error}") from None
    if not 0 < nbytes <= cursor.size:
        raise damaged(
            cursor.path, f"tensor {name!r} of shape {shape} would take {nbytes} bytes, the file has {cursor.size}"
        )
    return _Record(name, format_name, shape, offset, nbytes)


def _place(cursor: _Cursor, records: list[_Record], alignment: int) -> dict[str, Stored]:
    """Views of the data, after checking that each tensor lies inside the file and on no other tensor's bytes."""
    base = -(-cursor.position // alignment) * alignment
    end, previous = 0, ""
    for record in sorted(records, key=lambda r: r.offset):
        if record.offset % alignment:
            raise damaged(
                cursor.path, f"tensor {record.name!r} at offset {record.offset} is not aligned to {alignment}"
            )
        if record.offset < end:
            raise damaged(cursor.path, f"tensors {previous!r} and {record.name!r} overlap")
        end, previous = record.offset + record.nbytes, record.name
        if base + end > cursor.size:
            raise damaged(
                cursor.path, f"tensor {record.name!r} ends at byte {base + end}, the file has only {cursor.size}"
            )
    whole = np.frombuffer(cursor.buffer, np.uint8)
    return {r.name: Stored(r.format, r.shape, whole[base + r.offset : base + r.offset + r.nbytes]) for r in records}
