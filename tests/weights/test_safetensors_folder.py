"""safetensors: the library's files come back as raw bytes; headers and indexes that lie are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from twostroke.errors import ModelError
from twostroke.ops.formats import dequantize
from twostroke.weights.safetensors import INDEX, SINGLE, open_safetensors, open_safetensors_folder


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(5, 8, generator=generator),
        "half": torch.randn(3, 4, generator=generator).half(),
        "brain": torch.randn(7, generator=generator).bfloat16(),
        "scalar": torch.tensor(1.5),
        "none": torch.empty(0, 4),
    }


def header_file(path: Path, header: Any, data: bytes = bytes(32)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def check(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tuple(tensor.shape)
        assert np.array_equal(dequantize(found[name]), tensor.float().numpy())


def test_single_file(tmp_path: Path) -> None:
    save_file(some_tensors(), tmp_path / SINGLE, metadata={"format": "pt"})
    check(open_safetensors_folder(tmp_path), some_tensors())
    (tmp_path / SINGLE).rename(tmp_path / "other.safetensors")
    check(open_safetensors_folder(tmp_path), some_tensors())


def test_data_at_odd_addresses(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)  # the data begins at an odd byte
    values = np.array([1.25, -3], dtype=np.float32)
    path = header_file(tmp_path / "m.safetensors", text, values.tobytes())
    assert dequantize(open_safetensors(path)["a"]).tolist() == [1.25, -3]


def shard(folder: Path, weight_map: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    tensors = some_tensors()
    parts = {"model-1-of-2.safetensors": ["embed", "half"], "model-2-of-2.safetensors": ["brain", "scalar", "none"]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    mapping = {name: file for file, names in parts.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": mapping if weight_map is None else weight_map}))
    return tensors


def test_shards(tmp_path: Path) -> None:
    tensors = shard(tmp_path)
    check(open_safetensors_folder(tmp_path), tensors)


def test_a_missing_shard(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2-of-2\.safetensors.*missing"):
        open_safetensors_folder(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    shard(tmp_path)
    save_file({"embed": torch.ones(1), "brain": torch.ones(1)}, tmp_path / "model-2-of-2.safetensors")
    with pytest.raises(ModelError, match="'embed' is in another shard"):
        open_safetensors_folder(tmp_path)


def test_a_tensor_not_where_the_index_says(tmp_path: Path) -> None:
    shard(tmp_path, {"embed": "model-1-of-2.safetensors", "lost": "model-2-of-2.safetensors"})
    with pytest.raises(ModelError, match="'lost'"):
        open_safetensors_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../up.safetensors", "/etc/x.safetensors", "..\\up.safetensors", "c:x.safetensors", "a\0.safetensors", 7,
             None, ["x"], "pytorch_model.bin", "", "x" * 300 + ".safetensors"]
)  # fmt: skip
def test_an_index_that_reaches_elsewhere(tmp_path: Path, name: Any) -> None:
    shard(tmp_path, {"embed": name})
    with pytest.raises(ModelError, match="beside the index"):
        open_safetensors_folder(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {}}', "\xff"])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    shard(tmp_path)
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=INDEX):
        open_safetensors_folder(tmp_path)


def test_an_index_that_names_a_tensor_twice(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(ModelError, match="twice"):
        open_safetensors_folder(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ModelError, match=r"2 \.safetensors files"):
        open_safetensors_folder(tmp_path)


def f32(begin: int, end: int, shape: Any = None) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "past the end": ({"a": f32(0, 64)}, "0 to 64 of 32"),
    "backwards": ({"a": f32(8, 0, [2])}, "8 to 0"),
    "negative": ({"a": f32(-8, 0, [2])}, "proper"),
    "overlap": ({"a": f32(0, 16), "b": f32(12, 32)}, "overlaps"),
    "hole": ({"a": f32(0, 8), "b": f32(12, 32)}, "hole"),
    "data left over": ({"a": f32(0, 16)}, "byte 16 of 32"),
    "shape too large": ({"a": f32(0, 32, [2**40, 2**40])}, "does not fit"),
    "shape of floats": ({"a": f32(0, 32, [8.0])}, "proper"),
    "shape of bools": ({"a": f32(0, 32, [True, 8])}, "proper"),
    "many dimensions": ({"a": f32(0, 32, [1] * 1000 + [8])}, "1001 dimensions"),
    "dtype": ({"a": {**f32(0, 32), "dtype": "F8_E5M2"}}, "F8_E5M2.*F32 or F16 or BF16"),
    "dtype of no kind": ({"a": {**f32(0, 32), "dtype": 3}}, "proper"),
    "three offsets": ({"a": {**f32(0, 32), "data_offsets": [0, 8, 32]}}, "proper"),
    "entry": ({"a": [1, 2]}, "proper"),
    "not an object": ([1], "list"),
    "not JSON": (b"{'a': 1}", "JSON"),
    "not text": (b"\xff\xfe{}", "JSON"),
    "deep": (b'{"a":' + b"[" * 200_000, "JSON"),
    "twice": (b'{"a": {}, "a": {}}', "twice"),
    "huge number": (b'{"a": ' + b"9" * 10_000 + b"}", "JSON|proper"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers(tmp_path: Path, case: str) -> None:
    header, reason = BAD_HEADERS[case]
    with pytest.raises(ModelError, match=reason):
        open_safetensors(header_file(tmp_path / "m.safetensors", header))


@pytest.mark.parametrize("data", [b"", b"\x01\x00", b"\xff" * 8, (2**40).to_bytes(8, "little") + b"{}"])
def test_bad_lengths(tmp_path: Path, data: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(data)
    with pytest.raises(ModelError, match=SINGLE):
        open_safetensors_folder(tmp_path)
