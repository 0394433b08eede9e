"""Kernels are compiled in parallel before the first step; the KV cache gets the memory that the largest step leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from twostroke.config import Config, Resolved, resolve
from twostroke.hardware import Hardware
from twostroke.kv.storage import KVStorage
from twostroke.model.compressed import Compressed
from twostroke.model.latent import Latent
from twostroke.model.layers import Dense, Experts, Grouped, Layer, PackedProduct
from twostroke.model.transformer import Transformer
from twostroke.ops.compressed_interface import CompressedAttention, CompressedRows
from twostroke.ops.cuda.backend import FEW_OF_EXPERTS, SOME_OF_EXPERTS, AnyAttention, CudaOps
from twostroke.ops.cuda.compressed import compressors_of
from twostroke.ops.cuda.copies import SOME
from twostroke.ops.cuda.cuts import Cut, DeviceBatch
from twostroke.ops.cuda.kernels.dense import UNIT, sdpa
from twostroke.ops.cuda.kernels.edits import EditLists, edit_rows, mask_rows, temper_rows
from twostroke.ops.cuda.kernels.grouped import TILE_BORDERS
from twostroke.ops.cuda.kernels.grouping import FEW_PAIRS
from twostroke.ops.cuda.kernels.launch import INTERPRETED, hash_functions
from twostroke.ops.cuda.kernels.prefill import prefill_attention
from twostroke.ops.cuda.kernels.rope import rotate_and_store
from twostroke.ops.cuda.kernels.sample import Filters, resolve_tokens, sample
from twostroke.ops.cuda.kernels.scores import best_scores
from twostroke.ops.cuda.weights import FloatMatrix, SharedWeights, shape_of
from twostroke.ops.interface import BLOCK, Attention, Gate, GroupBlocks, KVLayer, LatentAttention
from twostroke.ops.streams import collapse, collapse_last, expand
from twostroke.record import replace
from twostroke.run.cuda.batches import attentions, grouped_attentions
from twostroke.run.cuda.buckets import all_mixed_rows
from twostroke.run.cuda.ranked import lead_of
from twostroke.run.cuda.request_count import MEASURED, MOST, RowTimes, request_count
from twostroke.run.cuda.runner import CudaRunner
from twostroke.run.cuda.spare_memory import keep_copies
from twostroke.run.cuda.steps import COLUMNS
from twostroke.run.cuda.variants import attention_variants
from twostroke.run.sample import SLACK
from twostroke.sampling import SamplingParams
from twostroke.types import Plan, Request, RequestState, Work

FLOAT_ROWS = (2, 9, 17)  # one for each kernel of a few rows times floats
NARROW_ROWS = (2, 5, 9, 17, 33, SOME + 1)  # one for each kernel of a few rows times few bits, and for many rows
GRAPHS = 1 << 30  # bytes for steps captured later on
PLANNING = 1.0  # seconds of the start for products with row counts that the library has not planned yet
FEW_COMPILERS = 6  # threads: half of a compilation is Python, so that more would only keep the longest waiting
COMPILERS = 10  # the same where dozens of kernels are compiled
Task = Callable[[], object]


def prepare(
    config: Config, settings: Resolved, model: Transformer, draft: Transformer | None = None, *, ahead: bool
) -> Resolved:
    """Compile the kernels before the first request. Returns the settings, with a KV cache of what is really free where
    its size was not given. ahead: all that steps can meet, so that no stream waits for a compiler later, and the number
    of requests that measured steps allow; else what a prompt and its stream need, for a first token as soon as
    possible."""
    if not INTERPRETED:
        keep_copies(model, config, torch.cuda.mem_get_info()[0])
    counts = ahead and config.max_requests is None and countable(model)
    if counts:
        settings = replace(settings, max_requests=min(MOST, settings.max_batch_tokens))
    compile_kernels(model, settings, ahead=ahead)
    if draft is not None:
        compile_kernels(draft, settings, len(model.layers), ahead=ahead)
    if ahead:
        plan_row_counts(model, all_mixed_rows(settings.max_batch_tokens), PLANNING)
    if counts:
        settings = counted(config, settings, model, draft)
    return (
        resized(config, settings, model, draft) if config.kv_blocks is None and config.kv_memory is None else settings
    )


def countable(model: Transformer) -> bool:
    """Whether the number of requests follows from steps without contexts. Latents and compressed entries are small, and
    exact steps cost more with long contexts: these have the usual number."""
    grouped = len(grouped_attentions(model)) == len(model.layers)
    return grouped and not cuda_ops(model).one_order and lead_of(model) is None and not INTERPRETED


def counted(config: Config, settings: Resolved, model: Transformer, draft: Transformer | None) -> Resolved:
    """As many requests at once as measured steps and the memory allow."""
    ops = cuda_ops(model)
    tables = np.zeros((len(settings.layout.groups), MOST, COLUMNS), np.int32)
    runner = CudaRunner(model, KVStorage(settings.layout, 2, settings.kv_dtype, ops.device), tables, ops)
    times = RowTimes.measure(runner.stream_seconds)
    del runner
    torch.cuda.empty_cache()  # what the captured steps held
    blocks = sized(config, settings, model, draft, torch.cuda.mem_get_info()[0]).kv_blocks
    count = request_count(times, model.weight_bytes(), settings.layout, blocks, settings.max_gap)
    count = min(count, settings.max_requests)
    seconds = f"{times.one * 1e3:.1f}, {times.some * 1e3:.1f} and {times.many * 1e3:.1f} ms"
    rows = f"1, {MEASURED[0]} and {MEASURED[1]} rows took {seconds}"
    why = f"a step of so many streams takes half of max_gap at most, or the KV cache holds no more ({rows})"
    return replace(settings, max_requests=count, reasons={**settings.reasons, "max_requests": why})


def resized(config: Config, settings: Resolved, model: Transformer, draft: Transformer | None = None) -> Resolved:
    """The KV cache takes what the weights and the largest step leave."""
    found = sized(config, settings, model, draft, free_after_warm_up(model, settings))
    return replace(found, reasons={**settings.reasons, **found.reasons})


def sized(config: Config, settings: Resolved, model: Transformer, draft: Transformer | None, free: int) -> Resolved:
    """With a KV cache for so many free bytes."""
    same = {"max_model_len": settings.max_model_len, "seed": settings.seed, "max_requests": settings.max_requests}
    hardware = Hardware("cuda", settings.threads * settings.parallel, free)
    return resolve(replace(config, **same), model.arch, hardware, 0, draft.arch if draft else None)


def compile_kernels(model: Transformer, settings: Resolved, first: int = 0, *, ahead: bool) -> None:
    """Compile the kernels of a prompt and of a stream, several at a time: each takes a good part of a second. first:
    the number of the model's first layer in the KV cache. ahead: also those of all other steps."""
    hash_functions()
    products = product_kernels(model, settings.max_batch_tokens, ahead)
    usual = [*attention_kernels(model, settings, first), *products, *token_kernels(model, ahead)]
    variants = variant_kernels(model, settings, first) if ahead else []
    plan = partial(plan_attention, model, settings.max_batch_tokens)
    threads = COMPILERS if ahead else FEW_COMPILERS
    in_parallel(usual, threads, beside=plan if ahead and not INTERPRETED else None)
    in_parallel(variants, threads)  # they share kernels with those before


