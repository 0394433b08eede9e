"""A rank of an engine (ranks.py) in a process of its own: it loads its share, then runs each step it is told of."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.engine.ranks import (
    GIVE,
    READY,
    SIZE,
    STEP,
    TAKE,
    RankLostError,
    open_sum,
    read_frame,
    send_frame,
    unpacked,
)
from twostroke.errors import TwostrokeError
from twostroke.kv.layout import make_layout
from twostroke.kv.storage import KVStorage
from twostroke.model.parallel import ParallelTransformer
from twostroke.model.shares import Share
from twostroke.model.transformer import Transformer
from twostroke.ops.arrays import batch_of_tensors
from twostroke.ops.interface import Array
from twostroke.ops.select import make_ops
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model


def not_yet(value: Array) -> Array:
    raise RuntimeError("a step before the ranks have found each other")


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


def obey(kind: bytes, body: bytes, model: ParallelTransformer, kv: KVStorage, sock: socket.socket) -> None:
    if kind == STEP:
        batch = unpacked(body)
        model.forward(batch if model.ops.device is None else batch_of_tensors(batch), kv)
    elif kind == GIVE:
        blocks = np.frombuffer(body, np.int64).tolist()
        content = bytearray(len(blocks) * kv.exchanged_bytes)
        kv.export_to(blocks, memoryview(content))
        send_frame(sock, bytes(content))
    else:
        assert kind == TAKE, "a rank is told three things"
        kv.take_in([(int.from_bytes(body[:SIZE], "little"), body[SIZE:])])


def main(descriptor: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leading rank handles it
    with socket.socket(fileno=int(descriptor)) as sock:
        hello = json.loads(read_frame(sock) or b"{}")
        if not hello:
            return  # the engine has ended already
        try:
            model, kv = load_share(hello)
        except (TwostrokeError, OSError, MemoryError) as error:
            with contextlib.suppress(OSError):  # the engine may have ended for the same reason
                send_frame(sock, str(error).encode() or type(error).__name__.encode())
            return
        send_frame(sock, READY)
        with contextlib.suppress(OSError, RankLostError):  # another rank has ended, and with it the engine
            model.sum_ranks = open_sum(Path(hello["folder"]), hello["rank"], hello["parts"], hello["memory"], [sock])
            while body := read_frame(sock):
                obey(body[:1], body[1:], model, kv, sock)
    os._exit(0)  # taking torch down takes longer than all else
