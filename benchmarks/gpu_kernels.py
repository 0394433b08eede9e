"""Times the GPU kernels one by one, over several tile shapes: `python -m benchmarks.gpu_kernels [part ...]`.

Parts: ceilings, gemv, narrow, decode, prefill, gemm. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.cuts import Cut, DeviceBatch
from twostroke.ops.cuda.kernels import gemv as g
from twostroke.ops.cuda.kernels.decode import longer, split_count
from twostroke.ops.cuda.kernels.dense import sdpa
from twostroke.ops.cuda.kernels.prefill import make_tiles, prefill_attention
from twostroke.ops.cuda.kernels.quantized import to_fp8, to_int4, to_int8
from twostroke.ops.cuda.kernels.rows import ACTIVATIONS, NORM, NOTHING
from twostroke.ops.interface import BLOCK, Attention, Batch, Gate, GroupBlocks, KVLayer, Norm, RopeTable
from twostroke.record import replace

DEVICE = torch.device("cuda")
RESULTS: dict[str, object] = {}
WARM, MEASURED = 1.0, 2.0  # seconds


def seconds(work: Callable[[], object], repeat: int = 10, graph: bool = True) -> float:
    """Median time of one call, replayed from a graph."""
    work()
    torch.cuda.synchronize()
    run = work
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        run = captured.replay
    run()
    times = []
    for _ in range(repeat):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        run()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 1e3)
    return sorted(times)[len(times) // 2]


def note(part: str, name: str, value: object) -> None:
    RESULTS.setdefault(part, {})[name] = value  # type: ignore[index]
    print(f"{part:9s} {name:60s} {value}", flush=True)


def ceilings() -> dict[str, float]:
    x = torch.randn(1 << 30, dtype=torch.bfloat16, device=DEVICE)
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / seconds(lambda: y.copy_(x))
    view = x.view(torch.int32)
    read = x.nbytes / seconds(lambda: torch.sum(view, dtype=torch.int32))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in "ab")
    gemm = 2 * 8192**3 / seconds(lambda: a @ b)
    found = {"copy_TBps": copy / 1e12, "read_TBps": read / 1e12, "gemm_TFLOPs": gemm / 1e12}
    found["gemm_sustained_TFLOPs"] = sustained(lambda: a @ b, 2 * 8192**3) / 1e12
    for name, value in found.items():
        note("ceilings", name, round(value, 2))
    return found


def sustained(work: Callable[[], object], flops: float) -> float:
    """FLOP/s once the device has computed for a second: its power is limited, and it lowers its clock."""
    rates: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < WARM + MEASURED:
        first = time.perf_counter()
        for _ in range(100):
            work()
        torch.cuda.synchronize()
        if first - began > WARM:
            rates.append(100 * flops / (time.perf_counter() - first))
    return sorted(rates)[len(rates) // 2]


SILU = ACTIVATIONS["silu"]
SHAPES = {
    "8B qkv": (6144, 4096, NORM, False), "8B o": (4096, 4096, NOTHING, True),
    "8B gate_up": (28672, 4096, NORM, False), "8B down": (4096, 14336, SILU, True),
    "8B head": (128256, 4096, NORM, False), "1B qkv": (3072, 2048, NORM, False),
    "1B o": (2048, 2048, NOTHING, True), "1B gate_up": (16384, 2048, NORM, False),
    "1B down": (2048, 8192, SILU, True),
}  # fmt: skip
TILES = [
    (2, 1024, 4, 1),
    (4, 1024, 4, 1),
    (4, 1024, 4, 2),
    (8, 512, 4, 1),
    (8, 512, 4, 2),
    (8, 512, 4, 3),
    (8, 1024, 8, 1),
    (8, 1024, 8, 2),
    (16, 256, 4, 1),
    (16, 256, 4, 2),
    (16, 512, 8, 1),
    (8, 256, 2, 2),
    (16, 256, 2, 1),
]


def gemvs() -> None:
    for name, (n, k, before, add) in SHAPES.items():
        copies = max(2, min(16, (1 << 29) // (n * k * 2)))
        weights = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
        x = torch.randn(1, k * (2 if before >= 2 else 1), device=DEVICE, dtype=torch.bfloat16)
        norm, out = (
            torch.rand(k, device=DEVICE, dtype=torch.bfloat16),
            torch.zeros(1, n, device=DEVICE, dtype=torch.bfloat16),
        )
        row = x[:, :k].contiguous()
        t = seconds(lambda ws=weights, r=row: [r @ w.t() for w in ws]) / copies
        note("gemv", f"{name} cublas", f"{t * 1e6:.2f} us {n * k * 2 / t / 1e12:.2f} TB/s")
        for tile in TILES:
            if n > 100000 and tile[0] < 4:
                continue

            def all_of(ws: list = weights, tile: tuple = tile, k: int = k) -> None:
                for w in ws:
                    g.gemv(x, w, None, out, before=before, norm=norm, eps=1e-5, add=add, tile=tile)

            t = seconds(all_of) / copies
            note("gemv", f"{name} {tile}", f"{t * 1e6:.2f} us {n * k * 2 / t / 1e12:.2f} TB/s")
        del weights


def narrow() -> None:
    """Narrow matrices with one row and several, with the tiles that the backend chooses."""
    kinds = {"int4": to_int4, "fp8": to_fp8, "int8": to_int8}
    ops = CudaOps()
    for name, (n, k, before, add) in SHAPES.items():
        if name.startswith("1B"):
            continue
        full = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16)
        steps = {0: None, 1: Norm(torch.rand(k, device=DEVICE), 1e-5), 2: Gate("silu")}
        for kind, to in kinds.items():
            weight = to(full, None)
            read = weight.codes.nbytes + weight.scales.nbytes
            copies = max(2, min(16, (1 << 29) // read))
            ws = [replace(weight, codes=weight.codes.clone()) for _ in range(copies)]
            for rows in (1, 4, 16):
                x = torch.randn(rows, k * (2 if before >= 2 else 1), device=DEVICE, dtype=torch.bfloat16)
                out = torch.zeros(rows, n, device=DEVICE, dtype=torch.bfloat16)

                def all_of(ws: list = ws, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
                    for w in ws:
                        ops.linear(x, w, before=steps[before], add_to=out if add else None)

                t = seconds(all_of) / copies
                note("narrow", f"{name} {kind} {rows} rows", f"{t * 1e6:.2f} us {read / t / 1e12:.2f} TB/s")
            del ws


def paged(requests: int, context: int, new: int, kv_format: str = "bfloat16", dim: int = 128, kv_heads: int = 8):
    columns = -(-context // BLOCK)
    blocks = requests * columns
    dtype = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kv_format]
    if kv_format == "bfloat16":
        data = torch.randn(2, blocks, kv_heads, BLOCK, dim, device=DEVICE, dtype=dtype)
    else:
        data = torch.randint(0, 100, (2, blocks, kv_heads, BLOCK, dim), device=DEVICE, dtype=torch.uint8).view(dtype)
    scales = torch.rand(2, blocks, kv_heads, BLOCK, device=DEVICE) * 0.02 if kv_format != "bfloat16" else None
    kv = KVLayer(kv_format, data[0], data[1], *([None, None] if scales is None else [scales[0], scales[1]]))  # type: ignore[arg-type]
    tables = torch.randperm(blocks, device=DEVICE).to(torch.int32).view(requests, columns)
    positions = (torch.arange(context - new, context).repeat(requests)).to(DEVICE)
    slots = tables.repeat_interleave(new, 0)[torch.arange(requests * new, device=DEVICE), positions // BLOCK].long()
    starts = torch.arange(0, requests * new + 1, new, dtype=torch.int32, device=DEVICE)
    contexts = torch.full((requests,), context, dtype=torch.int32, device=DEVICE)
    batch = Batch(
        positions, positions, starts, contexts, (GroupBlocks(slots * BLOCK + positions % BLOCK, tables),), positions
    )
    rope = RopeTable(*(torch.randn(context, dim // 2, device=DEVICE) for _ in "cs"))
    return batch, kv, Attention(4 * kv_heads, kv_heads, dim, dim**-0.5, rope=rope)


def time_decode(requests: int, context: int, kv_format: str) -> tuple[float, int]:
    """Seconds of one layer's attention for streams of that context as the engine runs it, and the bytes it reads."""
    batch, kv, attention = paged(requests, context, 1, kv_format)
    ops = CudaOps()
    scale = longer(requests * attention.kv_heads)
    cut = Cut(None, requests, split_count(-(-context // scale)), None, 1, scale=scale)
    streams = DeviceBatch(
        batch.tokens, batch.positions, batch.starts, batch.contexts, batch.groups, batch.logit_rows, streams=True,
        splits=cut.splits, cuts={ops.kind(attention): cut},
    )  # fmt: skip
    qkv = torch.randn(requests, 48 * 128, device=DEVICE, dtype=torch.bfloat16)
    read = (kv.keys.nbytes + kv.values.nbytes) + (0 if kv.key_scales is None else 2 * kv.key_scales.nbytes)
    calls = 16 if requests == 1 else 1

    def run() -> None:
        for _ in range(calls):
            ops.attend(qkv, attention, kv, streams, 0)

    return seconds(run) / calls, read


def decodes() -> None:
    for requests, context in ((64, 4096), (1, 384), (256, 576), (32, 16384)):
        for kv_format in ("bfloat16", "int8", "fp8"):
            t, read = time_decode(requests, context, kv_format)
            note("decode", f"{requests}x{context} {kv_format}", f"{t * 1e6:.1f} us {read / t / 1e12:.2f} TB/s")


def prefills() -> None:
    import numpy as np

    for new, context in ((512, 512), (2048, 2048), (8192, 8192), (8192, 32768)):
        batch, kv, attention = paged(1, context, new)
        q = torch.randn(new, 4096, device=DEVICE, dtype=torch.bfloat16)
        out = torch.empty_like(q)
        flops = 4 * 4096 * (new * (context - new) + new * (new + 1) / 2)
        tiles = torch.from_numpy(make_tiles(np.array([new]), np.array([context]), np.array([0]), 32)).to(DEVICE)
        for tile_n, stages, warps in ((64, 3, 8), (64, 2, 8), (128, 2, 8), (64, 3, 4), (32, 4, 8)):

            def run(tile_n: int = tile_n, stages: int = stages, warps: int = warps) -> None:
                prefill_attention(q, attention, kv, batch, 0, out, tiles, tile_n=tile_n, stages=stages, warps=warps)

            try:
                t = seconds(run, 5)
            except Exception as error:
                note(
                    "prefill",
                    f"{new}/{context} {tile_n} {stages} {warps}",
                    f"{type(error).__name__}: {str(error)[:80]}",
                )
                continue
            note(
                "prefill",
                f"{new}/{context} tile {tile_n} stages {stages} warps {warps}",
                f"{t * 1e6:.0f} us {flops / t / 1e12:.0f} TFLOP/s",
            )
        k, v = (torch.randn(context, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
        q3 = q.view(new, 32, 128)
        before = context - new
        try:

            def dense() -> None:
                sdpa(q3, k[before:], v[before:], attention.scale, True, before > 0)
                if before:
                    sdpa(q3, k[:before], v[:before], attention.scale, False, True)

            t = seconds(dense, 5)
            note("prefill", f"{new}/{context} cudnn", f"{t * 1e6:.0f} us {flops / t / 1e12:.0f} TFLOP/s")
            if before == 0:
                mine = sdpa(q3, k, v, attention.scale, True, False)[0]
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    q4, k4, v4 = (x[:256].transpose(0, 1).unsqueeze(0).float() for x in (q3, k, v))
                    ref = torch.nn.functional.scaled_dot_product_attention(q4, k4, v4, is_causal=True, enable_gqa=True)
                note("prefill", "cudnn error", float((mine[:256].float() - ref[0].transpose(0, 1)).norm() / ref.norm()))
        except Exception as error:
            note("prefill", f"{new}/{context} cudnn", f"{type(error).__name__}: {str(error)[:300]}")


def gemms() -> None:
    for name, (n, k, _, _) in SHAPES.items():
        if name.startswith("1B") or "head" in name:
            continue
        weights = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
        for m in (2, 8, 16, 64, 256, 512, 2048, 8192):
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            t = seconds(lambda ws=weights, x=x: [x @ w.t() for w in ws]) / 4
            note(
                "gemm",
                f"{name} {m} rows",
                f"{t * 1e6:.1f} us {2 * m * n * k / t / 1e12:.0f} TFLOP/s {n * k * 2 / t / 1e12:.2f} TB/s",
            )


if __name__ == "__main__":
    parts = {
        "ceilings": ceilings,
        "gemv": gemvs,
        "decode": decodes,
        "prefill": prefills,
        "gemm": gemms,
        "narrow": narrow,
    }
    for part in sys.argv[1:] or parts:
        began = time.perf_counter()
        parts[part]()
        torch.cuda.empty_cache()
        print(f"[{part} took {time.perf_counter() - began:.1f} s]", flush=True)
    print(json.dumps(RESULTS))
