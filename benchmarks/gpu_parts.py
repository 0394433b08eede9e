"""The parts of benchmarks/gpu.py: each measures one thing on the engine of a `Bench` and reports it there."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from itertools import pairwise

import torch

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_filled import filled_step
from benchmarks.gpu_rig import Rig, longest_steps, restore_times
from benchmarks.random_weights import GPT_OSS_20B, LLAMA_1B, LLAMA_8B, qwen3_30b_shape, v2_lite_shape
from twostroke.metrics.steplog import StepLog
from twostroke.model.layers import Experts
from twostroke.ops.cuda.weights import shape_of
from twostroke.types import RequestState

# ---- one stream, one prompt ------------------------------------------------------------------------------------------


def measure_decode(bench: Bench, rig: Rig, name: str) -> RequestState:
    """Tokens/s of one stream, without its first tokens (captures, compilation)."""
    for _ in range(2):
        request = rig.ask(rig.prompt(128), 256)
        rig.run()
    times, skip = request.timeline.token_times, 16
    rate = (len(times) - 1 - skip) / (times[-1] - times[skip])
    bench.report(name, rate, "tokens/s", bench.ceilings["read_TBps"] * 1e12 / rig.model.weight_bytes())
    return request


def measure_ttft(bench: Bench, rig: Rig, name: str, lengths: tuple[int, ...]) -> None:
    for length in lengths:
        times = []
        for _ in range(5 if length < 30000 else 2):
            request = rig.ask(rig.prompt(length), 1)
            began = time.perf_counter()
            rig.run()
            times.append(request.timeline.token_times[0] - began)
        flops = rig.arch.linear_flops(length, 1) + rig.arch.attention_flops(0, length)
        read = weight_bytes(rig, length) / bench.ceilings["read_TBps"] / 1e12  # of a mixture: nearly all experts
        limit = max(flops / bench.ceilings["gemm_TFLOPs"] / 1e12, read)
        bench.report(
            f"{name}{length}", min(times[1:]) * 1e3, "ms", limit * 1e3, higher=False, first=round(times[0] * 1e3, 1)
        )


def weight_bytes(rig: Rig, rows: int) -> float:
    """Bytes of weights that a step of so many rows reads: of experts those that so many rows are expected to choose."""
    products = [product for layer in rig.arch.layers for product in layer.products(rig.arch.hidden)]
    more = sum(product.read(rows) - product.row_weights for product in products if product.matrices > 1)
    return rig.model.weight_bytes() + bytes_of_expert_weight(rig) * more


def bytes_of_expert_weight(rig: Rig) -> float:
    """Of one number, scales included."""
    feeds = [layer.feed for layer in rig.model.layers if isinstance(layer.feed, Experts)]
    if not feeds:
        return 0.0
    down = feeds[0].experts.down[0]
    return rig.model.ops.weight_bytes(down) / math.prod(shape_of(down))


def decode1(bench: Bench) -> None:
    measure_decode(bench, bench.rig(), "decode1")


def ttft(bench: Bench) -> None:
    measure_ttft(bench, bench.rig(), "ttft", (512, 2048, 8192, 32768, 122880))


def small(bench: Bench) -> None:
    measure_decode(bench, bench.rig(LLAMA_1B), "small_decode1")


# ---- many requests ---------------------------------------------------------------------------------------------------


def measure_offline(bench: Bench, name: str, count: int, prompt: int, new: int) -> None:
    """Offline: no reader waits for a stream, so max_gap does not cut prompts."""
    rig = bench.rig()
    pace, best = rig.core.scheduler.pace, 0.0
    usual, pace.max_gap = pace.max_gap, 1e6
    for _ in range(2):
        for _ in range(count):
            rig.ask(rig.prompt(prompt), new)
        steps = rig.core.scheduler.counters.steps
        best = max(best, count * new / rig.run())
        steps = rig.core.scheduler.counters.steps - steps
    pace.max_gap = usual
    bench.report(name, best, "tokens/s", offline_limit(bench, rig, count, prompt, new), steps=steps)


def offline_limit(bench: Bench, rig: Rig, count: int, prompt: int, new: int) -> float:
    """Tokens/s of a device that only multiplies, at the rate that it sustains, or only reads, whichever takes longer
    for each step, and that reads all prompts first."""
    compute, read = bench.ceilings["gemm_sustained_TFLOPs"] * 1e12, bench.ceilings["read_TBps"] * 1e12
    arch, entry = rig.arch, rig.core.scheduler.tables.layout.token_bytes
    prompts = count * (arch.linear_flops(prompt, 1) + arch.attention_flops(0, prompt)) / compute
    products = max(arch.linear_flops(count, count) / compute, weight_bytes(rig, count) / read)
    contexts = count * (prompt + new / 2) * entry / read
    return count * new / (prompts + (new - 1) * (products + contexts))


def offline256(bench: Bench) -> None:
    measure_offline(bench, "offline256", 256, 512, 128)


def offline64(bench: Bench) -> None:
    measure_offline(bench, "offline64", 64, 1024, 512)


def prefix(bench: Bench) -> None:
    """32 requests that share 4,096 tokens; the second round has no captures and no compilation."""
    rig, seconds = bench.rig(), {}
    for _ in range(2):
        shared = rig.prompt(4096)
        for name in ("prefix_cold", "prefix_warm"):
            for _ in range(32):
                rig.ask(shared + rig.prompt(64), 64)
            seconds[name] = rig.run()
    for name, value in seconds.items():
        bench.report(name, value, "s", higher=False)


def decode64(bench: Bench) -> None:
    """A step of 64 streams at 4,096 tokens, once all of them run."""
    measure_streams(bench, bench.rig(), "decode64x4096", 64, 4096)


def mixture(bench: Bench) -> None:
    """Qwen3-30B-A3B's shape; limits count the experts that so many rows are expected to choose."""
    rig = bench.own(qwen3_30b_shape(), max_model_len=16384)
    measure_decode(bench, rig, "mixture_decode1")
    measure_ttft(bench, rig, "mixture_ttft", (512, 8192))
    measure_streams(bench, rig, "mixture_decode32", 32, 512)


