"""The engine on one GPU against its limits: `python -m benchmarks.gpu [--json FILE] [part ...]`.

Random bf16 weights in the shape of Llama-3.1-8B (and Llama-3.2-1B), greedy, no end-of-text. The ceilings are measured
first; a limit is bytes over the measured read bandwidth or FLOPs over the measured GEMM rate. The last line is JSON.
Parts: decode1 ttft offline256 offline64 prefix decode64 gap small breakdown weights start. Default: all.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

PROCESS_START = time.perf_counter()

import torch  # noqa: E402

from twostroke.config import make_config, resolve  # noqa: E402
from twostroke.engine.core import Core  # noqa: E402
from twostroke.hardware import Hardware  # noqa: E402
from twostroke.kv.storage import KVStorage  # noqa: E402
from twostroke.metrics.timeline import Timeline  # noqa: E402
from twostroke.model.arch import Arch  # noqa: E402
from twostroke.model.transformer import Transformer  # noqa: E402
from twostroke.ops.cuda import CudaOps  # noqa: E402
from twostroke.run.cuda_runner import CudaRunner  # noqa: E402
from twostroke.sampling import SamplingParams  # noqa: E402
from twostroke.schedule.make import make_scheduler  # noqa: E402
from twostroke.types import Request  # noqa: E402
from twostroke.weights.random import LLAMA_1B, LLAMA_8B, random_model  # noqa: E402

VLLM = {"decode1": 200.9, "ttft512": 16.9, "ttft2048": 51.7, "ttft8192": 221.0, "ttft32768": 1201.6,
        "offline256": 6816, "offline64": 5805, "prefix_cold": 0.70, "prefix_warm": 0.63,
        "small_decode1": 395}  # fmt: skip
RESULTS: dict[str, object] = {}


@dataclass
class Rig:
    """An engine without text: token ids in, token ids out."""

    arch: Arch
    model: Transformer
    core: Core
    runner: CudaRunner
    ids: int = 0

    def ask(self, tokens: list[int], new: int, **params: object) -> Request:
        sampling = SamplingParams(max_tokens=new, temperature=0.0, **params)  # type: ignore[arg-type]
        request = Request(self.ids, tokens, sampling, 0, Timeline(time.perf_counter()))
        request.limit = len(tokens) + new
        self.ids += 1
        self.core.submit(request)
        return request

    def run(self) -> float:
        began = time.perf_counter()
        while not self.core.idle:
            self.core.step()
        return time.perf_counter() - began

    def prompt(self, length: int) -> list[int]:
        rng = random.Random(self.ids)
        return [rng.randrange(self.arch.vocab) for _ in range(length)]


def make_rig(
    arch: Arch, model: Transformer | None = None, kv_dtype: str = "bfloat16", quantize: str | None = None,
    **settings: object,
) -> Rig:  # fmt: skip
    ops = model.ops if model is not None else CudaOps(torch.bfloat16, quantize=quantize)
    length = settings.setdefault("max_model_len", 131_072)
    model = model or random_model(arch, ops, 131_072)  # type: ignore[arg-type]
    free = torch.cuda.mem_get_info()[0] - (6 << 30)  # what a step of max_batch_tokens needs beside it
    config = make_config(device="cuda", dtype="bfloat16", kv_dtype=kv_dtype, seed=1, **settings)
    resolved = resolve(config, arch, Hardware("cuda", 16, free), 0)
    kv = KVStorage(arch, resolved.layout, resolved.kv_blocks, resolved.kv_dtype, ops.device)  # type: ignore[arg-type]
    scheduler = make_scheduler(arch, resolved, f"random {length}")
    runner = CudaRunner(model, kv, scheduler.tables.array, ops)  # type: ignore[arg-type]
    return Rig(arch, model, Core(scheduler, runner), runner)


def report(name: str, value: float, unit: str, limit: float | None = None, higher: bool = True, **more: object) -> None:
    share = None
    if limit:
        share = value / limit if higher else limit / value
    peer = VLLM.get(name)
    ahead = (value / peer if higher else peer / value) if peer else None
    RESULTS[name] = {"value": round(value, 4), "unit": unit, "limit": limit and round(limit, 3),
                     "share": share and round(share, 3), "vllm": peer, "times_vllm": ahead and round(ahead, 3),
                     **more}  # fmt: skip
    text = f"{name:24s} {value:12.3f} {unit:10s}"
    text += f" limit {limit:10.2f} ({share:.1%})" if limit else ""
    text += f"  vLLM {peer} ({ahead:.2f}x)" if ahead else ""
    print(text, "".join(f"  {k}={v}" for k, v in more.items()), flush=True)


def decode_rate(requests: list[Request], skip: int = 16) -> float:
    """Tokens per second of one stream, once its first tokens (captures, compilation) are out."""
    times = requests[0].timeline.token_times
    return (len(times) - 1 - skip) / (times[-1] - times[skip])


def decode1(rig: Rig, name: str = "decode1") -> None:
    weights = rig.model.weight_bytes()
    for _ in range(2):
        request = rig.ask(rig.prompt(128), 256)
        rig.run()
    report(name, decode_rate([request]), "tokens/s", CEILINGS["read_TBps"] * 1e12 / weights)


def ttft(rig: Rig, lengths: tuple[int, ...] = (512, 2048, 8192, 32768, 122880), name: str = "ttft") -> None:
    for length in lengths:
        times = []
        for _ in range(4 if length < 30000 else 2):
            request = rig.ask(rig.prompt(length), 1)
            began = time.perf_counter()
            rig.run()
            times.append(request.timeline.token_times[0] - began)
        flops = rig.arch.linear_flops(length, 1) + rig.arch.attention_flops(0, length)
        limit = flops / CEILINGS["gemm_TFLOPs"] / 1e12
        report(f"{name}{length}", min(times[1:]) * 1e3, "ms", limit * 1e3, higher=False, first=round(times[0] * 1e3, 1))


def offline(rig: Rig, name: str, count: int, prompt: int, new: int) -> None:
    """Nobody reads along, so prompts need not be cut short for the streams' sake: max_gap is one second."""
    rig.core.scheduler.pace.max_gap, best = 1.0, 0.0
    for _ in range(2):
        for _ in range(count):
            rig.ask(rig.prompt(prompt), new)
        steps = rig.core.scheduler.counters.steps
        best = max(best, count * new / rig.run())
        steps = rig.core.scheduler.counters.steps - steps
    rig.core.scheduler.pace.max_gap = 0.05
    report(name, best, "tokens/s", steps=steps)


