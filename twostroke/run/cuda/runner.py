"""Runs plans on a GPU. Two plans may be in flight: the next is prepared and queued while one runs.

Nothing here waits for the device but `collect`, and rows that need the host (grammars: run/cuda/choosing.py). A token
sampled by a step still in flight never leaves the device: the next step reads it from `newest`, by the request's row.
Steps that kept the device waiting for the host are captured as graphs, one for each shape (run/cuda/steps.py), when
such a step occurs again: the first tokens do not wait for captures, and long steps are not captured at all. Of drafts
from texts the first of a shape are left out, while its graph is made beside the steps (run/cuda/capture.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import proxy

import numpy as np
import torch
from torch import Tensor

from twostroke.grammar.masks import GrammarRows
from twostroke.kv.storage import KVStorage
from twostroke.model.parallel import whole_step
from twostroke.model.transformer import Transformer
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.cuts import DeviceBatch
from twostroke.ops.cuda.kernels.decode import longer, split_count
from twostroke.ops.cuda.kernels.sample import Filters, resolve_tokens, sample
from twostroke.ops.interface import BLOCK, KV_SCALE_BYTES
from twostroke.run.cuda.batches import attention_kinds, grouped_attentions, make_batch
from twostroke.run.cuda.capture import Capture, Pieces, capturing
from twostroke.run.cuda.choosing import Choosing, Newest, ScoredRows
from twostroke.run.cuda.draft_chain import DraftChain, DraftPass
from twostroke.run.cuda.ranked import StepMessage, lead_of
from twostroke.run.cuda.scores import Scores
from twostroke.run.cuda.staging import StagedArrays, Staging
from twostroke.run.cuda.steps import COLUMNS, Known, Mixture, Shape, Streams
from twostroke.run.drafting import Drafting, Passes
from twostroke.run.runner import describe_choices
from twostroke.run.sample import SLACK, prompt_details
from twostroke.run.step import PromptRows, StepRows
from twostroke.types import Details, Plan, Result, WorkKind

log = logging.getLogger(__name__)
OCCURRENCES = 2  # of a shape before it is captured
MOST_GRAPHS = 200  # shapes; a few megabytes each
LEFT_OUT = 8  # times that drafts of a shape are left out before its capture goes on though the device is done
BEHIND = 0.6  # share of a step's time: a host that took longer kept the device waiting


@dataclass(slots=True, eq=False)
class Captured:
    """One shape of steps: its buffers, and its graph once it is captured."""

    arrays: StagedArrays
    buffer: Tensor  # the numbers of such steps on the device: always at the same place
    there: dict[str, Tensor]  # views of it
    occurred: int = 0
    worthwhile: bool = False  # the device waited for the host
    graph: Any = None
    end: Tensor | None = None  # the tokens, or what they are chosen from
    pending: bool = False  # its graph is being made while steps run
    failed: bool = False  # and could not be made
    left_out: int = 0  # steps of this shape that ran without their drafts


@dataclass(slots=True, eq=False)
class Clocked:
    """A step that was launched kernel by kernel. Its times decide whether its shape is worth a graph."""

    entry: Captured
    host_seconds: float


@dataclass(slots=True, eq=False)
class Handle:
    rows: StepRows
    tokens: Tensor  # pinned, (choices,)
    began: Any  # when the device began with it, and was done
    done: Any
    prompts: tuple[tuple[PromptRows, Scores], ...] = ()
    scores: Scores | None = None  # of choices whose log probabilities are wanted
    errors: dict[int, str] = field(default_factory=dict)  # of choices that could not be made
    clocked: Clocked | None = None
    passes: Passes = ()
    launched: tuple[DraftPass, ...] = ()  # passes of the draft model before it that are not collected yet
    settled: bool = True
    verified: bool = True


class CudaRunner:
    depth = 2

    def __init__(
        self, model: Transformer, kv: KVStorage, tables: np.ndarray, ops: CudaOps,
        grammars: GrammarRows | None = None, graphs: bool = True, drafting: Drafting | None = None,
        vocab: int | None = None,
    ):  # fmt: skip
        """drafting and vocab: as in run/runner.py."""
        self.drafting, self.vocab = drafting, vocab
        self.model, self.kv, self.tables, self.ops = model, kv, tables, ops
        self.on_card = ops.device.type == "cuda"
        self.lead = lead_of(model)
        self.graphs = graphs and self.on_card and self.lead is None  # no capture with sums over ranks has been tried
        self.stream: Any = None
        if self.on_card:
            self.stream = torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())  # the weights may still be on their way
        self.pool: Any = torch.cuda.graph_pool_handle() if self.graphs else None
        self.staging = Staging(ops.device)
        self.choosing = Choosing(ops.device, grammars, vocab, self._until)
        self.newest = torch.zeros(tables.shape[1], dtype=torch.int32, device=ops.device)
        self.chain = None
        if drafting is not None:
            assert isinstance(drafting.runner, CudaRunner)
            self.chain = DraftChain(drafting.runner, self, drafting.vocab)
        self.kinds = attention_kinds(model, ops)
        plain = ops.shares_steps and kv.format not in KV_SCALE_BYTES  # K and V as floats
        self.members = self.kinds[0].members if plain and len(self.kinds) == 1 else 0
        grouped = len(grouped_attentions(model)) == len(model.layers)
        self.kv_heads = self.kinds[0].kv_heads if ops.shares_steps and grouped else 0  # where splits may be longer
        self.shapes: dict[Shape, Captured] = {}
        self.captures = 0
        self.capturing = deque[tuple[Captured, Capture]]()  # the first of them is being made
        self.results: list[Tensor] = []  # pinned, back from `collect`, to be used again

    # ---- the protocol ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Handle:
        with torch.cuda.stream(self.stream) if self.on_card else nullcontext():
            # What the host prepares is not the device's time, but blocks that move and passes of the draft model are.
            began = self._event() if plan.moves or plan.drafts else None
            self.kv.move(plan.moves)
            works, passes, launched = plan.works, Passes(), tuple[DraftPass, ...]()
            if self.chain is not None and plan.drafts and self.chain.can_write(plan):
                works, launched = self.chain.launch(plan)
            elif self.drafting is not None:
                works, passes = self.drafting.write(plan)
            rows = StepRows(works)
            streams = all(work.kind is WorkKind.WRITE for work in works)
            handle = self._launch_streams(rows) if streams else self._launch_mixed(rows, written=bool(plan.drafts))
            handle.began = began or handle.began
            handle.passes, handle.launched = passes, launched
            return handle

    def launch_rows(self, rows: StepRows) -> Handle:
        """Rows of a draft model, of which nothing is asked but the tokens that they choose."""
        streams = rows.single and len(rows.choices) == rows.total
        return self._launch_streams(rows) if streams else self._launch_mixed(rows, written=True)

    def collect_rows(self, handle: Handle) -> tuple[list[int], float | None]:
        """The tokens and the seconds that the device took."""
        seconds = self._wait(handle)
        chosen = handle.tokens[: len(handle.rows.choices)].tolist()
        self.results.append(handle.tokens)
        return chosen, seconds

    def next_tokens(self, rows: StepRows) -> list[int | None]:
        """What follows the rows that choose. It waits."""
        chosen, _ = self.collect_rows(self.launch_rows(rows))
        most = self.model.arch.vocab if self.vocab is None else self.vocab
        return [token if 0 <= token < most else None for token in chosen]

    def collect(self, handle: Handle) -> Result:
        rows, details, settled = handle.rows, dict[int, Details](), True
        if handle.launched:
            assert self.chain is not None
            rows.works, handle.passes, settled = self.chain.collect(handle.launched, rows.works)
        seconds = self._wait(handle)
        handle.settled = handle.settled and settled
        chosen = handle.tokens[: len(rows.choices)].tolist()
        kept = rows.accepted([None if token < 0 else token for token in chosen])
        for prompt, scores in handle.prompts:
            details[prompt.work] = prompt_details(scores.of_prompt(prompt, rows.works[prompt.work].request))
        if handle.scores is not None or min(chosen, default=0) < 0:
            scores = handle.scores or Scores((), torch.empty(0, 2))
            describe_choices(rows, kept, scores.of, handle.errors, details)
        self.results.append(handle.tokens)
        return Result(tuple(kept), details, seconds, handle.passes, handle.settled, handle.verified)

    def _wait(self, handle: Handle) -> float | None:
        """Wait until the device is done. Returns the seconds that the step took, where the device measures them."""
        if handle.done is None:
            return None
        if self.capturing and (not handle.done.query() or self.capturing[0][0].left_out > LEFT_OUT):
            self._capture_more()
            handle.settled = handle.settled and not handle.done.query()  # else the host was late
        self._until(handle.done)
        seconds: float = handle.began.elapsed_time(handle.done) / 1e3
        if handle.clocked is not None:
            alone = seconds - sum(taken for _, taken in handle.passes)
            handle.clocked.entry.worthwhile = handle.clocked.host_seconds > BEHIND * alone
            handle.settled = not handle.clocked.entry.worthwhile or self.captures >= MOST_GRAPHS
        return seconds

    def _until(self, event: torch.cuda.Event) -> None:
        if self.lead is None:
            event.synchronize()
        else:
            self.lead.wait(event)

    # ---- steps of a shape that others share ------------------------------------------------------------------------

    def _launch_streams(self, rows: StepRows) -> Handle:
        """Every request advances by one."""
        streams = Streams.of(rows, self.tables, self.members)
        shape = streams.shape(self.members, self.kv_heads)
        entry = self._entry(shape)
        streams.fill(self.staging.begin(entry.arrays), self.kv.layout.groups)
        return self._run_shape(rows, shape, entry)

    def _entry(self, shape: Shape) -> Captured:
        entry = self.shapes.get(shape)
        if entry is None:
            arrays = shape.arrays(self.tables.shape[0])
            buffer = torch.empty(arrays.size, dtype=torch.int32, device=self.ops.device)
            entry = self.shapes[shape] = Captured(arrays, buffer, arrays.views(buffer))
        return entry

    def _run_shape(self, rows: StepRows, shape: Shape, entry: Captured) -> Handle:
        began = self._event()
        newest = self.choosing.newest(rows.choices, self.newest) if shape.later else None
        self.staging.send(entry.arrays, entry.buffer)
        entry.occurred += 1
        known = entry.graph is not None
        if not known and self._wants_graph(shape, entry):
            self._capture(shape, entry)
        if entry.graph is not None:
            entry.graph.replay()
            assert entry.end is not None
            handle = self._end(rows, shape, entry.end, entry.there, began, newest)
            handle.settled = known and entry.occurred > 1
            return handle
        host = time.perf_counter()
        handle = self._end(rows, shape, self._step(shape, entry), entry.there, began, newest)
        handle.clocked = Clocked(entry, time.perf_counter() - host) if self.graphs else None
        return handle

    def _end(
        self, rows: StepRows, shape: Shape, end: Tensor, there: dict[str, Tensor], began: Any, newest: Newest | None
    ) -> Handle:  # fmt: skip
        """end: what `_step` gave."""
        if not shape.later:
            return self._finish(rows, end, began)
        logits = self.model.narrow_logits(end[: len(rows.choices)])
        chosen = self.choosing.choose(logits, rows.choices, there, self.newest, newest, rows.reports)
        handle = self._finish(rows, chosen.tokens, began)
        handle.scores, handle.errors = chosen.scores, chosen.errors
        return handle

    def _wants_graph(self, shape: Shape, entry: Captured) -> bool:
        """No plan is made while drafts are verified, so that the device always waits for the host then."""
        needed = entry.occurred > 1 if shape.drafts else entry.worthwhile and entry.occurred > OCCURRENCES
        return self.graphs and needed and not entry.failed and self.captures < MOST_GRAPHS

    def _capture(self, shape: Shape, entry: Captured) -> None:
        self.captures += 1
        with capturing(self.pool) as graph:
            end = self._step(shape, entry)
        entry.graph, entry.end = graph, end  # at the end: a capture that failed must not be replayed

    @torch.inference_mode()
    def stream_seconds(self, rows: int) -> float:
        """Seconds of a step of so many streams without contexts, captured and replayed. On a card."""
        scale = longer(rows * self.kv_heads)
        splits = split_count(-(-COLUMNS * BLOCK // scale))
        shape = Shape(rows, rows, COLUMNS, rows, rows, splits, streams=True, scale=scale)
        entry, times = self._entry(shape), []
        with torch.cuda.stream(self.stream):
            shape.fill_padding(self.staging.begin(entry.arrays))
            self.staging.send(entry.arrays, entry.buffer)
            self._step(shape, entry)
            self._capture(shape, entry)
            for _ in range(4):
                began = timing_event()
                entry.graph.replay()
                done = timing_event()
                done.synchronize()
                times.append(began.elapsed_time(done) / 1e3)
        return min(times)

    def _step(self, shape: Shape, entry: Captured) -> Tensor:
        """The tokens or, where they are chosen later, the rows in front of the head."""
        return self._chosen(shape, self._forward(shape, entry.arrays, entry.there), entry.there)

    def _chosen(self, shape: Shape, hidden: Tensor, there: dict[str, Tensor]) -> Tensor:
        if shape.later or not shape.samplers:
            return hidden[: shape.samplers] if shape.samplers else self.newest[:0]
        return self._sample(self.model.narrow_logits(hidden[: shape.samplers]), there)

    # ---- graphs of steps that verify drafts ------------------------------------------------------------------------

    def _capture_later(self, shape: Shape, entry: Captured) -> bool:
        """False: no graph will be made."""
        if not entry.pending:
            if entry.failed or self.captures >= MOST_GRAPHS:
                return False
            entry.pending = True
            self.captures += 1
            host = self.staging.begin(entry.arrays)
            shape.fill_padding(host)
            padding = self.staging.send(entry.arrays, torch.empty_like(entry.buffer))
            runner = proxy(self)  # an engine that ends is not kept by its own captures
            rehearsal = CudaRunner._pieces(runner, shape, entry.arrays.views(padding))
            recording = CudaRunner._pieces(runner, shape, entry.there)
            self.capturing.append((entry, Capture(rehearsal, recording, self.pool)))
        entry.left_out += 1
        return True

    def _capture_more(self) -> None:
        """Capture more layers of the first graph that is not complete."""
        entry, capture = self.capturing.popleft()
        if entry.graph is not None:
            return  # drafts of a draft model have such a shape too, and were faster
        try:
            with torch.cuda.stream(self.stream) if self.on_card else nullcontext():
                end = capture.advance()
        except Exception:
            log.exception("a step that verifies drafts cannot be captured: it is launched kernel by kernel")
            entry.pending, entry.failed = False, True
            self.pool = torch.cuda.graph_pool_handle() if self.on_card else None  # a failed capture may hold the other
            return
        if end is None:
            self.capturing.appendleft((entry, capture))
        else:
            entry.graph, entry.end = capture.chain, end

    def _pieces(self, shape: Shape, there: dict[str, Tensor]) -> Pieces:
        """`_step`, one layer at a time."""
        hidden = self.newest
        for hidden in self.model.layer_by_layer(self._batch(shape, there, None), self.kv):
            yield hidden
        end = self._chosen(shape, hidden, there)
        return end.clone() if shape.later else end  # the last graph must not be empty

    def _forward(
        self, shape: Shape, arrays: StagedArrays, there: dict[str, Tensor], prompt_rows: int = 0,
        known: Known | None = None,
    ) -> Tensor:  # fmt: skip
        """The model's pass over the step's rows, on all ranks where there are several."""
        if self.lead is None:
            return self.model.forward(self._batch(shape, there, known), self.kv)
        self.lead.tell(StepMessage(shape, prompt_rows, known, self.staging.filled(arrays)).packed())
        with whole_step():
            batch = self._batch(shape, there, known)
            self.lead.collective.share(batch.tokens)
            return self.model.forward(batch, self.kv)

    def _batch(self, shape: Shape, there: dict[str, Tensor], known: Known | None) -> DeviceBatch:
        tokens = resolve_tokens(there["tokens"], self.newest, self.model.arch.vocab)
        return make_batch(shape, there, tokens, self.kinds, known, self.ops.shares_steps)

    def _sample(self, logits: Tensor, there: dict[str, Tensor]) -> Tensor:
        out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        temperatures = there["temperatures"].view(torch.float32)
        filters = None
        if len(there["top_k"]):
            filters, logits = Filters(there["top_k"], there["top_p"].view(torch.float64), SLACK), logits.float()
        return sample(logits, temperatures, there["keys"], there["rows"], self.newest, out, filters)

    # ---- prompts, chunks and mixtures ------------------------------------------------------------------------------

    def _launch_mixed(self, rows: StepRows, written: bool = False) -> Handle:
        """written: the rows are the draft model's, or verify what it wrote: none is left out."""
        mixture = Mixture.of(rows, self.kinds)
        padded = mixture.padded_shape(self.kinds, self.tables.shape[2]) if self.ops.shares_steps else None
        if padded is None:
            return self._launch_once(mixture)
        entry = self._entry(padded)
        waits = padded.drafts and self.graphs and entry.graph is None and not written
        if waits and self._capture_later(padded, entry):
            handle = self._launch_streams(StepRows([work.undrafted() for work in rows.works]))
            handle.verified = False
            return handle
        mixture.fill(self.staging.begin(entry.arrays), self.tables, self.kv.layout.groups)
        return self._run_shape(rows, padded, entry)

    def _launch_once(self, mixture: Mixture) -> Handle:
        rows, shape = mixture.rows, mixture.exact_shape()
        prompt_rows = sum(prompt.count for prompt in rows.prompts)
        arrays = shape.arrays(self.tables.shape[0], prompt_rows)
        mixture.fill(self.staging.begin(arrays), self.tables, self.kv.layout.groups)
        began = self._event()
        newest = self.choosing.newest(rows.choices, self.newest) if shape.later else None
        there = arrays.views(self.staging.send(arrays))
        hidden = self._forward(shape, arrays, there, prompt_rows, mixture.known())
        prompts = self._score_prompts(rows, hidden) if rows.prompts else ()
        handle = self._end(rows, shape, self._chosen(shape, hidden, there), there, began, newest)
        handle.prompts = prompts
        return handle

    def _score_prompts(self, rows: StepRows, hidden: Tensor) -> tuple[tuple[PromptRows, Scores], ...]:
        def scored(prompt: PromptRows) -> ScoredRows:
            request, mine = rows.works[prompt.work].request, hidden[prompt.first : prompt.first + prompt.count]
            tokens = request.tokens[prompt.position : prompt.position + prompt.count]
            best = request.params.prompt_logprobs or 0
            return ScoredRows(tokens, best, lambda part: self.model.narrow_logits(mine[part]))

        return tuple(zip(rows.prompts, self.choosing.score_prompts([*map(scored, rows.prompts)]), strict=True))

    def _finish(self, rows: StepRows, tokens: Tensor, began: Any) -> Handle:
        count = len(rows.choices)
        if not self.on_card:
            return Handle(rows, tokens[:count].clone(), None, None)
        most = max(count, self.tables.shape[1])
        out = self.results.pop() if self.results else torch.empty(0, dtype=torch.int32)
        if out.numel() < most:
            out = torch.empty(most, dtype=torch.int32, pin_memory=True)
        out[:count].copy_(tokens[:count], non_blocking=True)
        return Handle(rows, out, began, timing_event())

    def _event(self) -> Any:
        return timing_event() if self.on_card else None


def timing_event() -> Any:
    """An event with a time, recorded now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