def oai(bench: Bench) -> None:
    """gpt-oss-20b's shape, its experts in MXFP4."""
    rig = bench.own(GPT_OSS_20B, max_model_len=16384, mxfp4=True)
    measure_decode(bench, rig, "oai_decode1")
    measure_ttft(bench, rig, "oai_ttft", (512, 8192))
    measure_streams(bench, rig, "oai_decode32", 32, 512)


def latent(bench: Bench) -> None:
    """DeepSeek-V2-Lite's shape."""
    rig, context = bench.own(v2_lite_shape(), max_model_len=40960), 32768
    measure_decode(bench, rig, "latent_decode1")
    measure_ttft(bench, rig, "latent_ttft", (512, 8192))
    entry = rig.core.scheduler.tables.layout.token_bytes
    for count in (1, 16, 32, 64):
        read = weight_bytes(rig, count) + count * context * entry
        step = filled_step(rig, count, context) * 1e3
        limit = read / bench.ceilings["read_TBps"] / 1e9
        bench.report(f"latent_decode{count}x{context}", step, "ms/step", limit, higher=False)
    grouped = 2 * 8 * 128 * 2 * len(rig.arch.layers)  # K and V of eight heads of 128 in bf16, in as many layers
    free, _ = torch.cuda.mem_get_info()
    room = (free + rig.runner.kv.data.nbytes) / 1e9
    bench.report(
        f"latent_kv64x{context}", 64 * context * entry / 1e9, "GB", room=round(room, 1),
        grouped_heads_GB=round(64 * context * grouped / 1e9, 1),
    )  # fmt: skip


