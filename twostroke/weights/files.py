"""Checkpoint files as read-only memory: nothing is read until it is used, and processes share the pages."""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.errors import ModelError

OnProgress = Callable[[int, int], None]  # (bytes done, bytes in all), a few times a second
JSON_LIMIT = 32 << 20  # bytes; the index of a trillion-weight checkpoint is about 15 MB, a config a few KB


def damaged(path: Path, reason: str) -> ModelError:
    """The one sentence for bytes that cannot be right; the fix is always a new copy of the file."""
    return ModelError(f"{path}: {reason}. The file is damaged or incomplete: fetch or convert it again.")


def unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions.")


def map_file(path: Path) -> mmap.mmap:
    """Map a regular, non-empty file read-only. Slices of the result are bytes; numpy views of it are not copied."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening: opening a pipe would wait for its writer
            raise ModelError(f"{path}: not a regular file; give the path of the model file itself.")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # mmap's word for an empty file
        raise damaged(path, "the file is empty") from None
    except OSError as error:
        raise unreadable(path, error) from error


def read_json_object(path: Path, unique: bool = False) -> dict[str, Any]:
    """A JSON file that must hold an object, of bounded size."""
    return parse_json_object(path, _read_bounded(path), unique)


def read_json_list(path: Path) -> list[Any]:
    """A JSON file that must hold a list, of bounded size."""
    try:
        value = json.loads(_read_bounded(path)[:JSON_LIMIT].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"not valid JSON ({error})") from None
    if not isinstance(value, list):
        raise damaged(path, f"holds a JSON {type(value).__name__}, not a list")
    return value


def _read_bounded(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size = min(os.fstat(file.fileno()).st_size, JSON_LIMIT)
            return file.read(size + 1)  # one more than wanted, to see that it is too long
    except OSError as error:
        raise unreadable(path, error) from error


def parse_json_object(path: Path, text: bytes, unique: bool = False) -> dict[str, Any]:
    """Parse bytes of `path`. With `unique` a key given twice is refused: readers would differ on which one counts."""
    if len(text) > JSON_LIMIT:
        raise ModelError(f"{path}: its JSON is longer than {JSON_LIMIT} bytes; no model needs that, check the file.")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged(path, f"holds a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found
