"""Puts an engine together: checkpoint → architecture → settings → backend → model → cache → scheduler → core."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.config import Config, Resolved, resolve
from twostroke.draft.speculate import make_drafter
from twostroke.engine.core import Core
from twostroke.engine.device import check_attention, choose_device, device_name, hardware_of
from twostroke.engine.draft_model import DraftCheckpoint, open_draft
from twostroke.engine.intake import Intake, open_tokenizer
from twostroke.errors import ConfigError
from twostroke.grammar.compile import GrammarCompiler
from twostroke.grammar.forced import ForcedTokens
from twostroke.grammar.masks import GrammarRows
from twostroke.hardware import free_memory
from twostroke.kv.storage import KVStorage
from twostroke.metrics.steplog import StepLog
from twostroke.model.arch import Arch
from twostroke.model.parallel import ParallelTransformer
from twostroke.model.shares import Share, divided
from twostroke.model.transformer import Transformer
from twostroke.ops.interface import KV_SCALE_BYTES, Ops
from twostroke.ops.select import make_ops
from twostroke.ranks.group import Ranks, check_parallel
from twostroke.ranks.storage import RankedStorage
from twostroke.record import Record, replace
from twostroke.run.drafting import Drafting
from twostroke.run.runner import ModelRunner
from twostroke.schedule.make import make_scheduler
from twostroke.startup import collector_paused
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import Runner
from twostroke.weights.catalog import cache_folder
from twostroke.weights.checkpoint import Checkpoint, locate, open_checkpoint
from twostroke.weights.describe import kept_weights, load_arch
from twostroke.weights.files import OnProgress
from twostroke.weights.fingerprint import fingerprint
from twostroke.weights.generation import sampling_defaults
from twostroke.weights.load import load_model

log = logging.getLogger(__name__)
OnStage = Callable[[str], None]


def ignore_stage(name: str) -> None:
    """Does nothing: for a caller that does not show the stages of the start."""


class Engine(Record):
    core: Core
    intake: Intake
    tokenizer: Tokenizer
    arch: Arch
    settings: Resolved
    ranks: Ranks | None = None  # the other processes, with parallel above 1


class OpenedModel(Record):
    """A model's files, read as far as their description."""

    checkpoint: Checkpoint
    arch: Arch
    tokenizer: Tokenizer
    device: str
    draft: DraftCheckpoint | None


class Loaded(Record):
    """The weights, on the device."""

    ops: Ops
    model: Transformer
    draft: Transformer | None
    ranks: Ranks | None


@collector_paused()
def build_engine(
    model: str | Path,
    config: Config,
    clock: Callable[[], float] = time.perf_counter,
    download_progress: OnProgress | None = None,
    load_progress: OnProgress | None = None,
    stage: OnStage = ignore_stage,
    block_key: bytes | None = None,
    mixed: tuple[str, ...] = (),
    ahead: bool = False,
) -> Engine:
    """block_key: shared by engines that exchange KV blocks; None: the names are valid in this process alone. mixed:
    how these engines compute K and V, where they differ in it. ahead: all kernels are compiled now, so that no caller
    waits for one later."""
    stage("open")
    check_host_memory(config.kv_offload, free_memory())
    opened = open_model(model, config, download_progress)
    settings = settings_for(opened, config)
    ops = backend_for(settings)
    stage("load")
    loaded = load_weights(opened, ops, settings, load_progress)
    stage("size KV")
    if settings.device == "cuda":
        from twostroke.run.cuda.warm_up import prepare  # Triton is not installed everywhere

        settings = prepare(config, settings, loaded.model, loaded.draft, ahead=ahead)
    for name, reason in settings.reasons.items():
        log.info("%s = %s: %s", name, getattr(settings, name), reason)
    return assemble(opened, loaded, settings, clock, block_key, mixed)


