"""Tensor parallelism: one engine whose layers are computed by several processes, the ranks.

The engine's own process is rank 0: it has scheduler, sampling and head, and tells the others of each step (the rows, as
bytes over a socket pair). All ranks then run the same layers, each with its share (model/shares.py), and give each
other their parts at every residual add: through shared memory, or over gloo and the loopback interface where rows are
tensors of torch. Parts are added in the order of the ranks, so the result depends on their number and on nothing else.
Ranks on GPUs, with a card each, are in cards.py.

A rank that dies closes its socket: the sum of the others fails, and with it the engine. A rank ends when its socket
closes, so no rank outlives the engine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from twostroke.config import Config, Resolved
from twostroke.errors import ConfigError, ModelError, RankLostError
from twostroke.model.parallel import Sum
from twostroke.ops.cpu.library import available
from twostroke.ops.cpu.ranks import SharedSum, memory_bytes
from twostroke.ops.interface import Array, Batch, GroupBlocks
from twostroke.run.array_messages import decode, encode

if TYPE_CHECKING:
    from torch import Tensor

BOOT = "import sys; sys.path.append(sys.argv[2]); from twostroke.ranks.rank import main; main(sys.argv[1])"
GATHER = timedelta(minutes=10)  # longest wait for another rank's part: a rank that is gone is seen at once
SIZE = 8  # bytes of a frame's length
READY = b"ready"
STEP, GIVE, TAKE = b"s", b"g", b"t"  # orders to a rank: run these rows, give these blocks, take this one
RESERVE, FREE = b"r", b"f"  # and on a card: make a cache of so many blocks, drop it and say how much memory is free
SETTINGS = ("device", "dtype", "threads", "quantize", "exact", "max_model_len", "kv_blocks", "kv_dtype")


def check_parallel(config: Config) -> None:
    parts, reason = config.parallel, ""
    if config.draft_model is not None:
        reason = "without a draft model: drop draft_model or parallel"
    elif config.kv_offload:
        reason = "without kv_offload: drop one of them"
    if parts > 1 and reason:
        raise ConfigError(f"parallel={parts} is served {reason}.")


# ---- sums ----------------------------------------------------------------------------------------------------------


def shared_memory(parts: int) -> BinaryIO | None:
    """A file in memory for sums of arrays; None: this system or this install has none."""
    if not hasattr(os, "memfd_create") or not available():
        return None
    file = open(os.memfd_create("twostroke-ranks"), "r+b", buffering=0)  # noqa: SIM115  # its owner closes it
    file.truncate(memory_bytes(parts))
    return file


def open_sum(folder: Path, rank: int, parts: int, memory: int | None, peers: Sequence[socket.socket]) -> Sum:
    """folder: of this engine alone, where ranks find each other. peers: sockets to ranks that this one waits for."""
    shared = SharedSum(memory, rank, parts, lambda: any(map(closed, peers))) if memory is not None else None
    gather = cache(lambda: open_gather(folder, rank, parts))  # tensors alone need it, and all ranks have them then

    def sum_ranks(value: Array) -> Array:
        if shared is None or not isinstance(value, np.ndarray):
            return gather()(value)
        total = shared(value)
        if total is None:
            raise RankLostError("a rank is gone")
        return total

    return sum_ranks


def closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def open_gather(folder: Path, rank: int, parts: int) -> Sum:
    import torch

    group = open_gloo(folder, rank, parts)

    def sum_ranks(value: Array) -> Array:
        mine: Tensor = torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
        gathered = [torch.empty_like(mine) for _ in range(parts)]
        try:
            group.allgather([gathered], [mine]).wait()
        except RuntimeError as error:
            raise RankLostError(f"a rank is gone: {error}") from None
        total, *rest = [one.numpy() for one in gathered] if isinstance(value, np.ndarray) else gathered
        for one in rest:
            total += one
        return total

    return sum_ranks


def open_gloo(folder: Path, rank: int, parts: int) -> Any:
    """Waits until all ranks are there."""
    from torch.distributed import FileStore, ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = GATHER
    return ProcessGroupGloo(FileStore(str(folder / "ranks"), parts), rank, parts, options)


# ---- frames --------------------------------------------------------------------------------------------------------


def send_frame(sock: socket.socket, body: bytes) -> None:
    sock.sendall(len(body).to_bytes(SIZE, "little") + body)


def read_frame(sock: socket.socket) -> bytes:
    """Empty: the other side has ended."""
    return _read(sock, int.from_bytes(_read(sock, SIZE), "little"))


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)


def packed(batch: Batch) -> bytes:
    """The rows of a step."""
    groups = [array for group in batch.groups for array in (group.slots, group.tables)]
    rows = (batch.tokens, batch.positions, batch.starts, batch.contexts, batch.logit_rows)
    return encode([np.asarray(array) for array in (*rows, *groups)])


def unpacked(body: bytes) -> Batch:
    tokens, positions, starts, contexts, logit_rows, *groups = decode(body, list[np.ndarray])
    pairs = zip(groups[::2], groups[1::2], strict=True)
    return Batch(tokens, positions, starts, contexts, tuple(GroupBlocks(*pair) for pair in pairs), logit_rows)


# ---- the other ranks, as the leading one sees them -----------------------------------------------------------------


class Ranks:
    def __init__(self, model: Path, settings: Resolved, cards: int = 0):
        """Start them: they load their shares while this process loads its own. cards: GPUs that they have."""
        self.parts = settings.parallel
        self.folder = tempfile.TemporaryDirectory(prefix="twostroke-ranks-")
        self.sockets: list[socket.socket] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.collectives: list[Any] = []  # of cards; they have a `close`
        self.close = weakref.finalize(self, end_ranks, self.sockets, self.processes, self.folder, self.collectives)
        self.memory = None if cards else shared_memory(self.parts)
        hello = {"model": str(model), "folder": self.folder.name, "parts": self.parts, "cards": cards}
        hello["memory"] = None if self.memory is None else self.memory.fileno()
        hello["settings"] = {name: getattr(settings, name) for name in SETTINGS}
        for rank in range(1, self.parts):
            self._start(hello | {"rank": rank})

    def _start(self, hello: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        self.sockets.append(ours)
        root = str(Path(__file__).parents[2])  # where this package lies, should it not be installed
        command = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), root]
        given = [theirs.fileno()] + ([] if self.memory is None else [self.memory.fileno()])
        with theirs:
            self.processes.append(subprocess.Popen(command, pass_fds=given, stdin=subprocess.DEVNULL))
        send_frame(ours, json.dumps(hello).encode())

    def await_shares(self) -> None:
        """Wait until every rank has its share; ModelError: one could not load it."""
        for rank, sock in enumerate(self.sockets, 1):
            answer = read_frame(sock)
            if answer != READY:
                raise ModelError(f"rank {rank} did not start: {answer.decode() or 'its process ended'}")

    def open_sum(self) -> Sum:
        self.await_shares()
        memory = None if self.memory is None else self.memory.fileno()
        return open_sum(Path(self.folder.name), 0, self.parts, memory, self.sockets)

    def announce(self, batch: Batch) -> None:
        self.tell_all(STEP + packed(batch))

    def tell_all(self, body: bytes) -> None:
        for sock in self.sockets:
            self._tell(sock, body)

    def reserve(self, blocks: int) -> None:
        """Blocks of the cache of each, on cards: rank 0 has measured how many fit. Afterwards all have them."""
        self.tell_all(RESERVE + blocks.to_bytes(SIZE, "little"))
        for rank, content in self.answers():
            assert content == READY, f"rank {rank} was asked for something else"

    def _tell(self, sock: socket.socket, body: bytes) -> None:
        try:
            send_frame(sock, body)
        except OSError as error:
            raise RankLostError(f"a rank is gone: {error}") from None

    # ---- bytes of blocks, between two steps --------------------------------------------------------------------------

    def ask_for(self, blocks: Sequence[int]) -> None:
        """The parts of all ranks; `answers` has them."""
        self.tell_all(GIVE + np.asarray(blocks, np.int64).tobytes())

    def answers(self) -> Iterator[tuple[int, bytes]]:
        for rank, sock in enumerate(self.sockets, 1):
            try:
                content = read_frame(sock)
            except OSError:
                content = b""
            if not content:
                raise RankLostError(f"rank {rank} is gone")
            yield rank, content

    def give(self, rank: int, block: int, content: bytes | memoryview) -> None:
        self._tell(self.sockets[rank - 1], b"".join((TAKE, block.to_bytes(SIZE, "little"), content)))


def end_ranks(
    sockets: list[socket.socket], processes: list[subprocess.Popen[bytes]], folder: tempfile.TemporaryDirectory[str],
    collectives: list[Any],
) -> None:  # fmt: skip
    for sock in sockets:
        sock.close()
    for process in processes:
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for collective in collectives:
        collective.close()
    folder.cleanup()
