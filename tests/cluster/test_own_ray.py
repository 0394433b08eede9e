"""The Ray that a deployment starts for itself: it listens on the loopback interface alone, and others run beside it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.one_server import BODY, SPLIT
from tests.cluster.rays import tree, without_other_rays
from tests.serve.server import Server, command_line
from twostroke.cluster import placement_main

LISTENS = "0A"  # a state in /proc/net/tcp


def sockets_of(pid: int) -> set[str]:
    """Their inodes."""
    found = set()
    with contextlib.suppress(OSError):  # it has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    return found


def address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """As /proc/net has it: words of 32 bits in the order of this machine."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    found = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    return getattr(found, "ipv4_mapped", None) or found


def listening(pids: set[int]) -> list[tuple[str, str]]:
    """(address, command line) of each TCP socket that these processes listen on."""
    owners = {inode: pid for pid in pids for inode in sockets_of(pid)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and inode in owners:
                command = command_line(owners[inode]).replace(b"\0", b" ")[:100].decode(errors="replace")
                found.append((str(address(local.partition(":")[0])), command))
    return found


@contextlib.contextmanager
def deployment(folder: Path) -> Iterator[Server]:
    running = Server(folder, *SPLIT, "--share-cores", command="cluster")
    try:
        yield running.wait()
    finally:
        running.stop()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_two_beside_each_other_listen_on_loopback_alone(llama_folder: Path, expected: dict) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'twostroke[cluster]'")
    with without_other_rays(), deployment(llama_folder) as first, deployment(llama_folder) as second:
        for one in (first, second):
            assert any("a local Ray was started" in line for line in one.lines)
            with one.client() as client:
                found = client.post("/v1/completions", json=BODY).raise_for_status().json()
            assert found["choices"] == expected["choices"]
            open_to = listening(tree(one.process.pid))
            assert len(open_to) > 5, "the processes of Ray were not found"
            assert {where for where, _ in open_to} == {"127.0.0.1"}, open_to


def test_a_cluster_is_joined_where_it_is_noted_and_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert placement_main.noted_cluster() is None
    (tmp_path / "ray").mkdir()
    note = tmp_path / "ray" / "ray_current_cluster"
    with socket.socket() as head:  # it keeps its port while nothing answers there
        head.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{head.getsockname()[1]}"
        note.write_text(where)
        assert placement_main.noted_cluster() is None
        head.listen()
        assert placement_main.noted_cluster() == where
