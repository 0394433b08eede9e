"""What the largest step leaves of a GPU's memory, found by running one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from twostroke.config import Config, Resolved, resolve
from twostroke.hardware import Hardware
from twostroke.kv.storage import KVStorage
from twostroke.metrics.timeline import Timeline
from twostroke.model.transformer import Transformer
from twostroke.ops.cuda import CudaOps
from twostroke.ops.interface import BLOCK
from twostroke.run.cuda_runner import CudaRunner
from twostroke.sampling import SamplingParams
from twostroke.types import Plan, Request, Work

GRAPHS = 1 << 30  # bytes for steps captured later on


def resize(config: Config, settings: Resolved, model: Transformer) -> Resolved:
    """The settings with a KV cache of what is really free beside the weights and the largest step."""
    free = free_after_warm_up(model, settings)
    known = replace(config, max_model_len=settings.max_model_len, seed=settings.seed)
    sized = resolve(known, model.arch, Hardware("cuda", settings.threads, free), 0)
    return replace(sized, reasons={**settings.reasons, **sized.reasons})


def free_after_warm_up(model: Transformer, settings: Resolved) -> int:
    """Bytes that the KV cache may take: the allocator keeps what the step needed, and the kernels are compiled."""
    ops = model.ops
    assert isinstance(ops, CudaOps)
    run_largest_step(model, ops, settings)
    torch.cuda.synchronize()
    arch = model.arch
    gathered = 2 * settings.max_model_len * arch.kv_heads * arch.head_dim * ops.dtype.itemsize  # K and V in one row
    return max(0, torch.cuda.mem_get_info()[0] - gathered - GRAPHS)


def run_largest_step(model: Transformer, ops: CudaOps, settings: Resolved) -> list[int]:
    """As many requests and tokens as a step may have, in a cache of their own. Returns what they sampled."""
    requests = settings.max_requests
    tokens = max(1, settings.max_batch_tokens // requests)
    groups, columns = len(settings.layout.groups), -(-tokens // BLOCK)
    tables = np.arange(groups * requests * columns, dtype=np.int32).reshape(groups, requests, columns)
    kv = KVStorage(model.arch, settings.layout, tables.size, settings.kv_dtype, ops.device)
    runner = CudaRunner(model, kv, tables, ops, graphs=False)
    works = []
    for row in range(requests):
        request = Request(row, [0] * tokens, SamplingParams(max_tokens=1, temperature=0.0), 0, Timeline(0.0), row=row)
        works.append(Work(request, 0, tokens))
    result = runner.collect(runner.launch(Plan(0, tuple(works))))
    return [token for sampled in result.tokens for token in sampled]
