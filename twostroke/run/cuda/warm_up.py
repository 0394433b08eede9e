"""Kernels compiled side by side before the first step, and what the largest step leaves of a GPU's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from twostroke.config import Config, Resolved, resolve
from twostroke.hardware import Hardware
from twostroke.kv.storage import KVStorage
from twostroke.model.transformer import Transformer
from twostroke.ops.cuda.backend import CudaOps, Cut, DeviceBatch
from twostroke.ops.cuda.kernels.launch import INTERPRETED
from twostroke.ops.cuda.kernels.prefill import prefill_attention
from twostroke.ops.cuda.kernels.rope import rotate_and_store
from twostroke.ops.cuda.kernels.sample import resolve_tokens, sample
from twostroke.ops.interface import BLOCK, Attention, GroupBlocks
from twostroke.run.cuda.buckets import all_mixed_rows
from twostroke.run.cuda.runner import CudaRunner
from twostroke.sampling import SamplingParams
from twostroke.types import Plan, Request, RequestState, Work

GRAPHS = 1 << 30  # bytes for steps captured later on
MEETING = 1.0  # seconds of a start for row counts that the library has not met
COMPILERS = 6  # threads: half of a compilation is Python, so that more would only keep the longest waiting
Task = Callable[[], object]


def prepare(config: Config, settings: Resolved, model: Transformer) -> Resolved:
    """Have kernels ready before somebody waits for them; the settings then, with a KV cache of what is really free if
    nobody has said how large it shall be."""
    compile_kernels(model, settings)
    meet_row_counts(model, all_mixed_rows(settings.max_batch_tokens), MEETING)
    return resized(config, settings, model) if config.kv_blocks is None and config.kv_memory is None else settings


def resized(config: Config, settings: Resolved, model: Transformer) -> Resolved:
    """What the weights and the largest step leave is the cache's."""
    free = free_after_warm_up(model, settings)
    known = replace(config, max_model_len=settings.max_model_len, seed=settings.seed)
    sized = resolve(known, model.arch, Hardware("cuda", settings.threads, free), 0)
    return replace(sized, reasons={**settings.reasons, **sized.reasons})


def compile_kernels(model: Transformer, settings: Resolved) -> None:
    """Those of a prompt and of a stream, several at a time: each takes a good part of a second."""
    tasks = [*attention_kernels(model, settings), *product_kernels(model), *token_kernels(model)]
    with ThreadPoolExecutor(1 if INTERPRETED else COMPILERS) as pool:
        for done in [pool.submit(torch.inference_mode()(task)) for task in tasks]:
            done.result()


def attention_kernels(model: Transformer, settings: Resolved) -> list[Task]:
    """The longest to compile come first."""
    ops, arch, attention = cuda_ops(model), model.arch, model.layers[0].attention
    kv, group = KVStorage(arch, settings.layout, 2, settings.kv_dtype, ops.device).layer(0)
    width = arch.heads * arch.head_dim
    qkv = torch.zeros(2, width + 2 * arch.kv_heads * arch.head_dim, dtype=ops.dtype, device=ops.device)
    single, prompt = small_batch(ops, attention, 1, group), small_batch(ops, attention, 2, group)

    def attend(*batches: DeviceBatch) -> None:
        for batch in batches:
            ops.attend(qkv[: len(batch.positions)], attention, kv, batch, group)

    if not ops.shares_steps:  # they share kernels
        return [lambda: attend(single, prompt)]
    q, tiles = torch.zeros_like(qkv[:, :width]), torch.zeros(1, 2, dtype=torch.int32, device=ops.device)
    return [
        lambda: prefill_attention(q, attention, kv, prompt, group, torch.empty_like(q), tiles),
        lambda: attend(single),
        lambda: rotate_and_store(qkv, attention, kv, prompt, group, keep_k=False),
    ]


