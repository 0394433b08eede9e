"""What a user may type for a model, and what a folder may hold."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from twostroke.errors import ModelError
from twostroke.record import replace
from twostroke.weights import catalog
from twostroke.weights.checkpoint import locate, open_checkpoint


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", np.ones((2, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"w": np.ones((2, 4), np.float32)}, folder / "model.safetensors")
    return folder


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    for given in (path, tmp_path):
        found = open_checkpoint(locate(given))
        assert (found.kind, found.path) == ("gguf", path)
        assert found.config["general.architecture"] == "llama"
        assert found.tensors["w"].shape == (2, 4)


def test_two_gguf_files_are_a_question(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_a_safetensors_folder(tmp_path: Path) -> None:
    found = open_checkpoint(locate(str(write_folder(tmp_path))))
    assert (found.kind, found.path, found.config) == ("safetensors", tmp_path, {"model_type": "llama"})
    with pytest.raises(ModelError, match="give the folder"):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth"])
def test_pickles_are_never_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ModelError, match=r"never loaded.*safetensors"):
            open_checkpoint(path)


@pytest.mark.parametrize("text", ["[1]", "{", "null", "", '{"a": ' + "[" * 100_000, "\x00"])
def test_a_broken_config(tmp_path: Path, text: str) -> None:
    (write_folder(tmp_path) / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_an_endless_config(tmp_path: Path) -> None:
    with (write_folder(tmp_path) / "config.json").open("wb") as file:
        file.truncate(1 << 34)  # a sparse file: it would take 16 GiB to read
    with pytest.raises(ModelError, match="longer than"):
        open_checkpoint(tmp_path)


def test_incomplete_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no model"):
        open_checkpoint(tmp_path)
    (write_folder(tmp_path) / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["smollm2", "SmolLM2-135M", "nothing-like-it", "", "/no/such/file", "a/b/c", "x\0y", "own/m.gguf", "~no/x/y"],
)
def test_unknown_names_say_what_there_is(name: str) -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        locate(name)


@pytest.mark.parametrize("name", ["./model.gguf", "own/m.gguf", "/no/such/file", "a/b/c"])
def test_a_path_without_a_file_is_called_a_path(name: str) -> None:
    with pytest.raises(ModelError, match=f"^{name}: no such file or folder: check the path"):
        locate(name)


def test_a_name_that_is_not_near_has_no_suggestion() -> None:
    with pytest.raises(ModelError) as refused:
        locate("llama-3.1-8b")
    assert "no such model" in str(refused.value) and "Did you mean" not in str(refused.value)


def test_near_misses_are_named() -> None:
    with pytest.raises(ModelError, match=r"Did you mean qwen2\.5-coder-0\.5b"):
        locate("qwen2.5-coder-0.5")


def test_a_catalog_name_that_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    path = tmp_path / "models" / "smollm2-135m.gguf"
    path.parent.mkdir()
    path.write_bytes(b"a model")
    entry = replace(catalog.CATALOG["smollm2-135m"], bytes=7, sha256=hashlib.sha256(b"a model").hexdigest())
    monkeypatch.setitem(catalog.CATALOG, "smollm2-135m", entry)
    assert locate("smollm2-135m") == path


def hub_cache(folder: Path, files: list[str]) -> Path:
    """The hub's own cache layout with one snapshot of `tiny/model`."""
    repo = folder / "hub" / "models--tiny--model"
    snapshot = write_folder(repo / "snapshots" / ("0" * 40))
    for name in files:
        (snapshot / name).write_text("x")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    return snapshot


def in_offline_process(folder: Path, name: str) -> str:
    """The hub's client reads its settings when it is imported, so each try gets its own process."""
    code = (
        "import sys\n"
        "from twostroke.errors import ModelError\n"
        "from twostroke.weights.checkpoint import locate\n"
        "try:\n    print(locate(sys.argv[1]))\n"
        "except ModelError as error:\n    print('ModelError', error)\n"
    )
    environment = {**os.environ, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    result = subprocess.run(
        [sys.executable, "-c", code, name], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return result.stdout.strip()


def test_a_hub_id_offline(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, [])
    assert in_offline_process(tmp_path, "tiny/model") == str(snapshot)
    assert open_checkpoint(snapshot).kind == "safetensors"
    refusal = in_offline_process(tmp_path, "tiny/absent")
    assert refusal.startswith("ModelError tiny/absent")
    assert "smollm2-135m" in refusal
