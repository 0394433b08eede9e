"""How much later an answer goes on when another worker has computed its prompt.

    python -m benchmarks.handover

One engine process alone, and a prefill and a decode worker on one machine, in turns; each engine has one thread. The
time between the first and the second token of an answer is a step alone, and a step and what is left of the transfer in
two workers. `free`: the prefill worker has one prompt. `queue`: another prompt waits behind it, so that the worker
begins its next step at once. Medians over turns, beside the time of one layer of the last chunk, and what two workers
cost as a share of the time to the first token.
"""

from __future__ import annotations

import asyncio
import secrets
from statistics import median
from typing import Any

from benchmarks.machine import save
from twostroke.cluster.channel import derive
from twostroke.cluster.pools import PlacedWorker, Pools
from twostroke.cluster.router import Role
from twostroke.cluster.sockets import SharedMemoryTransport
from twostroke.cluster.worker import Worker
from twostroke.metrics.timeline import Timeline
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.process import ProcessEngine
from twostroke.sampling import SamplingParams
from twostroke.weights.checkpoint import locate

MODEL = "smollm2-135m"
LAYERS = 30
TURNS = 7
PROMPTS = {"400 tokens, one chunk": 400, "700 tokens, two chunks": 700, "1,400 tokens, three chunks": 1400}
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
SETTINGS = {"threads": 1, "seed": 1, "speculate": "off", "max_model_len": 2048, "kv_blocks": 1500}


def worker(folder: Any, secret: bytes) -> Worker:
    engine = ProcessEngine(folder, SETTINGS, block_key=derive(secret, "names"))
    return Worker(engine, SharedMemoryTransport(derive(secret, "peers")))


async def served(engine: AsyncEngine, prompt: list[int]) -> Timeline:
    stream = engine.submit([prompt], PARAMS)
    async for _ in stream:
        pass
    return stream.answers[0].sample.timeline


def gap(timeline: Timeline) -> float:
    """Milliseconds between the first and the second token."""
    first, second, *_ = timeline.token_times
    return 1e3 * (second - first)


async def turns(alone: AsyncEngine, apart: AsyncEngine, length: int) -> dict[str, Any]:
    gaps: dict[str, list[float]] = {"alone": [], "free": [], "queue": []}
    layers: list[float] = []
    firsts: list[float] = []  # milliseconds to the first token
    shares: list[float] = []
    for turn in range(TURNS):
        first = 9_000 * turn + length
        prompts = [[(first + number + 7 * i) % 40_000 + 100 for i in range(length)] for number in range(3)]
        timeline = await served(alone, prompts[0])
        gaps["alone"].append(gap(timeline))
        layers.append(1e3 * timeline.prefill * min(512, length % 512 or 512) / length / LAYERS)
        moved = await served(apart, prompts[0])
        gaps["free"].append(gap(moved))
        firsts.append(1e3 * (moved.ttft or 0.0))
        shares.append((gaps["free"][-1] - gaps["alone"][-1]) / firsts[-1])
        first, _ = await asyncio.gather(*(served(apart, prompt) for prompt in prompts[1:]))
        gaps["queue"].append(gap(first))
    found = {
        name: {"median_ms": round(median(some), 1), "turns_ms": [round(one, 1) for one in some]}
        for name, some in gaps.items()
    }
    layer, first, share = round(median(layers), 1), round(median(firsts), 1), round(median(shares), 4)
    return found | {"layer_of_last_chunk_ms": layer, "ttft_ms": first, "share_of_ttft": share}


async def main() -> None:
    folder, secret = locate(MODEL), secrets.token_bytes(32)
    pools = Pools(
        {
            "p": PlacedWorker(Role.PREFILL, worker(folder, secret)),
            "d": PlacedWorker(Role.DECODE, worker(folder, secret)),
        },
        apart=True,
    )
    alone = AsyncEngine(folder, SETTINGS, client=ProcessEngine(folder, SETTINGS))
    apart = AsyncEngine(folder, SETTINGS, client=pools)
    result: dict[str, Any] = {"model": MODEL, "settings": SETTINGS, "prompts": {}}
    try:
        await alone.start()
        await apart.start()
        for name, length in PROMPTS.items():
            found = result["prompts"][name] = await turns(alone, apart, length)
            shown = ", ".join(f"{kind} {found[kind]['median_ms']} ms" for kind in ("alone", "free", "queue"))
            print(f"{name}: second token after {shown}; a layer takes {found['layer_of_last_chunk_ms']} ms", flush=True)
            print(f"    {found['share_of_ttft']:.1%} of the time to the first token, {found['ttft_ms']} ms", flush=True)
        result["early_blocks"] = pools.counts.early
        result["blocks"] = pools.counts.blocks
    finally:
        await alone.stop()
        await apart.stop()
    save("handover", "handover", result)


if __name__ == "__main__":
    asyncio.run(main())
