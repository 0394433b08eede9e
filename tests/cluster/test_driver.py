"""What a user is told where Ray is missing, old, of another version, or says that a worker ran out of memory.

The Ray driver is the real one, in its own process; the package `ray` that it finds is made by the test.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from twostroke.cluster import placement_main
from twostroke.cluster.placement import Placement
from twostroke.cluster.placing import Connected, PlaceWorkers
from twostroke.cluster.remote_worker import start_error
from twostroke.errors import ConfigError
from twostroke.remote.messages import Failed
from twostroke.remote.process import ended_with

OTHER = (
    "Version mismatch: The cluster was started with:\\n    Ray: 2.50.0\\n    Python: 3.12.1\\n"
    "This process on Ray Client was started with:\\n    Ray: 2.60.0\\n    Python: 3.11.7\\n"
)
INIT = """
__version__ = "2.60.0"
def init(*args, **options):
    raise {error}
def shutdown():
    pass
"""


def never_placed(connected: Connected) -> PlaceWorkers:
    raise AssertionError(connected)


def refused(package: str, address: str, words: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "ray.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", str(place))
    placement = Placement(address, 2, never_placed, lambda died: None)
    with pytest.raises(ConfigError, match=words):
        asyncio.run(placement.start())
    assert placement._process is None


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("raise ImportError", r"this command needs Ray: pip install 'twostroke\[cluster\]'"),
        ("__version__ = '2.9.3'", "Ray 2.9.3 is too old, 2.49 is needed: pip install -U"),
        (INIT.format(error=f'RuntimeError("{OTHER}")'), "other versions .*Ray: 2.50.0 Python: 3.12.1.*the same"),
        (INIT.format(error='ValueError("no such thing")'), "Ray could not be started: ValueError: no such thing"),
    ],
    ids=["none", "old", "other", "failing"],
)  # fmt: skip
def test_ray_is_not_there_or_another_one(
    package: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(package, "cluster", words, tmp_path, monkeypatch)  # a name that Ray would look up


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("auto", "--address auto: no Ray cluster runs on this machine: start one with `ray start --head`, or leave"),
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1 .*: start one with `ray start --head` there, or leave"),
        ("ray://head:10001", "--address ray://head:10001: .* run this command on a machine of the cluster, with"),
    ],
)
def test_no_cluster_is_there(address: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where a cluster of this machine would be noted
    refused(INIT.format(error='ValueError("it is not asked")'), address, words, tmp_path, monkeypatch)


def test_why_a_worker_has_ended() -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'twostroke[cluster]'")
    errors = ray.exceptions
    memory = errors.OutOfMemoryError("Task was killed due to the node running low on memory.")
    killed = errors.ActorDiedError()
    killed.error_msg = "The actor died because its OOM-killed worker ended. Some common causes include: …"
    for error in (memory, killed):
        why, fatal = placement_main.reason(error)
        assert fatal and "ran out of memory: lower kv_memory or kv_blocks" in why
    plain = errors.ActorDiedError()
    plain.error_msg = "The actor died unexpectedly. Some common causes include: (1) the process was killed by the OOM"
    assert placement_main.reason(plain) == ("its process is gone", False)


def test_memory_that_runs_out_is_named() -> None:
    error = start_error("decode-0 on host", Failed("MemoryError", ""))
    assert isinstance(error, ConfigError) and "decode-0 on host ran out of memory while it started: lower" in str(error)
    assert "because memory ran out: see kv_memory" in ended_with(-signal.SIGKILL)
    assert ended_with(3) == "it ended with exit status 3"
