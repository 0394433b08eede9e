"""safetensors folders: one file or several with an index.

A file is `header length u64 | JSON header | data`; the header gives each tensor's dtype, shape and [begin, end) in the
data. The header is read here rather than by the library because the weights must stay raw bytes of the mapped file
(the library hands out torch tensors), and because every number in it is checked before use either way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from twostroke.errors import ModelError
from twostroke.ops.formats import FP8, Stored, stored_bytes
from twostroke.weights.files import JSON_LIMIT, damaged, map_file, parse_json_object, read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FORMATS = ("F32", "F16", "BF16")
# Ends of the names of tensors that are no floats: MXFP4's bytes, a table from tokens to experts, and the codes, zero
# points and groups of weights of few bits (published.py).
_WORDS = (".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_zero_point", ".weight_g_idx", ".weight_shape")
_NO_FLOATS = {
    "U8": ("_blocks", "_scales"),
    "I8": (".weight", ".weight_zero_point"),
    "I32": (".tid2eid", *_WORDS),
    "I64": (".tid2eid", *_WORDS),
    FP8.name: ("",),
    "F8_E8M0": (".scale", "_scale_inv", "_scale"),
}
_POSITION_IDS = "position_ids"  # the numbers 0, 1, 2, … which some checkpoints hold; they are not read
_MAX_DIMS = 8


def open_safetensors_folder(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint folder, as views of its mapped files."""
    if (folder / SINGLE).is_file():
        return open_safetensors(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _open_shards(folder)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return open_safetensors(files[0])
    raise ModelError(
        f"{folder}: holds {len(files)} .safetensors files but neither {SINGLE} nor {INDEX}; "
        "copy the missing one from where the model came from."
    )


def open_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of one file, in header order."""
    buffer = map_file(path)
    length = int.from_bytes(buffer[:8], "little")
    if len(buffer) < 8 or length > len(buffer) - 8:
        raise damaged(path, f"its header claims {length} bytes, the file has {len(buffer)}")
    if length > JSON_LIMIT:
        raise damaged(path, f"its header claims {length} bytes, more than any model needs")
    header = parse_json_object(path, buffer[8 : 8 + length], unique=True)
    header.pop("__metadata__", None)
    data = np.frombuffer(buffer, np.uint8)[8 + length :]
    spans = {name: _read_entry(path, name, entry, data.size) for name, entry in header.items()}
    _check_cover(path, {name: (begin, end) for name, (_, _, begin, end) in spans.items()}, data.size)
    return {
        name: Stored(dtype, shape, data[begin:end])
        for name, (dtype, shape, begin, end) in spans.items()
        if not _left_out(name, dtype)
    }


def _read_entry(path: Path, name: str, entry: Any, size: int) -> tuple[str, tuple[int, ...], int, int]:
    """One header entry as (format, shape, begin, end), its three statements about its size in agreement."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    label = f"tensor {name[:200]!r}"
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise damaged(path, f"{label} lacks a proper dtype, shape or data_offsets")
    if dtype not in _FORMATS and not name.endswith(_NO_FLOATS.get(dtype, ())) and not _left_out(name, dtype):
        raise ModelError(
            f"{path}: {label} has dtype {dtype[:20]}, which is not read; save the model as {' or '.join(_FORMATS)}."
        )
    begin, end = offsets
    if not begin <= end <= size:
        raise damaged(path, f"{label} lies at bytes {begin} to {end} of {size}")
    if _left_out(name, dtype):
        return dtype, tuple(shape), begin, end
    if len(shape) > _MAX_DIMS or stored_bytes(dtype, shape) != end - begin:
        raise damaged(path, f"{label} of {len(shape)} dimensions does not fit its {end - begin} bytes of {dtype}")
    return dtype, tuple(shape), begin, end


def _left_out(name: str, dtype: str) -> bool:
    return dtype not in _FORMATS and name.rpartition(".")[2] == _POSITION_IDS


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_cover(path: Path, spans: dict[str, tuple[int, int]], size: int) -> None:
    """The format allows neither overlaps nor holes: a file with one was not written whole."""
    reached = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != reached:
            kind = "overlaps its neighbour" if begin < reached else "leaves a hole before it"
            raise damaged(path, f"tensor {name[:200]!r} at byte {begin} {kind}")
        reached = end
    if reached != size:
        raise damaged(path, f"its tensors end at byte {reached} of {size}")


def _open_shards(folder: Path) -> dict[str, Stored]:
    index = folder / INDEX
    weight_map = read_json_object(index, unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, "has no weight_map")
    shards = {shard: open_safetensors(_shard_path(folder, shard)) for shard in _shard_names(index, weight_map)}
    tensors: dict[str, Stored] = {}
    for shard, found in shards.items():
        twice = tensors.keys() & found.keys()
        if twice:
            raise damaged(folder / shard, f"tensor {min(twice)[:200]!r} is in another shard too")
        tensors.update(found)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise damaged(folder / shard, f"tensor {name[:200]!r}, which {INDEX} places here, is missing")
    return tensors


def _shard_names(index: Path, weight_map: dict[str, Any]) -> list[str]:
    """The files an index names, each a plain name: an index may not reach outside its own folder."""
    for shard in weight_map.values():
        plain = isinstance(shard, str) and not set(shard) & set("/\\:\0") and shard.endswith(".safetensors")
        if not plain or len(shard) > 255:
            raise ModelError(
                f"{index}: names the shard {str(shard)[:200]!r}; shards must be .safetensors files beside the index."
            )
    return sorted(set(weight_map.values()))


def _shard_path(folder: Path, shard: str) -> Path:
    path = folder / shard
    if not path.is_file():
        raise ModelError(f"{path}: named in {INDEX} but missing; fetch the model again, all its shards.")
    return path
