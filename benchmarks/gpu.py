"""The engine on one GPU against its limits: `python -m benchmarks.gpu [--json F] [--minutes M] [--exact] [part ...]`.

Random bf16 weights in the shape of Llama-3.1-8B (and Llama-3.2-1B), greedy, no end-of-text. The ceilings are measured
first; a limit is bytes over the measured read bandwidth or FLOPs over the measured GEMM rate. The last line is JSON.
Parts are the functions in PARTS, in that order; without names all of them run, as far as the minutes go.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from twostroke.record import replace

PROCESS_START = time.perf_counter()

import torch  # noqa: E402

from benchmarks import gpu_parts as parts  # noqa: E402
from benchmarks.gpu_bench import Bench  # noqa: E402
from benchmarks.gpu_rig import make_rig  # noqa: E402
from benchmarks.random_weights import LLAMA_8B  # noqa: E402


def start(bench: Bench) -> None:
    """From a new process to its first token, without and with a cache of compiled kernels."""
    bench.drop()
    with tempfile.TemporaryDirectory() as empty:
        for name, extra in (("start_cold", {"TRITON_CACHE_DIR": empty}), ("start_warm", {"TRITON_CACHE_DIR": empty})):
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.gpu", "first"], capture_output=True, text=True, check=False,
                env={**os.environ, **extra}, timeout=120,
            )  # fmt: skip
            whole = time.perf_counter() - began
            line = [json.loads(text[5:]) for text in done.stdout.splitlines() if text.startswith("first")]
            if not line:
                raise RuntimeError(done.stderr[-2000:])
            bench.report(name, line[0]["first_token_s"], "s", process_s=round(whole, 2), model_s=line[0]["model_s"])


def first_token() -> None:
    rig = make_rig(LLAMA_8B, max_model_len=8192, ahead=False)
    torch.cuda.synchronize()
    made = time.perf_counter() - PROCESS_START
    request = rig.ask(rig.prompt(128), 1)
    rig.run()
    seconds = request.timeline.token_times[0] - PROCESS_START
    print("first", json.dumps({"first_token_s": round(seconds, 2), "model_s": round(made, 2)}))


PARTS: dict[str, tuple[Callable[[Bench], None], int]] = {  # with the seconds it takes
    "start": (start, 25),
    "decode1": (parts.decode1, 10),
    "ttft": (parts.ttft, 30),
    "offline256": (parts.offline256, 12),
    "offline64": (parts.offline64, 14),
    "prefix": (parts.prefix, 8),
    "gap": (parts.gap, 32),
    "offload": (parts.offload, 12),
    "decode64": (parts.decode64, 10),
    "host": (parts.host, 10),
    "breakdown": (parts.breakdown, 8),
    "small": (parts.small, 10),
    "weights": (parts.weights, 75),
    "kv": (parts.kv, 8),
    "mixture": (parts.mixture, 30),
    "oai": (parts.oai, 30),
    "latent": (parts.latent, 30),
    "transformers": (parts.transformers, 110),
}
INEXACT = ("start", "offload", "kv", "transformers")  # parts that exact=True does not change or allow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*")
    parser.add_argument(
        "--json", help="write the results here after every part; without it only a whole run is written, under results/"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="skip parts that would end later")
    parser.add_argument("--exact", action="store_true", help="measure everything again with exact=True (NAME_exact)")
    options = parser.parse_args()
    if options.parts == ["first"]:
        return first_token()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    from benchmarks.gpu_kernels import ceilings

    if not options.parts and not options.json:
        device = torch.cuda.get_device_name().replace("NVIDIA", "").strip().replace(" ", "-").lower()
        options.json = str(Path(__file__).parent / "results" / f"gpu-{device}-{time.strftime('%Y-%m-%d')}.json")
    plain = Bench(ceilings=ceilings())
    exact = replace(plain, suffix="_exact", settings={"exact": True}, rows=plain.rows)
    wanted = [(part, plain) for part in options.parts or PARTS]
    if options.exact:
        wanted += [(part, exact) for part, _ in wanted if part not in INEXACT]
    results: dict[str, object] = {}
    for part, bench in wanted:
        began = time.perf_counter()
        run, seconds = PARTS[part]
        if began - PROCESS_START + seconds > 60 * options.minutes:
            print(f"[{part} skipped: it takes {seconds} s, and {options.minutes} minutes are nearly over]", flush=True)
            continue
        if bench is exact:
            plain.drop()
        try:
            run(bench)
        except Exception:
            traceback.print_exc()
            bench.rows[part + bench.suffix] = {"error": traceback.format_exc(limit=-1)}
            bench.drop()
        print(f"[{part}{bench.suffix} took {time.perf_counter() - began:.1f} s]", flush=True)
        results = collected(bench)
        if options.json:
            with open(options.json, "w") as file:
                file.write(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


def collected(bench: Bench) -> dict[str, object]:
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "versions": versions,
        "command": " ".join(["python", "-m", "benchmarks.gpu", *(Path(word).name for word in sys.argv[1:])]),
        "seconds": round(time.perf_counter() - PROCESS_START, 1),
        "ceilings": {k: round(v, 2) for k, v in bench.ceilings.items()}, "rows": bench.rows,
    }  # fmt: skip


if __name__ == "__main__":
    main()
