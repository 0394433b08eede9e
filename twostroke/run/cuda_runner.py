"""Runs plans on a GPU. Two plans may be in flight: the next is prepared and queued while one runs.

Nothing here waits for the device but `collect`, and rows that need the host (penalties, log probabilities). A token
sampled by a step still in flight never leaves the device: the next step reads it from `newest`, by the request's row.
Steps in which every request advances by one are captured once as a graph for a bucket of batch size and context
length, the second time such a step is met, so that the first tokens do not wait for captures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twostroke.kv.storage import KVStorage
from twostroke.model.transformer import Transformer
from twostroke.ops.cuda import CudaOps, DeviceBatch
from twostroke.ops.interface import BLOCK, GroupBlocks
from twostroke.ops.triton.decode import split_count
from twostroke.ops.triton.sample import resolve_tokens, sample
from twostroke.run.grammar import NO_MASKS, GrammarCompiler, GrammarRows
from twostroke.run.runner import LOGIT_ROWS
from twostroke.run.sample import MASK, NOT_FINITE, choose_one, logprobs, needs_adjusting, noise_key
from twostroke.run.staging import Fields, Staging
from twostroke.types import Details, Plan, Request, Result, Work

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
COLUMNS = 16  # fewest block columns of a captured step


@dataclass(slots=True, eq=False)
class Handle:
    plan: Plan
    samplers: tuple[int, ...]
    tokens: Tensor  # pinned, (samplers,)
    done: Any
    details: dict[int, Details] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Captured:
    met: int = 0
    graph: Any = None
    tokens: Tensor | None = None


class CudaRunner:
    depth = 2

    def __init__(
        self, model: Transformer, kv: KVStorage, tables: np.ndarray, ops: CudaOps,
        grammars: GrammarCompiler | None = None, graphs: bool = True,
    ):  # fmt: skip
        self.grammars = GrammarRows(grammars) if grammars is not None else None
        self.model, self.kv, self.tables, self.ops = model, kv, tables, ops
        self.on_card = ops.device.type == "cuda"
        self.graphs = graphs and self.on_card
        self.stream: Any = torch.cuda.Stream() if self.on_card else None
        self.pool: Any = torch.cuda.graph_pool_handle() if self.graphs else None
        self.staging = Staging(ops.device)
        self.newest = torch.zeros(tables.shape[1], dtype=torch.int32, device=ops.device)
        self.captured: dict[tuple[int, int], Captured] = {}
        self.layouts: dict[tuple[int, int], Fields] = {}
        self.results: list[Tensor] = []  # pinned, back from `collect`, to be used again

    # ---- the protocol ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Handle:
        with torch.cuda.stream(self.stream) if self.on_card else nullcontext():
            if all(work.count == 1 and work.samples and on_device(work.request) for work in plan.works):
                return self._launch_streams(plan)
            return self._launch_mixed(plan)

    def collect(self, handle: Handle) -> Result:
        if handle.done is not None:
            handle.done.synchronize()
        sampled: list[tuple[int, ...]] = [()] * len(handle.plan.works)
        for index, token in zip(handle.samplers, handle.tokens.tolist(), strict=False):
            if token < 0:
                details = handle.details.setdefault(index, Details())
                details.error = details.error or NOT_FINITE
            else:
                sampled[index] = (token,)
        self.results.append(handle.tokens)
        return Result(tuple(sampled), handle.details)

    # ---- every request advances by one -----------------------------------------------------------------------------

    def _launch_streams(self, plan: Plan) -> Handle:
        works = plan.works
        count = len(works)
        longest = max(work.start for work in works) + 1
        rows = next((b for b in BATCHES if b >= count), count)
        columns = max(COLUMNS, 1 << (-(-longest // BLOCK) - 1).bit_length())
        columns = min(columns, self.tables.shape[2])
        key = (rows, columns)
        fields = self.layouts.get(key)
        if fields is None:
            fields = self.layouts[key] = self._stream_fields(rows, columns)
        host = self.staging.begin(fields)
        self._fill_streams(host, works, columns)
        there = self.staging.send(fields)
        tokens = self._run_streams(key, there, longest)
        return self._finish(plan, tuple(range(count)), tokens[:count])

    def _stream_fields(self, rows: int, columns: int) -> Fields:
        groups = self.tables.shape[0]
        return Fields.lay({
            "tokens": (rows,), "positions": (rows,), "starts": (rows + 1,), "contexts": (rows,), "rows": (rows,),
            "temperatures": (rows,), "keys": (rows, 2), "tables": (groups, rows, columns),
        })  # fmt: skip

    def _fill_streams(self, host: dict[str, np.ndarray], works: tuple[Work, ...], columns: int) -> None:
        count = len(works)
        rows = [work.request.row for work in works]
        host["tokens"][:count] = [
            work.request.tokens[work.start] if work.start < len(work.request.tokens) else -1 - work.request.row
            for work in works
        ]
        positions = np.fromiter((work.start for work in works), np.int32, count)
        host["positions"][:count] = positions
        host["contexts"][:count] = positions + 1  # the rest stays 0: padding attends to nothing
        host["starts"][:] = np.arange(len(host["starts"]))
        host["rows"][:count] = rows
        host["rows"][count:] = -1
        host["tables"][:, :count] = self.tables[:, rows, :columns]
        fill_sampling(host, works)

    def _run_streams(self, key: tuple[int, int], there: dict[str, Tensor], longest: int) -> Tensor:
        if not self.graphs:
            return self._stream_step(there, longest)
        entry = self.captured.setdefault(key, Captured())
        entry.met += 1
        capacity = key[1] * BLOCK
        if entry.graph is None and entry.met == 1:
            return self._stream_step(there, capacity)
        if entry.graph is None:
            entry.graph = torch.cuda.CUDAGraph()
            entry.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                entry.tokens = self._stream_step(there, capacity)
            finally:
                entry.graph.capture_end()
        entry.graph.replay()
        assert entry.tokens is not None
        return entry.tokens

    def _stream_step(self, there: dict[str, Tensor], longest: int) -> Tensor:
        tokens = resolve_tokens(there["tokens"], self.newest)
        empty = there["positions"]
        batch = DeviceBatch(
            tokens=tokens, positions=there["positions"], starts=there["starts"], contexts=there["contexts"],
            groups=tuple(GroupBlocks(empty, table) for table in there["tables"]),
            logit_rows=slice(None),  # type: ignore[arg-type]
            streams=True, splits=split_count(longest),
        )  # fmt: skip
        logits = self.model.logits(self.model.forward(batch, self.kv))
        return self._sample(logits, there)

    def _sample(self, logits: Tensor, there: dict[str, Tensor]) -> Tensor:
        out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        temperatures = there["temperatures"].view(torch.float32)
        return sample(logits, temperatures, there["keys"], there["rows"], self.newest, out)

    # ---- prompts, chunks and mixtures ------------------------------------------------------------------------------

    def _launch_mixed(self, plan: Plan) -> Handle:
        works = plan.works
        counts = np.fromiter((work.count for work in works), np.int64, len(works))
        contexts = np.fromiter((work.start + work.count for work in works), np.int64, len(works))
        samplers = tuple(index for index, work in enumerate(works) if work.samples)
        prompts = tuple((index, known) for index, work in enumerate(works) if (known := prompt_rows(work)))
        columns = -(-int(contexts.max()) // BLOCK)
        total, asked = int(counts.sum()), len(samplers) + sum(count for _, count in prompts)
        groups = self.tables.shape[0]
        fields = Fields.lay({
            "tokens": (total,), "positions": (total,), "starts": (len(works) + 1,), "contexts": (len(works),),
            "slots": (groups, total), "logit_rows": (asked,), "rows": (len(samplers),),
            "temperatures": (len(samplers),), "keys": (len(samplers), 2), "tables": (groups, len(works), columns),
        })  # fmt: skip
        host = self.staging.begin(fields)
        self._fill_mixed(host, works, counts, contexts, samplers, prompts)
        there = self.staging.send(fields)
        batch = DeviceBatch(
            tokens=resolve_tokens(there["tokens"], self.newest), positions=there["positions"], starts=there["starts"],
            contexts=there["contexts"],
            groups=tuple(GroupBlocks(there["slots"][g], there["tables"][g]) for g in range(groups)),
            logit_rows=there["logit_rows"], counts=counts, lengths=contexts,
        )  # fmt: skip
        hidden = self.model.forward(batch, self.kv)
        details: dict[int, Details] = {}
        first = len(samplers)
        for index, count in prompts:
            scores = self._score_prompt(works[index], hidden[first : first + count])
            details[index] = Details(prompt_logprobs=scores)
            first += count
        if not samplers:
            return self._finish(plan, (), self.newest[:0], details)
        logits = self.model.logits(hidden[: len(samplers)])
        hosted = hosted_rows(works, samplers)
        before = self.newest.to("cpu", copy=True) if hosted else self.newest
        tokens = self._sample(logits, there)
        if hosted:
            self._choose_on_host(logits, works, samplers, hosted, before, tokens, details)
            self.newest[there["rows"]] = tokens
        return self._finish(plan, samplers, tokens, details)

    def _fill_mixed(
        self, host: dict[str, np.ndarray], works: tuple[Work, ...], counts: np.ndarray, contexts: np.ndarray,
        samplers: tuple[int, ...], prompts: tuple[tuple[int, int], ...],
    ) -> None:  # fmt: skip
        starts = host["starts"]
        np.cumsum(counts, out=starts[1:])
        owner = np.repeat(np.arange(len(works)), counts)
        positions = np.arange(starts[-1]) - starts[owner] + (contexts - counts)[owner]
        host["positions"][:] = positions
        host["contexts"][:] = contexts
        for (request, start, count), at in zip(works, starts[:-1].tolist(), strict=True):
            known = request.tokens[start : start + count]
            host["tokens"][at : at + len(known)] = known
            host["tokens"][at + len(known) : at + count] = -1 - request.row
        table = host["tables"]
        table[:] = self.tables[:, [work.request.row for work in works], : table.shape[2]]
        host["slots"][:] = table[:, owner, positions // BLOCK] * BLOCK + positions % BLOCK
        ends = starts[1:][list(samplers)] - 1
        asked = [ends, *(np.arange(starts[i], starts[i] + count) for i, count in prompts)]
        host["logit_rows"][:] = np.concatenate(asked)
        chosen = tuple(works[index] for index in samplers)
        host["rows"][:] = [work.request.row for work in chosen]
        fill_sampling(host, chosen)

    def _score_prompt(self, work: Work, hidden: Tensor) -> dict:
        request, scores = work.request, {}
        for offset in range(0, hidden.shape[0], LOGIT_ROWS):
            logits = self.model.logits(hidden[offset : offset + LOGIT_ROWS]).cpu()
            for i, row in enumerate(logits):
                position = work.start + 1 + offset + i
                scores[position] = logprobs(row, request.tokens[position], request.params.prompt_logprobs or 0)
        return scores

    def _choose_on_host(
        self, logits: Tensor, works: tuple[Work, ...], samplers: tuple[int, ...], hosted: tuple[int, ...],
        before: Tensor, tokens: Tensor, details: dict[int, Details],
    ) -> None:  # fmt: skip
        """The whole chain of run/sample.py, for what the device does not do. Waits for the device."""
        for n in hosted:
            work, mine = works[samplers[n]], details.setdefault(samplers[n], Details())
            row, request = logits[n].cpu(), work.request
            with knowing(work, int(before[request.row])):
                masks = self.grammars.masks([request]) if self.grammars is not None else NO_MASKS
                mine.error = masks.errors.get(0)
                token = None if mine.error else choose_one(row, request, masks.allowed.get(0))
            tokens[n] = -1 if token is None else token
            if token is not None and request.params.logprobs is not None:
                mine.logprobs = (logprobs(row, token, request.params.logprobs),)

    def _finish(
        self, plan: Plan, samplers: tuple[int, ...], tokens: Tensor, details: dict[int, Details] | None = None
    ) -> Handle:
        if not self.on_card:
            return Handle(plan, samplers, tokens.clone(), None, details or {})
        out = (
            self.results.pop()
            if self.results
            else torch.empty(self.tables.shape[1], dtype=torch.int32, pin_memory=True)
        )
        out[: len(samplers)].copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Handle(plan, samplers, out, done, details or {})


def on_device(request: Request) -> bool:
    """Whether the device can choose the request's next token by itself."""
    params = request.params
    filtered = params.temperature > 0 and (params.top_k or params.top_p < 1.0 or params.min_p)
    return not (filtered or params.logprobs is not None or params.grammar is not None or needs_adjusting(request))