@torch.inference_mode()
def plan_attention(model: Transformer, most: int) -> None:
    """The vendor's attention makes a plan for each new shape, and takes seconds for the first ones on a machine. Here
    no prompt waits for those of its first run, and of the second where the first is as long as it may be. The plans
    belong to the thread that makes them: the one that runs the steps."""
    ops = cuda_ops(model)
    shapes = {(a.heads, a.kv_heads, a.head_dim, a.scale) for a in grouped_attentions(model) if ops.kind(a).dense}
    for heads, kv_heads, dim, scale in shapes:
        for count in range(UNIT, most + 1, UNIT):
            q, k = (torch.zeros(count, n, dim, dtype=ops.dtype, device=ops.device) for n in (heads, kv_heads))
            sdpa(q, k, k, scale, True, False)
            if count + UNIT > most:
                sdpa(q, k, k, scale, True, True)
                sdpa(q, k, k, scale, False, True)


def in_parallel(tasks: Sequence[Task], threads: int, beside: Task | None = None) -> None:
    """beside: done by this thread meanwhile."""
    with ThreadPoolExecutor(1 if INTERPRETED else threads) as pool:
        begun = [pool.submit(torch.inference_mode()(task)) for task in tasks]
        if beside is not None:
            beside()
        for done in begun:
            done.result()


