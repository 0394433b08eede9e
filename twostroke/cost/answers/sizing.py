"""What fits on one worker, and how fast each stroke is there. Bytes are exact: `resolve` computes them."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.cost.model.roofline import kv_bytes_per_token
from twostroke.cost.simulation.deployment import Deployment
from twostroke.errors import ConfigError

ROOM = 0.97  # largest share of the memory that weights may take: the KV cache needs some


@dataclass(frozen=True, slots=True)
class Phase:
    """One stroke of a typical request, alone and in the largest batch."""

    seconds: float  # prefill: TTFT of the prompt alone; decode: TPOT alone
    intensity: float  # FLOP for each byte
    bound: str  # "compute" or "memory"
    batch_seconds: float  # decode: TPOT with a full batch; prefill: TTFT of the prompt while that batch runs
    tokens_rate: float  # tokens/s of one worker in this stroke
    dollars_per_million: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """What fits on one worker (exact), and how fast each stroke is (by the roofline)."""

    deployment: Deployment
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    prompt: int
    output: int
    largest_batch: int  # typical requests whose K and V fit in memory at once
    batch: int  # the smaller of that and max_requests
    ridge: float
    prefill: Phase
    decode: Phase


def check_weights(deployment: Deployment) -> None:
    """ConfigError when the weights leave no room for a KV cache."""
    weights, memory = deployment.model.bytes, deployment.device.memory * deployment.gpus
    if weights > ROOM * memory:
        raise ConfigError(
            f"{deployment.precision} weights take {weights / 1e9:.1f} GB; {deployment.gpus} × {deployment.device.name} "
            f"has {memory / 1e9:.0f} GB, of which K and V need some: use more devices or a narrower precision."
        )


def size(deployment: Deployment, prompt: int, output: int) -> Sizing:
    """ConfigError when the weights or one request do not fit."""
    check_weights(deployment)
    weights, settings = deployment.model.bytes, deployment.settings
    each = settings.layout.blocks_for(min(prompt + output, settings.max_model_len), settings.max_batch_tokens)
    largest = settings.kv_blocks // each
    batch = max(1, min(largest, settings.max_requests))
    prefill, decode = _phases(deployment, prompt, output, batch)
    return Sizing(
        deployment=deployment,
        parameters=deployment.arch.parameters,
        weight_bytes=weights,
        kv_bytes_per_token=kv_bytes_per_token(settings.layout),
        kv_bytes=settings.kv_blocks * settings.layout.block_bytes,
        prompt=prompt,
        output=output,
        largest_batch=largest,
        batch=batch,
        ridge=deployment.roofline(settings).ridge,
        prefill=prefill,
        decode=decode,
    )


def _phases(deployment: Deployment, prompt: int, output: int, batch: int) -> tuple[Phase, Phase]:
    settings = deployment.settings
    line = deployment.roofline(settings)
    hourly = deployment.price / max(1, deployment.workers) / 3600
    alone = line.prefill_seconds(prompt, 0, settings.max_batch_tokens)
    context = prompt + output // 2
    single, full = line.decode_seconds(1, context), line.decode_seconds(batch, context)
    reading = line.intensity([(0, prompt)], [], 1)
    writing = line.intensity([], [context] * batch, batch)

    def bound(intensity: float) -> str:
        return "compute" if intensity > line.ridge else "memory"

    prefill_rate, decode_rate = prompt / alone, batch / full
    return (
        Phase(alone, reading, bound(reading), alone + full, prefill_rate, hourly / prefill_rate * 1e6),
        Phase(single, writing, bound(writing), full, decode_rate, hourly / decode_rate * 1e6),
    )
