"""Blocks of a prompt from one engine to another on one machine: over shared memory, TCP and NIXL, beside copies.

    python -m benchmarks.exchange [--device cuda] [--shape 8b] [--tokens 512,2048,8192] [--json FILE]

Two workers, each a process with an engine process of its own. One computes a prompt and offers its blocks, the other
brings them into its cache, as workers of a cluster do. Each transport gets new prompts, in turns. Three times are kept:
`out` (the engine copies its blocks into shared memory), `move` (the transport), `in` (the other engine checks their
CRC-32 and copies them into its pool). Over NIXL, which has a pair of workers of its own, `out` is the checksum, `move`
a message, and `in` the read from pool to pool with its checksum. The limits are measured in the same run, with as many
bytes: a copy in the host's memory, to memory that was written before and to new memory, and on a GPU copies between it
and the host. After each turn the second engine goes on after the prompt with the tokens of the first. Random weights;
the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.machine import save
from benchmarks.random_folder import SHAPES, write_folder
from twostroke.cluster.channel import derive
from twostroke.cluster.handover import payload_of
from twostroke.cluster.holder import Parcel
from twostroke.cluster.sockets import SharedMemoryTransport, SocketTransport, TcpTransport
from twostroke.cluster.transports import FittingTransport
from twostroke.cluster.worker import Worker
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.messages import Direct
from twostroke.remote.nixl_agent import package
from twostroke.remote.process import ProcessEngine
from twostroke.remote.segment import Segment
from twostroke.sampling import SamplingParams

KINDS: dict[str, type[SocketTransport]] = {
    "shared memory": SharedMemoryTransport, "tcp": TcpTransport, "nixl": TcpTransport,
}  # fmt: skip
SCHEMES = {"shared memory": "unix://", "tcp": "tcp://", "nixl": "tcp://"}
OVER_NIXL = Direct("127.0.0.1", True)
BLOCK = 16  # tokens
ANSWER = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
ROOM = 40e9  # bytes that must be free in memory for weights to be written there
COPIES = 5


# ---- the two workers -------------------------------------------------------------------------------------------------


def settings_for(device: str, longest: int, threads: int) -> dict[str, Any]:
    return {
        "device": device, "threads": threads, "seed": 1, "speculate": "off", "max_model_len": longest + 64,
        "kv_blocks": 3 * (longest // BLOCK + 8), "exact": device == "cuda",
    }  # fmt: skip


def make_worker(folder: Path, settings: dict[str, Any], secret: bytes, nixl: bool) -> Worker:
    key = derive(secret, "peers")
    ways = FittingTransport(SharedMemoryTransport(key), TcpTransport(key))
    direct = OVER_NIXL if nixl else None
    engine = ProcessEngine(folder, settings, block_key=derive(secret, "names"), direct=direct)
    return Worker(engine, ways, transfer_seconds=120.0)


async def answer(engine: AsyncEngine, prompt: list[int]) -> list[int]:
    stream = engine.submit([prompt], ANSWER)
    async for _ in stream:
        pass
    return list(stream.answers[0].sample.token_ids)


def hold(pipe: Connection, folder: Path, settings: dict[str, Any], secret: bytes, nixl: bool) -> None:
    """The process that computes prompts: for each, its answer, its offer, and the seconds that copying out took."""

    async def serve() -> None:
        worker = make_worker(folder, settings, secret, nixl)
        engine = AsyncEngine(folder, settings, client=worker)
        await engine.start()
        pipe.send("ready")
        try:
            while (prompt := await asyncio.to_thread(pipe.recv)) is not None:
                wrote = await answer(engine, prompt)
                began = time.perf_counter()
                parcel = await worker.look_up(prompt, b"", 0)
                pipe.send((wrote, parcel, time.perf_counter() - began))
        finally:
            await engine.stop()

    asyncio.run(serve())


async def bring(
    worker: Worker, kind: str, transport: SocketTransport, prompt: list[int], parcel: Parcel
) -> dict[str, float]:
    """As `Handover.collect` does, with the time of each part."""
    ready = worker.ready
    assert ready is not None
    address = next(part for part in parcel.offer.address.split(" ") if part.startswith(SCHEMES[kind]))
    began = time.perf_counter()
    incoming = await transport.connect(address, parcel.offer.ticket)
    blocks = await incoming.fetch(parcel.names, ready.settings.exchanged_bytes, kind == "nixl")
    moved = time.perf_counter()
    with payload_of(blocks) as payload:
        answer = await worker.engine.store(prompt[: parcel.tokens], b"", parcel.names, payload)
    taken = time.perf_counter()
    await incoming.close(True)
    if answer.blocks != len(parcel.names):
        raise RuntimeError(f"{answer.blocks} of {len(parcel.names)} blocks were stored")
    size = len(parcel.names) * ready.settings.exchanged_bytes
    return {"bytes": size, "move": moved - began, "in": taken - moved}


# ---- the limits ------------------------------------------------------------------------------------------------------


def seconds(copy: Callable[[], object]) -> float:
    """The median of several, after one that is not counted."""
    times = []
    for _ in range(COPIES + 1):
        began = time.perf_counter()
        copy()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def limits(size: int, device: str) -> dict[str, float]:
    """GB/s."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def to_new() -> None:
        with Segment.create(size) as segment:
            segment.view[:] = memoryview(source.numpy())

    one, other = source.numpy(), target.numpy()  # by one core, as the engines and transports copy
    found = {"host copy": seconds(lambda: np.copyto(other, one)), "host copy to new memory": seconds(to_new)}
    if device == "cuda":
        there, pinned = source.cuda(), source.pin_memory()

        def waited(to: torch.Tensor, of: torch.Tensor) -> Callable[[], None]:
            def copy() -> None:
                to.copy_(of)
                torch.cuda.synchronize()

            return copy

        for name, host in (("", target), (" (pinned)", pinned)):
            found[f"device to host{name}"] = seconds(waited(host, there))
            found[f"host to device{name}"] = seconds(waited(there, host))
    return {name: round(size / taken / 1e9, 2) for name, taken in found.items()}