def prefix(rig: Rig) -> None:
    for _ in range(2):
        shared = rig.prompt(4096)
        for name in ("prefix_cold", "prefix_warm"):
            for _ in range(32):
                rig.ask(shared + rig.prompt(64), 64)
            seconds = rig.run()
            # the second round is past all captures and compilation
            RESULTS[name] = seconds
    for name in ("prefix_cold", "prefix_warm"):
        report(name, float(RESULTS[name]), "s", higher=False)  # type: ignore[arg-type]


def decode_batch(rig: Rig, name: str, count: int, context: int, steps: int = 24) -> None:
    """A step of `count` streams at `context`, once all of them run."""
    requests = [rig.ask(rig.prompt(context), 4096) for _ in range(count)]
    while min(len(r.timeline.token_times) for r in requests) < steps + 8:
        rig.core.step()
    times = min(requests, key=lambda r: len(r.timeline.token_times)).timeline.token_times
    step = (times[-1] - times[-1 - steps]) / steps
    entry = rig.core.scheduler.tables.layout.entry_bytes * len(rig.arch.layers)
    read = rig.model.weight_bytes() + sum(r.computed for r in requests) * entry
    for request in requests:
        rig.core.abort(request)
    rig.run()
    report(name, step * 1e3, "ms/step", read / CEILINGS["read_TBps"] / 1e9, higher=False)


def gap(rig: Rig) -> None:
    alone = rig.ask(rig.prompt(65536), 1)
    began = time.perf_counter()
    rig.run()
    ttft_alone = alone.timeline.token_times[0] - began
    gaps: dict[str, float] = {}
    for name in ("without", "with"):
        streams = [rig.ask(rig.prompt(512), 1500 if name == "with" else 200) for _ in range(32)]
        while min(len(s.timeline.token_times) for s in streams) < 40:
            rig.core.step()
        mark = time.perf_counter()
        long = rig.ask(rig.prompt(65536), 1) if name == "with" else None
        if long is not None:
            while not long.timeline.token_times:
                rig.core.step()
            until = time.perf_counter()
            for stream in streams:
                rig.core.abort(stream)
        rig.run()
        until = until if long is not None else time.perf_counter()
        pairs = [pair for s in streams for pair in pairwise(s.timeline.token_times)]
        found = sorted(b - a for a, b in pairs if mark <= a and b <= until)
        gaps[name] = found[int(0.99 * len(found))]
        if long is not None:
            ratio = (long.timeline.token_times[0] - mark) / ttft_alone
    report("gap_p99", gaps["with"] * 1e3, "ms", without=round(gaps["without"] * 1e3, 2), ttft_ratio=round(ratio, 2),
           max_gap=rig.core.scheduler.pace.max_gap * 1e3)  # fmt: skip


