"""The machine's limits: measured read bandwidth and integer-dot peak, and the tokens/s that they allow."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from twostroke.hardware import usable_cores
from twostroke.kv.layout import make_layout
from twostroke.model.arch import Arch
from twostroke.ops.formats import from_float
from twostroke.ops.select import make_ops
from twostroke.weights.quantize import quantize

KV_FORMAT = "float16"


def best_rate(work: float, call: Callable[[], object], seconds: float = 2.0) -> float:
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = max(best, work / (time.perf_counter() - start))
    return best


def read_bandwidth() -> float:
    """Bytes/s of summing a float array larger than the L2 caches, on all cores."""
    data = torch.ones(1 << 28)  # 1 GiB
    return best_rate(data.nbytes, data.sum)


def dot_peaks() -> dict[str, float]:
    """Operations/s (a multiply and an add are two) of int8 products whose operands stay in the caches.

    Two measurements, since neither reaches the instruction's limit: the native matmul on 512 x 512 weights, with group
    scales, and torch's int8 product with plain int32 sums, which uses tile registers (AMX) where there are any.
    """
    rows, width = 256, 512
    ops = make_ops("cpu", None, usable_cores(), None)
    weight = ops.pack([quantize(from_float(np.ones((width, width), np.float32)), "int8")])
    x = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    found = {"own matmul, int8 in groups of 32": best_rate(2 * rows * width * width, lambda: ops.linear(x, weight))}
    left = torch.randint(-100, 100, (1024, 1024), dtype=torch.int8)
    right = torch.randint(-100, 100, (1024, 1024), dtype=torch.int8).t()
    found["torch._int_mm"] = best_rate(2 * 1024**3, lambda: torch._int_mm(left, right))
    return found


def floors(arch: Arch, weight_bytes: int, bandwidth: float, peak: float) -> dict[str, float]:
    """Tokens/s if each step only read weights and KV once, or only multiplied: the lower of the two."""
    entry = make_layout(arch, KV_FORMAT).token_bytes

    def decode(batch: int, context: int) -> float:
        reading = (weight_bytes + batch * context * entry) / bandwidth
        multiplying = (arch.linear_flops(batch, batch) + batch * arch.attention_flops(context, 1)) / peak
        return batch / max(reading, multiplying)

    def prefill(length: int) -> float:
        multiplying = (arch.linear_flops(length, 1) + arch.attention_flops(0, length)) / peak
        return length / max(weight_bytes / bandwidth, multiplying)

    return {
        "decode_1": decode(1, 80),
        "decode_16": decode(16, 64),
        "prefill_512": prefill(512),
        "prefill_2048": prefill(2048),
        "decode_1_context_4096": decode(1, 4112),
    }
