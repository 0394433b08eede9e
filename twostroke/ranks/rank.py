"""A rank of an engine (group.py) in a process of its own: it loads its share, then runs each step that rank 0 sends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import traceback
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from twostroke.errors import RankLostError
from twostroke.kv.layout import make_layout
from twostroke.kv.storage import KVStorage
from twostroke.model.parallel import ParallelTransformer, not_yet
from twostroke.model.shares import Share
from twostroke.model.transformer import Transformer
from twostroke.ops.arrays import batch_of_tensors
from twostroke.ops.select import make_ops
from twostroke.ranks.group import (
    FREE,
    GIVE,
    READY,
    RESERVE,
    SIZE,
    STEP,
    TAKE,
    open_sum,
    read_frame,
    send_frame,
    unpacked,
)
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model


class Rank(Protocol):
    @property
    def kv(self) -> KVStorage: ...

    def open(self) -> None:
        """Find the other ranks."""

    def step(self, body: bytes) -> None: ...


class CpuRank:
    def __init__(self, hello: dict[str, Any], sock: socket.socket):
        self.hello, self.sock = hello, sock
        self.model, self.kv = load_share(hello)

    def open(self) -> None:
        hello = self.hello
        place = Path(hello["folder"]), hello["rank"], hello["parts"]
        self.model.sum_ranks = open_sum(*place, hello["memory"], [self.sock])

    def step(self, body: bytes) -> None:
        batch = unpacked(body)
        self.model.forward(batch if self.model.ops.device is None else batch_of_tensors(batch), self.kv)


def load_share(hello: dict[str, Any]) -> tuple[ParallelTransformer, KVStorage]:
    given, share = hello["settings"], Share(hello["rank"], hello["parts"])
    ops = make_ops(given["device"], given["dtype"], given["threads"], given["quantize"], given["exact"])

    def make(*parts: Any, **more: Any) -> Transformer:
        return ParallelTransformer(*parts, sum_ranks=not_yet, **more)

    checkpoint = open_checkpoint(Path(hello["model"]))
    model = load_model(checkpoint, ops, given["max_model_len"], None, given["quantize"], share, make)
    assert isinstance(model, ParallelTransformer)
    layout = make_layout(model.arch, given["kv_dtype"])
    return model, KVStorage(layout, given["kv_blocks"], given["kv_dtype"], ops.device)


def load(hello: dict[str, Any], sock: socket.socket) -> Rank:
    if not hello["cards"]:
        return CpuRank(hello, sock)
    from twostroke.ranks.cards import CardRank  # Triton is not installed everywhere

    threading.Thread(target=end_with, args=(sock,), daemon=True).start()
    return CardRank(hello)


def end_with(sock: socket.socket) -> None:
    """A rank whose card waits for another one may not come to read that the engine has ended."""
    poll = select.poll()
    poll.register(sock, 0)  # nothing but that the other side has closed
    poll.poll()
    os._exit(0)


def obey(kind: bytes, body: bytes, rank: Rank, sock: socket.socket) -> None:
    if kind == STEP:
        rank.step(body)
    elif kind == GIVE:
        blocks = np.frombuffer(body, np.int64).tolist()
        content = bytearray(len(blocks) * rank.kv.exchanged_bytes)
        rank.kv.export_to(blocks, memoryview(content))
        send_frame(sock, bytes(content))
    elif kind == TAKE:
        rank.kv.take_in([(int.from_bytes(body[:SIZE], "little"), body[SIZE:])])
    else:
        from twostroke.ranks.cards import CardRank

        assert isinstance(rank, CardRank) and kind in (RESERVE, FREE), "a rank knows five orders"
        if kind == RESERVE:
            rank.reserve(int.from_bytes(body, "little"))
            send_frame(sock, READY)
        else:
            send_frame(sock, rank.free().to_bytes(SIZE, "little"))


def main(descriptor: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leading rank handles it
    with socket.socket(fileno=int(descriptor)) as sock:
        hello = json.loads(read_frame(sock) or b"{}")
        if not hello:
            return  # the engine has ended already
        try:
            rank = load(hello, sock)
        except Exception as error:
            with contextlib.suppress(OSError):  # the engine may have ended for the same reason
                send_frame(sock, str(error).encode() or type(error).__name__.encode())
            return
        send_frame(sock, READY)
        try:
            rank.open()
            while body := read_frame(sock):
                obey(body[:1], body[1:], rank, sock)
        except OSError:
            pass  # the engine has ended
        except (Exception, RankLostError) as error:
            if not isinstance(error, RankLostError) or error.__cause__ is not None:
                traceback.print_exc()  # it failed here; else another rank has ended, and with it the engine
            os._exit(1)  # a card that waits for the others would keep a plain end from coming
    os._exit(0)  # taking torch down takes longer than all else
