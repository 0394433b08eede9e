"""An engine on the GPU without a tokenizer, with random weights in the shape of a known model."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.random_weights import random_model
from twostroke.config import make_config, resolve
from twostroke.engine.build import make_runner
from twostroke.engine.core import Core
from twostroke.hardware import Hardware
from twostroke.kv.storage import KVStorage
from twostroke.metrics.steplog import StepLog
from twostroke.model.arch import Arch
from twostroke.model.transformer import Transformer
from twostroke.ops.select import make_ops
from twostroke.run.cuda.runner import CudaRunner
from twostroke.run.cuda.warm_up import prepare
from twostroke.sampling import SamplingParams
from twostroke.schedule.make import make_scheduler
from twostroke.types import Request, RequestState


@dataclass
class Rig:
    arch: Arch
    model: Transformer
    core: Core
    runner: CudaRunner
    draft: Transformer | None = None
    ids: int = 0

    def ask(self, tokens: list[int], new: int, **params: object) -> RequestState:
        sampling = SamplingParams(**{"max_tokens": new, "temperature": 0.0, **params})  # type: ignore[arg-type]
        request = Request(self.ids, tuple(tokens), sampling, 0, time.perf_counter(), len(tokens) + new)
        self.ids += 1
        return self.core.submit(request)

    def run(self) -> float:
        """Step until the engine is idle; seconds."""
        began = time.perf_counter()
        while not self.core.idle:
            self.core.step()
        return time.perf_counter() - began

    def prompt(self, length: int) -> list[int]:
        rng = random.Random(self.ids)
        return [rng.randrange(self.arch.vocab) for _ in range(length)]


def make_rig(
    arch: Arch, model: Transformer | None = None, kv_dtype: str = "bfloat16", quantize: str | None = None,
    ahead: bool = True, draft_arch: Arch | None = None, mxfp4: bool = False, **settings: object,
) -> Rig:  # fmt: skip
    """ahead: as a server starts. draft_arch: of a draft model beside it. mxfp4: of the experts."""
    gc.freeze()  # as in the server's process: a full collection of all imported modules takes 50 ms and more
    exact = bool(settings.get("exact", False))
    ops = model.ops if model is not None else make_ops("cuda", "bfloat16", 1, quantize, exact)
    length = settings.setdefault("max_model_len", 131_072)
    model = model or random_model(arch, ops, 131_072, mxfp4=mxfp4)  # type: ignore[arg-type]
    draft = random_model(draft_arch, ops, 131_072) if draft_arch is not None else None  # type: ignore[arg-type]
    config = make_config(device="cuda", dtype="bfloat16", kv_dtype=kv_dtype, seed=1, **settings)
    resolved = resolve(config, arch, Hardware("cuda", 16, torch.cuda.mem_get_info()[0]), 0, draft_arch)
    resolved = prepare(config, resolved, model, draft, ahead=ahead)
    kv = KVStorage(
        resolved.layout, resolved.kv_blocks, resolved.kv_dtype, ops.device, resolved.host_slots  # type: ignore[arg-type]
    )  # fmt: skip
    scheduler = make_scheduler(arch, resolved, f"random {length}")
    runner = make_runner(model, kv, scheduler.tables.array, ops, None, draft)  # type: ignore[arg-type]
    assert isinstance(runner, CudaRunner)
    return Rig(arch, model, Core(scheduler, runner, steplog=StepLog()), runner, draft)


def restore_times(rig: Rig, length: int) -> dict[str, float]:
    """TTFT in milliseconds of a prompt that is computed, cached on the device, and cached on the host. The device's
    cache holds hardly more than two such prompts, so two others evict it."""

    def ttft(tokens: list[int]) -> float:
        request, began = rig.ask(tokens, 1), time.perf_counter()
        rig.run()
        return (request.timeline.token_times[0] - began) * 1e3

    def others() -> None:
        for _ in range(2):
            ttft(rig.prompt(length))

    for _ in range(2):  # the first round compiles and loads
        mine = rig.prompt(length)
        found = {"computed": ttft(mine), "on_device": ttft(mine)}
        others()
        found["on_host"] = ttft(mine)
    host = rig.core.scheduler.tables.pool.host
    assert host is not None and host.restored > length // 16, "too few blocks were restored from the host"
    return found


def longest_steps(steps: StepLog) -> list[dict[str, float]]:
    """The longest steps, by the time on the host from one launch to the next. A step that is short on the device and
    long on the host waited for loading, compilation or capture."""
    found = [
        {"host_ms": round((after.launched - step.launched) * 1e3, 1), "device_ms": round(step.seconds * 1e3, 1),
         "tokens": step.tokens, "start": max((work.start for work in step.chunks), default=0)}
        for step, after in pairwise(steps)
    ]  # fmt: skip
    return sorted(found, key=lambda row: -row["host_ms"])[:6]