def open_model(model: str | Path, config: Config, progress: OnProgress | None) -> OpenedModel:
    """ConfigError where the device cannot run it."""
    checkpoint = open_checkpoint(locate(model, progress))
    arch = load_arch(checkpoint)
    tokenizer = open_tokenizer(checkpoint)
    device = choose_device(config)
    check_parallel(config)
    draft = open_draft(config.draft_model, arch, tokenizer, progress)
    for one in (arch, *([] if draft is None else [draft.arch])):
        check_attention(one, device)
    return OpenedModel(checkpoint, arch, tokenizer, device, draft)


def settings_for(opened: OpenedModel, config: Config) -> Resolved:
    """The settings of this process, which computes a part of the model with parallel above 1."""
    arch, device, draft, parts = opened.arch, opened.device, opened.draft, config.parallel
    checkpoints = [opened.checkpoint] if draft is None else [opened.checkpoint, draft.checkpoint]
    weight_bytes = sum(count_weights(one, device, config) for one in checkpoints)
    hardware = hardware_of(device, arch)
    if device == "cpu":
        hardware = replace(hardware, free_memory=hardware.free_memory // parts)
    part = divided(arch, parts) if parts > 1 else arch
    return resolve(config, part, hardware, weight_bytes // parts, None if draft is None else draft.arch)


def backend_for(settings: Resolved) -> Ops:
    if settings.device == "cuda":
        from twostroke.run.cuda.kernel_cache import use_kernel_cache

        use_kernel_cache(cache_folder(), device_name(settings.device))
    return make_ops(settings.device, settings.dtype, settings.threads, settings.quantize, settings.exact)


def load_weights(opened: OpenedModel, ops: Ops, settings: Resolved, progress: OnProgress | None) -> Loaded:
    checkpoint, draft, longest = opened.checkpoint, opened.draft, settings.max_model_len
    bits = settings.quantize if settings.device == "cpu" else None  # a GPU packs float weights into its own formats
    ranks = start_ranks(checkpoint, settings) if settings.parallel > 1 else None
    if ranks is None:
        model = load_model(checkpoint, ops, longest, progress, bits)
    else:
        model = load_leading(checkpoint, ops, settings, ranks, progress, bits)
    small = load_model(draft.checkpoint, ops, longest, None, bits) if draft is not None else None
    return Loaded(ops, model, small, ranks)


def assemble(
    opened: OpenedModel,
    loaded: Loaded,
    settings: Resolved,
    clock: Callable[[], float],
    block_key: bytes | None,
    mixed: tuple[str, ...],
) -> Engine:
    """The cache, the scheduler and the runner around a loaded model."""
    checkpoint, arch, tokenizer, draft = opened.checkpoint, opened.arch, opened.tokenizer, opened.draft
    ops, ranks = loaded.ops, loaded.ranks
    sizes = (settings.layout, settings.kv_blocks, settings.kv_dtype, ops.device, settings.host_slots)
    kv = KVStorage(*sizes) if ranks is None else RankedStorage(ranks, *sizes)
    if ranks is not None and settings.device == "cuda":
        ranks.reserve(settings.kv_blocks)
    identity = block_identity(checkpoint, settings, ops, draft.checkpoint if draft is not None else None, mixed)
    scheduler = make_scheduler(arch, settings, identity, block_key)
    grammars = GrammarRows(GrammarCompiler(tokenizer, arch.vocab, lambda: scheduler.pace.max_gap))
    scheduler.forced = ForcedTokens(grammars, tokenizer)
    scheduler.draft_share = draft.arch.used_weights / arch.used_weights if draft is not None else None
    scheduler.drafter = make_drafter(
        settings.speculate, settings.device, scheduler.forced, scheduler.draft_share, scheduler.longest_step
    )
    runner = make_runner(loaded.model, kv, scheduler.tables.array, ops, grammars, loaded.draft)
    core = Core(scheduler, runner, clock, StepLog())
    defaults = sampling_defaults(checkpoint, arch)
    intake = Intake(tokenizer, settings, arch.vocab, grammars.compiler, defaults=defaults)
    return Engine(core, intake, tokenizer, arch, settings, ranks)


def start_ranks(checkpoint: Checkpoint, settings: Resolved) -> Ranks:
    if settings.device == "cpu":
        return Ranks(checkpoint.path, settings)
    from twostroke.ranks.cards import CardRanks  # Triton is not installed everywhere

    return CardRanks(checkpoint.path, settings)


def load_leading(
    checkpoint: Checkpoint, ops: Ops, settings: Resolved, ranks: Ranks, progress: OnProgress | None, bits: str | None
) -> Transformer:
    """The share of rank 0, once the others have theirs."""

    def make(*parts: Any, **more: Any) -> Transformer:
        if settings.device == "cpu":
            return ParallelTransformer(*parts, sum_ranks=ranks.open_sum(), announce=ranks.announce, **more)
        from twostroke.ranks.cards import CardRanks

        assert isinstance(ranks, CardRanks)
        return ranks.leading(ops, *parts, **more)

    share = Share(0, settings.parallel)
    return load_model(checkpoint, ops, settings.max_model_len, progress, bits, share, make)


def block_identity(
    checkpoint: Checkpoint,
    settings: Resolved,
    ops: Ops,
    draft: Checkpoint | None = None,
    mixed: tuple[str, ...] = (),
) -> str:
    """What determines the bytes of a KV block beside its tokens: weights, their precision, the format, the backend.
    mixed: how engines compute them that take each other's blocks although they differ in it. Each backend has codes of
    its own, and floats lie alike in all."""
    parts: list[object] = [fingerprint(checkpoint), settings.kv_dtype]
    if mixed:
        parts += [*mixed, ops.name if settings.kv_dtype in KV_SCALE_BYTES else "floats"]
    else:
        parts += [settings.dtype, settings.quantize, ops.name, settings.exact]
    if draft is not None:
        parts.append(fingerprint(draft))
    if settings.parallel > 1:
        parts.append(f"parallel {settings.parallel}")
    return " ".join(map(str, parts))


def count_weights(checkpoint: Checkpoint, device: str, config: Config) -> int:
    """Their bytes in memory. Formats of few bits that a device cannot keep are no error, but cost memory."""
    kept = kept_weights(checkpoint, device, config.dtype)
    if kept.widened:
        log.info(
            "%s: %d matrices of few bits are kept in 16 bits on a %s; the weights take %s bytes",
            checkpoint.path.name, kept.widened, device, f"{kept.bytes:,}",
        )  # fmt: skip
    return kept.bytes


def check_host_memory(wanted: int, free: int) -> None:
    if wanted > free:
        raise ConfigError(f"kv_offload ({wanted:,}) is above the {free:,} bytes that this machine has free: lower it.")


def make_runner(
    model: Transformer,
    kv: KVStorage,
    tables: np.ndarray,
    ops: Ops,
    grammars: GrammarRows,
    draft: Transformer | None = None,
) -> Runner:
    """draft: the draft model, whose layers are numbered after the target's in the KV cache."""
    part = kv.draft_part(len(model.layers)) if draft is not None else None
    if ops.device is not None and ops.device.type == "cuda":
        from twostroke.ops.cuda.backend import CudaOps
        from twostroke.run.cuda.runner import CudaRunner  # Triton is not installed everywhere

        assert isinstance(ops, CudaOps)
        if draft is None or part is None:
            return CudaRunner(model, kv, tables, ops, grammars)
        small = CudaRunner(draft, part, tables, ops, vocab=model.arch.vocab)
        return CudaRunner(model, kv, tables, ops, grammars, drafting=Drafting(small, draft.arch.vocab))
    kind = ModelRunner
    if ops.device is not None:
        from twostroke.run.torch_runner import TorchRunner

        kind = TorchRunner
    if draft is None or part is None:
        return kind(model, kv, tables, ops, grammars)
    drafting = Drafting(kind(draft, part, tables, ops, vocab=model.arch.vocab), draft.arch.vocab)
    return kind(model, kv, tables, ops, grammars, drafting)