def variant_kernels(model: Transformer, settings: Resolved, first: int = 0) -> list[Task]:
    """What other steps than a first prompt and its stream need: of one layer for each kind of attention."""
    ops = cuda_ops(model)
    storage, tasks = KVStorage(settings.layout, 2, settings.kv_dtype, ops.device), []
    for number in kinds_of_attention(model):
        kv, group = storage.layer(first + number)
        attention = attentions(model)[number]
        if isinstance(attention, CompressedAttention):
            tasks += compressed_kernels(ops, attention, kv, group, -(-settings.max_model_len // BLOCK))
            continue
        tasks += attention_variants(ops, attention, kv, group, settings.max_requests, settings.max_model_len)
    return tasks


def kinds_of_attention(model: Transformer) -> list[int]:
    """The first layer of each kind that kernels are compiled for: with and without a window, a cap, sinks, entries."""
    ops, found = cuda_ops(model), dict[tuple[object, ...], int]()
    for number, attention in enumerate(attentions(model)):
        window, cap = getattr(attention, "window", 0), getattr(attention, "softcap", 0.0)
        sinks = getattr(attention, "sinks", None) is not None
        ratio = getattr(getattr(attention, "compressor", None), "ratio", 0)
        found.setdefault((type(attention), ops.kind(attention), window, cap, sinks, ratio), number)
    return list(found.values())


def attention_kernels(model: Transformer, settings: Resolved, first: int = 0) -> list[Task]:
    """The kernels of one layer for each kind of attention."""
    ops = cuda_ops(model)
    storage = KVStorage(settings.layout, 2, settings.kv_dtype, ops.device)
    tasks: list[Task] = []
    for number in kinds_of_attention(model):
        mixer, (kv, group) = model.layers[number].mixer, storage.layer(first + number)
        if isinstance(mixer, Grouped):
            tasks += grouped_kernels(ops, mixer.attention, kv, group)
        elif isinstance(mixer, Latent):
            tasks += latent_kernels(ops, mixer.attention, kv, group)
        elif isinstance(mixer, Compressed):
            tasks += compressed_kernels(ops, mixer.attention, kv, group, 16)
    return tasks


def grouped_kernels(ops: CudaOps, attention: Attention, kv: KVLayer, group: int) -> list[Task]:
    """The longest to compile come first."""
    width = attention.heads * attention.head_dim
    qkv = torch.zeros(2, width + 2 * attention.kv_heads * attention.head_dim, dtype=ops.dtype, device=ops.device)
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


def latent_kernels(ops: CudaOps, attention: LatentAttention, kv: KVLayer, group: int) -> list[Task]:
    def attend(count: int) -> None:
        width = attention.latent + attention.rope_dim
        q = torch.zeros(
            count, attention.heads * (attention.plain_dim + attention.rope_dim), dtype=ops.dtype, device=ops.device
        )
        batch = small_batch(ops, attention, count, group)
        ops.attend_latent(q, q.new_zeros(count, width), attention, kv, batch, group)

    return [lambda: attend(2), lambda: attend(1)]


def compressed_kernels(
    ops: CudaOps, attention: CompressedAttention, kv: KVLayer, group: int, columns: int
) -> list[Task]:  # fmt: skip
    """The kernels of one row; any number of rows takes the same. columns: of the block tables, which decide whether
    entries are chosen."""

    def attend() -> None:
        def zeros(width: int) -> torch.Tensor:
            return torch.zeros(1, width, dtype=ops.dtype, device=ops.device)

        indexer, states = attention.indexer, [2 * one.width for one in compressors_of(attention)]
        parts = CompressedRows(
            zeros(attention.heads * attention.dim), zeros(attention.dim), zeros(sum(states)) if states else None,
            None if indexer is None else zeros(indexer.heads * indexer.dim),
            None if indexer is None else zeros(indexer.heads),
        )  # fmt: skip
        batch = small_batch(ops, attention, 1, max(group, *(other for _, other in kv.further), 0), columns)
        ops.attend_compressed(parts, attention, kv, batch, group)

    return [attend]


def product_kernels(model: Transformer, most: int, ahead: bool) -> list[Task]:
    """The products of one layer of each kind and the head with one row, as a step runs them. With two rows a norm or a
    gate is a kernel of its own: one product of each kind. ahead: also those of other numbers of rows, of which some
    have kernels of their own. most: rows of a step."""
    tasks: list[Task] = []
    few = [rows for rows in FLOAT_ROWS if rows <= min(most, cuda_ops(model).few_rows)] if ahead else []
    some = [rows for rows in NARROW_ROWS if rows <= most] if ahead else []
    for layer in kinds_of_layers(model):
        products = plain_products(layer)
        tasks += [task for product in products for task in product_tasks(model, layer, product, 1)]
        kinds = {type(product.before): product for product in products if product.before is not None}
        tasks += [task for product in kinds.values() for task in product_tasks(model, layer, product, 2)]
        for product in products:
            sizes = few if isinstance(product.weight, FloatMatrix) else some
            tasks += [task for rows in sizes for task in product_tasks(model, layer, product, rows)]
        if isinstance(layer.feed, Experts):
            tasks += expert_tasks(model, layer.feed, most)
    tasks += stream_tasks(model, most)
    heads = few if isinstance(model.head, FloatMatrix) else [rows for rows in some if rows <= SOME]
    return [*tasks, *(partial(model.logits, rows_for(model, model.arch.hidden, rows)) for rows in (1, *heads))]


def stream_tasks(model: Transformer, most: int) -> list[Task]:
    """What stands around the parts of a layer with several residual streams, and in front of the head."""
    mixes, ops = model.layers[0].streams, cuda_ops(model)
    if mixes is None or model.head_streams is None:
        return []
    mix, head, hidden = mixes[0], model.head_streams, model.arch.hidden

    def run(rows: int) -> None:
        x = torch.zeros(rows, mix.streams * hidden, device=ops.device)
        read, weights = collapse(ops, x, mix)
        expand(ops, x, read, weights, mix.streams)
        collapse_last(ops, x, head)

    return [partial(run, rows) for rows in (1, 2, 17) if rows <= most]


def kinds_of_layers(model: Transformer) -> list[Layer]:
    """The first layer of each kind: layers of one file may be in several formats."""
    found: dict[tuple[object, ...], Layer] = {}
    for layer in model.layers:
        weights = [product.weight for product in layer.products()]
        if isinstance(layer.feed, Experts):
            weights += [layer.feed.experts.gate_up[0], layer.feed.experts.down[0]]
        formats = [(type(weight), getattr(weight, "format", 0)) for weight in weights]
        given = isinstance(layer.feed, Experts) and layer.feed.experts.table is not None
        found.setdefault((type(layer.mixer), type(layer.feed), given, *formats), layer)
    return list(found.values())


def plain_products(layer: Layer) -> list[PackedProduct]:
    """The products that `linear` multiplies."""
    return [product for product in layer.products() if product.name not in ("router", "key_up", "value_up")]


def product_tasks(model: Transformer, layer: Layer, product: PackedProduct, rows: int) -> list[Task]:
    ops, (outputs, inputs) = cuda_ops(model), shape_of(product.weight)
    x = rows_for(model, inputs * (2 if isinstance(product.before, Gate) else 1), rows)
    adds = product.adds and lead_of(model) is None  # ranks add after their sum
    out = rows_for(model, outputs, rows) if adds else None
    tasks: list[Task] = [lambda: ops.linear(x, product.weight, before=product.before, add_to=out)]
    feed = layer.feed
    if isinstance(feed, Dense) and ops.gates_early(x, product.weight):  # the gate is part of the product before
        if product.weight is feed.gate_up:
            return [lambda: ops.gated(x, feed.gate_up, feed.norm, feed.gate)]
        if product.weight is feed.down:
            return [lambda: ops.linear(x[:, :inputs].contiguous(), feed.down, add_to=out)]
    return tasks


def expert_tasks(model: Transformer, feed: Experts, most: int) -> list[Task]:
    """One step for each way of multiplying experts."""
    ops, routing = cuda_ops(model), feed.experts.routing
    laid = ops.laid_few(feed.experts, None if feed.shared is None else SharedWeights(*feed.shared))
    each = {1, FEW_OF_EXPERTS + 1, SOME_OF_EXPERTS + 1, FEW_PAIRS // routing.chosen + 1}
    for parts in (0, 0 if laid is None else laid.parts):
        each |= {rows * (routing.experts + parts) // (routing.chosen + parts) + 1 for rows in TILE_BORDERS}

    def run(rows: int) -> None:
        x = rows_for(model, model.arch.hidden, rows)
        if feed.added(ops, x) is None:
            tokens = torch.zeros(rows, dtype=torch.int32, device=ops.device)
            ops.experts(x, feed.norm, feed.experts, tokens)

    return [partial(run, rows) for rows in sorted(each) if rows <= max(most, 1)]


def rows_for(model: Transformer, width: int, rows: int) -> torch.Tensor:
    ops = cuda_ops(model)
    return torch.zeros(rows, width, dtype=ops.dtype, device=ops.device)


def token_kernels(model: Transformer, ahead: bool) -> list[Task]:
    """The kernels from a token to the first row, and from logits to a token. ahead: also with filters, which take
    longest, and those of masks, penalties and log probabilities."""
    ops, arch = cuda_ops(model), model.arch
    numbers = torch.zeros(1, 2, dtype=torch.int32, device=ops.device)
    token, newest = numbers[0, :1], torch.zeros(1, dtype=torch.int32, device=ops.device)

    def sample_one(filters: Filters | None = None) -> None:
        wide = filters is not None or arch.logit_softcap
        logits = torch.zeros(1, arch.vocab, dtype=torch.float32 if wide else ops.dtype, device=ops.device)
        cold = torch.zeros(1, device=ops.device)
        sample(logits, cold, numbers, token, newest, torch.empty_like(newest), filters)

    nothing = Filters(newest, torch.zeros(1, 2, dtype=torch.float64, device=ops.device), SLACK)
    logits = torch.zeros(1, arch.vocab, device=ops.device)

    def edit_one() -> None:
        mask_rows(logits, token, torch.zeros(1, -(-arch.vocab // 32), dtype=torch.int32, device=ops.device))
        edit_rows(logits, newest, EditLists(numbers.new_zeros(1, 6), logits[:1, :3], numbers[0], numbers[0]))
        temper_rows(logits, token, torch.ones(1, dtype=torch.float64, device=ops.device))

    def score_one() -> None:
        best_scores(logits.to(torch.float32 if arch.logit_softcap else ops.dtype), token, token, 1)

    others: list[Task] = [lambda: sample_one(nothing), edit_one, score_one] if ahead else []
    return [
        *others,
        sample_one,
        lambda: resolve_tokens(token, newest, arch.vocab),
        lambda: ops.embed(model.embedding, token, arch.embedding_scale),
    ]


def cuda_ops(model: Transformer) -> CudaOps:
    assert isinstance(model.ops, CudaOps)
    return model.ops


@torch.inference_mode()
def plan_row_counts(model: Transformer, sizes: Sequence[int], seconds: float) -> list[int]:
    """Multiply a layer's matrices once with each number of rows, as far as the seconds go; returns those done. The
    library chooses and loads a kernel at its first product of a size: here no stream waits for it."""
    layers = [(layer, plain_products(layer)) for layer in kinds_of_layers(model)]
    done: list[int] = []
    began = time.perf_counter()
    for rows in sizes:
        if time.perf_counter() - began > seconds:
            break
        for layer, products in layers:
            for product in products:
                for task in product_tasks(model, layer, product, rows):
                    task()
        done.append(rows)
    return done


def small_batch(
    ops: CudaOps, attention: AnyAttention, count: int, group: int, columns: int = 16
) -> DeviceBatch:  # fmt: skip
    """`count` new tokens of one request in block 0."""
    positions = torch.arange(count, dtype=torch.int32, device=ops.device)
    starts, context = positions.new_tensor([0, count]), positions.new_tensor([count])
    blocks = GroupBlocks(positions, positions.new_zeros(1, columns))
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
    lead = lead_of(model)
    free = torch.cuda.mem_get_info()[0] if lead is None else lead.free()
    widths = (2 * attention.kv_heads * attention.head_dim for attention in grouped_attentions(model))
    width = max(widths, default=0)
    gathered = settings.max_model_len * width * ops.dtype.itemsize  # K and V in one row
    filtered = settings.max_requests * model.arch.vocab * (4 + 4)  # logits in float32, and those that filters look at
    return max(0, free - gathered - filtered - GRAPHS)


def run_largest_step(model: Transformer, ops: CudaOps, settings: Resolved) -> list[int]:
    """Run a step with as many requests and tokens as a step may have, in a cache of their own. Returns the sampled
    tokens."""
    requests = settings.max_requests
    tokens = max(1, settings.max_batch_tokens // requests)
    groups, columns = len(settings.layout.groups), -(-tokens // BLOCK)
    tables = np.arange(groups * requests * columns, dtype=np.int32).reshape(groups, requests, columns)
    kv = KVStorage(settings.layout, tables.size, settings.kv_dtype, ops.device)
    lead = lead_of(model)
    if lead is not None:
        lead.reserve(tables.size)
    runner = CudaRunner(model, kv, tables, ops, graphs=False)
    works = []
    for row in range(requests):
        request = RequestState(Request(row, (0,) * tokens, SamplingParams(max_tokens=1, temperature=0.0)))
        request.row = row
        works.append(Work(request, 0, tokens))
    result = runner.collect(runner.launch(Plan(0, tuple(works))))
    return [token for sampled in result.tokens for token in sampled]