# ---- the run ---------------------------------------------------------------------------------------------------------


async def exchange(args: argparse.Namespace, folder: Path, kinds: list[str]) -> dict[str, Any]:
    secret, longest = secrets.token_bytes(32), max(args.tokens)
    settings = settings_for(args.device, longest, args.threads)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    holder = context.Process(target=hold, args=(theirs, folder, settings, secret, "nixl" in kinds))
    holder.start()
    theirs.close()
    worker = make_worker(folder, settings, secret, "nixl" in kinds)
    engine = AsyncEngine(folder, settings, client=worker)
    ways = {kind: KINDS[kind](derive(secret, "peers")) for kind in kinds}
    result: dict[str, Any] = {"settings": settings, "sizes": {}}
    try:
        await engine.start()
        await asyncio.to_thread(pipe.recv)
        print("both engines are ready", flush=True)
        for count in args.tokens:
            result["sizes"][str(count)] = await one_size(args, count, engine, worker, pipe, ways)
    finally:
        for transport in ways.values():
            await transport.close()
        await engine.stop()
        if holder.is_alive():
            pipe.send(None)
        holder.join(20)
        holder.kill()
    return result


async def one_size(
    args: argparse.Namespace, count: int, engine: AsyncEngine, worker: Worker, pipe: Connection,
    ways: dict[str, SocketTransport],
) -> dict[str, Any]:  # fmt: skip
    vocabulary, times, size, same = SHAPES[args.shape]["vocab_size"], {kind: [] for kind in ways}, 0, True
    for turn in range(args.turns + 1):  # the first one is not counted
        for number, (kind, transport) in enumerate(ways.items()):
            first = 7919 * (turn * len(ways) + number) + count
            prompt = [(first + 31 * i) % (vocabulary - 300) + 300 for i in range(count)]
            pipe.send(prompt)
            wrote, parcel, out = await asyncio.to_thread(pipe.recv)
            found = await bring(worker, kind, transport, prompt, parcel)
            size, same = int(found.pop("bytes")), same and await answer(engine, prompt) == wrote
            if turn:
                times[kind].append({"out": out, **found, "whole": out + found["move"] + found["in"]})
    shown = {kind: summary(some, size) for kind, some in times.items()}
    bounds = limits(size, args.device)
    print(f"{count} tokens, {size / 1e6:.1f} MB: limits in GB/s {bounds}", flush=True)
    for kind, one in shown.items():
        parts = ", ".join(f"{part} {one[part]['ms']} ms ({one[part]['gb_s']} GB/s)" for part in one)
        print(f"  {kind}: {parts}", flush=True)
    if not same:
        print("  the second engine wrote other tokens", flush=True)
    return {"bytes": size, "limits_gb_s": bounds, "same_tokens": same, **shown}


def summary(times: list[dict[str, float]], size: int) -> dict[str, Any]:
    found = {}
    for part in times[0]:
        some = [one[part] for one in times]
        found[part] = {
            "ms": round(1e3 * median(some), 2), "gb_s": round(size / median(some) / 1e9, 3),
            "turns_ms": [round(1e3 * one, 2) for one in some],
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="of the weights; default: 8b on a GPU, else cache")
    parser.add_argument("--tokens", default="", help="lengths of prompts, with commas")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--folder", type=Path, help="where the weights are written, or were before")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.shape = args.shape or ("8b" if args.device == "cuda" else "cache")
    lengths = args.tokens or ("512,2048,8192" if args.device == "cuda" else "512,2048")
    args.tokens = [int(part) // BLOCK * BLOCK for part in lengths.split(",")]
    kinds = [kind for kind in KINDS if kind != "nixl" or package() is not None]
    in_memory = Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > ROOM
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else None) as home:
        folder = args.folder or Path(home) / "model"
        if not (folder / "model.safetensors.index.json").exists():
            began = time.perf_counter()
            write_folder(folder, args.shape, args.device)
            print(f"weights were written in {time.perf_counter() - began:.1f} s", flush=True)
        result = asyncio.run(exchange(args, folder, ["shared memory", "tcp"]))
        if "nixl" in kinds:
            other = asyncio.run(exchange(args, folder, ["nixl"]))
            for length, found in result["sizes"].items():
                found["nixl"] = other["sizes"][length]["nixl"]
                found["same_tokens"] = found["same_tokens"] and other["sizes"][length]["same_tokens"]
    asked = {"device": args.device, "shape": args.shape, "turns": args.turns, "transports": kinds}
    save("exchange", "exchange", {**asked, **result}, args.json)


if __name__ == "__main__":
    main()
