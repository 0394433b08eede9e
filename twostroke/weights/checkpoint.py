"""From what a user types to a checkpoint on disk, and from there to named tensors.

Nothing in a model folder is ever executed: no pickle, no Python files. Two kinds are read, GGUF and safetensors.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any, Literal

from twostroke.errors import ModelError
from twostroke.model.fields import Fields
from twostroke.model.quantization import Scheme, read_scheme
from twostroke.ops.formats import Stored
from twostroke.record import Record
from twostroke.weights import catalog
from twostroke.weights.files import OnProgress, read_json_object
from twostroke.weights.gguf import open_gguf
from twostroke.weights.safetensors import open_safetensors_folder

CONFIG = "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# What a model needs from the hub, and nothing that could run. Files in subfolders are other forms of the same weights.
_HUB_FILES = [
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json", "modules.json", "1_Pooling/config.json",
    "sentence_bert_config.json",
]  # fmt: skip
_HUB_SKIP = ["[!1]*/*", "1_Pooling/*.safetensors", "consolidated*"]  # 1_Pooling: how an embedder pools


class Checkpoint(Record):
    """An opened model. `path` is the .gguf file or the safetensors folder; `config` is GGUF metadata or config.json."""

    kind: Literal["gguf", "safetensors"]
    path: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]
    scheme: Scheme | None = None  # of matrices in a published format of few bits


def locate(model: str | Path, progress: OnProgress | None = None) -> Path:
    """The file or folder that `model` names, fetched first if need be.

    In this order: a catalog name, an existing path, a hub id "owner/name". `progress(done, total)` counts bytes.
    """
    name = str(model)
    if isinstance(model, str) and name in catalog.CATALOG:
        return catalog.fetch(name, progress)
    path = Path(os.path.expanduser(name))
    if name and path.exists():
        return path
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _from_hub(name)
    raise ModelError(_unknown(name))


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file, a folder with one, or a safetensors folder; the weights stay mapped, unread."""
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.suffix in _PICKLES:
        raise _pickle(path)
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: give the folder that holds it, {path.parent}: {CONFIG} is needed too.")
    file = open_gguf(path)
    return Checkpoint("gguf", path, file.metadata, file.tensors)


def _open_folder(folder: Path) -> Checkpoint:
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        if not (folder / CONFIG).is_file():
            raise ModelError(f"{folder}: has weights but no {CONFIG}; copy it from where the model came from.")
        config = read_json_object(folder / CONFIG)
        scheme = read_scheme(Fields(config, f"{folder.name}/{CONFIG}"))
        return Checkpoint("safetensors", folder, config, open_safetensors_folder(folder), scheme)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return open_checkpoint(files[0])
    if files:
        names = ", ".join(file.name for file in files[:8])
        raise ModelError(f"{folder}: holds {len(files)} .gguf files; give the path of one of them: {names}.")
    if any(entry.suffix in _PICKLES for entry in folder.iterdir()):
        raise _pickle(folder)
    raise ModelError(f"{folder}: holds no model; a .gguf file, or {CONFIG} with .safetensors files, is needed.")


def _pickle(path: Path) -> ModelError:
    return ModelError(
        f"{path}: its weights are a pickle, which can run code when it is read and so is never loaded; "
        "convert the model to safetensors (its publisher often has that version) or GGUF."
    )


def _from_hub(name: str) -> Path:
    """A snapshot of the hub's repository in its own cache (HF_HOME); HF_HUB_OFFLINE=1 uses what is there already."""
    import huggingface_hub  # here: it takes a noticeable part of a second, and most starts do not need it

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIP))
    except Exception as error:  # its errors come from several libraries and share no base
        reason = str(error).strip().split("\n")[0][:300] or type(error).__name__
        raise ModelError(
            f"{name}: not a file or folder here, and the hub did not give it ({reason}); check the name and the "
            f"network, or take a catalog model: {', '.join(catalog.CATALOG)}."
        ) from error


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.endswith((".gguf", ".safetensors")) or name.count("/") > 1


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), catalog.CATALOG, n=3, cutoff=0.6)
    hint = f"Did you mean {' or '.join(nearest)}? " if nearest else ""
    said = name[:200] or "an empty name"
    what = "no such file or folder: check the path" if _is_path(name) else "no such model"
    return (
        f"{said}: {what}. {hint}Give a catalog name ({', '.join(catalog.CATALOG)}), a folder, "
        "a .gguf file, or a hub id like owner/name."
    )