def product_kernels(model: Transformer) -> list[Task]:
    ops, arch, layer = cuda_ops(model), model.arch, model.layers[0]
    row, inner, half, ffn = (
        torch.zeros(2, width, dtype=ops.dtype, device=ops.device)
        for width in (arch.hidden, arch.heads * arch.head_dim, arch.ffn, 2 * arch.ffn)
    )
    feed: list[Task] = [
        lambda: ops.linear(row[:1], layer.gate_up, before=layer.feed_norm),
        lambda: ops.linear(ffn[:1], layer.down, before=model.gate, add_to=row[:1].clone()),
    ]
    if ops.gates_early(row[:1], layer.gate_up):
        feed = [
            lambda: ops.gated(row[:1], layer.gate_up, layer.feed_norm, model.gate),
            lambda: ops.linear(half[:1], layer.down, add_to=row[:1].clone()),
        ]
    return [
        lambda: ops.linear(row[:1], layer.qkv, before=layer.attention_norm),
        lambda: ops.linear(inner[:1], layer.output, add_to=row[:1].clone()),
        *feed,
        lambda: model.logits(row[:1]),
        lambda: ops.linear(row, layer.qkv, before=layer.attention_norm),
        lambda: ops.linear(ffn, layer.down, before=model.gate),
    ]


def token_kernels(model: Transformer) -> list[Task]:
    """From a token to the first row, and from logits to a token."""
    ops, arch = cuda_ops(model), model.arch
    numbers = torch.zeros(1, 2, dtype=torch.int32, device=ops.device)
    token, newest = numbers[0, :1], torch.zeros(1, dtype=torch.int32, device=ops.device)

    def sample_one() -> None:
        logits, cold = torch.zeros(1, arch.vocab, device=ops.device), torch.zeros(1, device=ops.device)
        sample(logits, cold, numbers, token, newest, torch.empty_like(newest))

    return [
        sample_one,
        lambda: resolve_tokens(token, newest),
        lambda: ops.embed(model.embedding, token, arch.embedding_scale),
    ]


def cuda_ops(model: Transformer) -> CudaOps:
    assert isinstance(model.ops, CudaOps)
    return model.ops


@torch.inference_mode()
def meet_row_counts(model: Transformer, sizes: Sequence[int], seconds: float) -> list[int]:
    """Multiply a layer's matrices once with each number of rows, as far as the seconds go; returns those met. The
    library chooses and loads a kernel when it first meets a size: better here than amid streams that wait for it."""
    ops, arch, layer = cuda_ops(model), model.arch, model.layers[0]
    met: list[int] = []
    inner = arch.heads * arch.head_dim
    began = time.perf_counter()
    for rows in sizes:
        if time.perf_counter() - began > seconds:
            break
        x, attended = (torch.zeros(rows, width, dtype=ops.dtype, device=ops.device) for width in (arch.hidden, inner))
        ops.linear(x, layer.qkv, before=layer.attention_norm)
        ops.linear(attended, layer.output, add_to=x)
        ops.linear(ops.linear(x, layer.gate_up, before=layer.feed_norm), layer.down, before=model.gate, add_to=x)
        met.append(rows)
    return met


def small_batch(ops: CudaOps, attention: Attention, count: int, group: int) -> DeviceBatch:
    """`count` new tokens of one request in block 0."""
    positions = torch.arange(count, dtype=torch.int32, device=ops.device)
    starts, context = positions.new_tensor([0, count]), positions.new_tensor([count])
    blocks = GroupBlocks(positions, positions.new_zeros(1, 16))
    cut = Cut(None, 1, 1, None, 1) if count == 1 else Cut(None, 0, 1, positions.new_zeros(1, 2), 1)
    return DeviceBatch(
        positions, positions, starts, context, (blocks,) * (group + 1), positions, np.array([count]), np.array([count]),
        streams=count == 1, splits=1, cuts={ops.kind(attention): cut},
    )  # fmt: skip


def free_after_warm_up(model: Transformer, settings: Resolved) -> int:
    """Bytes that the KV cache may take: the allocator keeps what the step needed, and the kernels are compiled."""
    ops = cuda_ops(model)
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
        request = RequestState(Request(row, (0,) * tokens, SamplingParams(max_tokens=1, temperature=0.0)))
        request.row = row
        works.append(Work(request, 0, tokens))
    result = runner.collect(runner.launch(Plan(0, tuple(works))))
    return [token for sampled in result.tokens for token in sampled]