def breakdown(rig: Rig) -> None:
    """Where a decode step and an 8k prefill spend the device's time, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    for name, length, new in (("decode", 128, 40), ("prefill8192", 8192, 1)):
        rig.ask(rig.prompt(length), new)
        rig.run()
        rig.ask(rig.prompt(length), new)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            rig.run()
            torch.cuda.synchronize()
        rows = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)[:14]
        table = {e.key[:90]: (round(e.self_device_time_total / 1e3, 3), e.count) for e in rows}
        RESULTS[f"breakdown_{name}"] = table
        print(f"-- {name}: kernel, ms in all, calls")
        for key, (ms, calls) in table.items():
            print(f"   {ms:9.3f} {calls:6d}  {key}", flush=True)


def narrow_weights() -> None:
    for quantize in ("fp8", "int4"):
        rig = make_rig(LLAMA_8B, quantize=quantize, max_model_len=16384)
        decode1(rig, f"{quantize}_decode1")
        if quantize == "fp8":
            ttft(rig, (8192,), "fp8_ttft")
        del rig
        torch.cuda.empty_cache()


def start_time() -> None:
    out = subprocess.run([sys.executable, "-m", "benchmarks.gpu", "first"], capture_output=True, text=True, check=False)
    line = [text for text in out.stdout.splitlines() if text.startswith("first token after")]
    report("start_to_first_token", float(line[0].split()[3]) if line else float("nan"), "s")
    print("  ", *line, out.stderr[-300:] if not line else "")


def first_token() -> None:
    import os

    began = os.times().elapsed - (time.perf_counter() - PROCESS_START)
    del began
    rig = make_rig(LLAMA_8B, max_model_len=8192)
    made = time.perf_counter() - PROCESS_START
    rig.ask(rig.prompt(128), 2)
    while not rig.core.step():
        pass
    print(f"first token after {time.perf_counter() - PROCESS_START:.2f} s, model made after {made:.2f} s")


CEILINGS: dict[str, float] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.parts == ["first"]:
        return first_token()
    from benchmarks.gpu_kernels import ceilings

    parts = options.parts or [
        "start",
        "decode1",
        "ttft",
        "offline256",
        "offline64",
        "prefix",
        "gap",
        "decode64",
        "breakdown",
        "weights",
        "small",
    ]
    CEILINGS.update(ceilings())
    RESULTS["ceilings"] = {k: round(v, 2) for k, v in CEILINGS.items()}
    if "start" in parts:
        start_time()
    rig = make_rig(LLAMA_8B)
    jobs = {
        "decode1": lambda: decode1(rig), "ttft": lambda: ttft(rig),
        "offline256": lambda: offline(rig, "offline256", 256, 512, 128),
        "offline64": lambda: offline(rig, "offline64", 64, 1024, 512), "prefix": lambda: prefix(rig),
        "decode64": lambda: decode_batch(rig, "decode64x4096", 64, 4096), "gap": lambda: gap(rig),
        "breakdown": lambda: breakdown(rig),
    }  # fmt: skip
    for part in [p for p in parts if p in jobs]:
        began = time.perf_counter()
        try:
            jobs[part]()
        except Exception:
            import traceback

            traceback.print_exc()
            rig = make_rig(LLAMA_8B, rig.model)
        print(f"[{part} took {time.perf_counter() - began:.1f} s]", flush=True)
    rig = jobs = None  # type: ignore[assignment]
    torch.cuda.empty_cache()
    if "weights" in parts:
        narrow_weights()
    if "small" in parts:
        decode1(make_rig(LLAMA_1B), "small_decode1")
    import triton

    RESULTS["versions"] = {"torch": torch.__version__, "triton": triton.__version__,
                           "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    line = json.dumps(RESULTS)
    if options.json:
        with open(options.json, "w") as file:
            file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