def hosted_rows(works: tuple[Work, ...], samplers: tuple[int, ...]) -> tuple[int, ...]:
    """Which of the sampled rows the host must choose."""
    return tuple(n for n, index in enumerate(samplers) if not on_device(works[index].request))


@contextmanager
def knowing(work: Work, newest: int) -> Iterator[None]:
    """The request as it will be once its token in flight, if there is one, has been collected."""
    ahead = work.start + work.count > len(work.request.tokens)
    if ahead:
        work.request.tokens.append(newest)
    try:
        yield
    finally:
        if ahead:
            work.request.tokens.pop()


def prompt_rows(work: Work) -> int:
    """How many of the work's first rows tell how likely the prompt itself was, for a request that asked."""
    request, start, count = work
    if request.params.prompt_logprobs is None or request.output_length or request.sample:
        return 0
    return max(0, min(count, request.prompt_length - 1 - start))  # the newest token predicts no prompt token


def fill_sampling(host: dict[str, np.ndarray], works: tuple[Work, ...]) -> None:
    """Temperatures and noise keys of the rows that sample. Zeros, as the arrays come, mean greedy."""
    if not any(work.request.params.temperature for work in works):
        return
    temperatures, keys = host["temperatures"].view(np.float32), host["keys"].view(np.uint32)
    for n, (request, start, count) in enumerate(works):
        if request.params.temperature:
            key = noise_key(request.seed, request.sample, start + count) & MASK
            temperatures[n] = request.params.temperature
            keys[n] = (key & 0xFFFFFFFF, key >> 32)