def measure_streams(bench: Bench, rig: Rig, name: str, count: int, context: int, steps: int = 24) -> None:
    """One step of so many streams at `context` tokens, once all of them run."""
    requests = [rig.ask(rig.prompt(context), 4096) for _ in range(count)]
    while min(len(r.timeline.token_times) for r in requests) < steps + 8:
        rig.core.step()
    times = min(requests, key=lambda r: len(r.timeline.token_times)).timeline.token_times
    step = (times[-1] - times[-1 - steps]) / steps
    entry = rig.core.scheduler.tables.layout.token_bytes
    read = weight_bytes(rig, count) + sum(r.computed for r in requests) * entry
    for request in requests:
        rig.core.abort(request.id)
    rig.run()
    bench.report(name, step * 1e3, "ms/step", read / bench.ceilings["read_TBps"] / 1e9, higher=False)


def gap(bench: Bench) -> None:
    """Gaps of 32 streams during a prompt of 65,536 tokens, and its TTFT beside them."""
    rig = bench.rig()
    alone = rig.ask(rig.prompt(65536), 1)
    began = time.perf_counter()
    rig.run()
    ttft_alone = alone.timeline.token_times[0] - began
    gaps: dict[str, float] = {}
    for name in ("without", "warm up", "with"):
        streams = [rig.ask(rig.prompt(512), 3000) for _ in range(32)]
        while min(len(s.timeline.token_times) for s in streams) < 40:
            rig.core.step()
        mark = time.perf_counter()
        long = rig.ask(rig.prompt(65536), 1) if name != "without" else None
        rig.core.steplog = steps = StepLog()
        for _ in range(200):
            rig.core.step()
        while long is not None and not long.timeline.token_times:
            rig.core.step()
        rig.core.steplog = None
        until = long.timeline.token_times[0] if long is not None else time.perf_counter()
        for stream in streams:
            rig.core.abort(stream.id)
        rig.run()
        pairs = [pair for s in streams for pair in pairwise(s.timeline.token_times)]
        found = sorted(b - a for a, b in pairs if mark <= a and b <= until)
        gaps[name] = found[int(0.99 * len(found))] * 1e3
    bench.report(
        "gap_p99", gaps["with"], "ms", without=round(gaps["without"], 2), worst=round(found[-1] * 1e3, 2),
        ttft_ratio=round((until - mark) / ttft_alone, 3), ttft_alone=round(ttft_alone, 3),
        max_gap=rig.core.scheduler.pace.max_gap * 1e3, longest=longest_steps(steps),
    )  # fmt: skip


def offload(bench: Bench) -> None:
    """A prompt whose blocks are on the host, beside one that is computed and one that is cached on the device."""
    rig = bench.own(LLAMA_8B, kv_blocks=1040, max_model_len=16384, kv_offload=8 << 30)
    for name, ms in restore_times(rig, 8192).items():
        bench.report(f"offload_{name}", ms, "ms")


# ---- what the host costs ---------------------------------------------------------------------------------------------


def device_ms(rig: Rig, before: dict[object, int]) -> float:
    """Milliseconds of the captured step that ran most often since `before`, replayed alone; 0: none was captured."""
    shapes = rig.runner.shapes
    shape = max(shapes, key=lambda s: shapes[s].occurred - before.get(s, 0))
    if shapes[shape].graph is None:
        return 0.0
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(rig.runner.stream):
        for event in (began, ended):
            event.record()
            for _ in range(30):
                shapes[shape].graph.replay()
    ended.synchronize()
    return began.elapsed_time(ended) / 30


def host(bench: Bench) -> None:
    """Steps of the engine beside the same steps replayed on the device alone: one stream, and 32 with a prompt."""
    rig = bench.rig()
    for _ in range(2):
        before = {shape: entry.occurred for shape, entry in rig.runner.shapes.items()}
        times = rig.ask(rig.prompt(128), 380).timeline.token_times
        rig.run()
    step = (times[-1] - times[-101]) * 10  # contexts 408 to 508 are the shape that ran most often
    own = device_ms(rig, before)
    bench.report("step1", step, "ms/step", own, higher=False, host_share=round(1 - own / step, 4))
    streams = [rig.ask(rig.prompt(512), 100_000) for _ in range(32)]
    while min(len(stream.timeline.token_times) for stream in streams) < 12:
        rig.core.step()
    pace = rig.core.scheduler.pace
    usual, pace.max_gap = pace.max_gap, 1.0  # prompts are not cut
    for prompt in (0, 16, 128, 512, 1024):
        before = {shape: entry.occurred for shape, entry in rig.runner.shapes.items()}
        for turn in range(30):
            if turn == 10:
                began = time.perf_counter()
            if prompt:
                rig.ask(rig.prompt(prompt), 1)
            rig.core.step()
        step = (time.perf_counter() - began) * 1e3 / 20
        own = device_ms(rig, before)
        bench.report(f"step32+{prompt}", step, "ms/step", own, higher=False)
    pace.max_gap = usual
    for stream in streams:
        rig.core.abort(stream.id)
    rig.run()


# ---- where the time goes ---------------------------------------------------------------------------------------------


def breakdown(bench: Bench) -> None:
    """Device time of a decode step and of an 8k prefill, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    rig = bench.rig()
    for name, length, new in (("decode", 128, 40), ("prefill8192", 8192, 1)):
        rig.ask(rig.prompt(length), new)
        rig.run()
        rig.ask(rig.prompt(length), new)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            rig.run()
            torch.cuda.synchronize()
        kernels = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)[:14]
        table = {e.key[:90]: (round(e.self_device_time_total / 1e3, 3), e.count) for e in kernels}
        bench.rows[f"breakdown_{name}{bench.suffix}"] = table
        print(f"-- {name}: kernel, ms in all, calls")
        for key, (ms, calls) in table.items():
            print(f"   {ms:9.3f} {calls:6d}  {key}", flush=True)


# ---- narrow weights --------------------------------------------------------------------------------------------------


def weights(bench: Bench) -> None:
    """Narrow weights; each limit is from the bytes of its own weights."""
    for quantize in ("fp8", "int4", "int8"):
        rig = bench.own(LLAMA_8B, quantize=quantize, max_model_len=16384)
        measure_decode(bench, rig, f"{quantize}_decode1")
        for count in (2, 5, 16, 64):
            measure_streams(bench, rig, f"{quantize}_decode{count}x512", count, 512)
        measure_ttft(bench, rig, f"{quantize}_ttft", (8192,))
        del rig


def kv(bench: Bench) -> None:
    """Attention of a step of 32 streams at 16,384 tokens, one layer, by the format of K and V."""
    from benchmarks.gpu_kernels import time_decode

    bench.drop()
    floats = 0.0
    for kind in ("bfloat16", "int8", "fp8"):
        seconds, read = time_decode(32, 16384, kind)
        floats = floats or seconds
        limit = read / bench.ceilings["read_TBps"] / 1e6
        bench.report(f"kv_{kind}", seconds * 1e6, "us", limit, higher=False, times_bf16=round(floats / seconds, 2))


# ---- the peer --------------------------------------------------------------------------------------------------------


def transformers(bench: Bench) -> None:
    """transformers, eager and compiled."""
    bench.drop()
    command = [sys.executable, "-m", "benchmarks.gpu_peers"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
        out, trouble = done.stdout, done.stderr[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        out, trouble = (late.stdout or b"").decode(), "stopped after 170 s"
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    for row in found:
        name = row["name"].split()[0]
        ours = bench.rows.get(name, {}).get("value")  # type: ignore[attr-defined]
        ratio = None if ours is None else round(ours / row["value"] if row["unit"] != "ms" else row["value"] / ours, 2)
        bench.report(f"transformers {row['name']}", row["value"], row["unit"], ours=ours, ours_times=ratio)
    if trouble:
        print("   transformers:", trouble)
