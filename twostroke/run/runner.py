"""Runs plans on the model: batch, forward, logits, sample."""

from __future__ import annotations

import numpy as np

from twostroke.grammar.compile import NO_MASKS, GrammarCompiler, GrammarRows
from twostroke.kv.storage import KVStorage
from twostroke.model.transformer import Transformer
from twostroke.ops.interface import Array, Batch, Ops
from twostroke.run.batch import PromptRows, StepRows, build_step
from twostroke.run.sample import NOT_FINITE, choose, logprobs
from twostroke.types import Details, Plan, Result

LOGIT_ROWS = 128  # rows of prompt logits made at a time: a long prompt times a large vocabulary does not fit in memory


class ModelRunner:
    """On a CPU a step is done when `launch` returns, so one plan is in flight at a time.

    For a backend that computes with NumPy arrays; torch_runner.py for one that takes tensors.
    """

    depth = 1

    def __init__(
        self, model: Transformer, kv: KVStorage, tables: np.ndarray, ops: Ops, grammars: GrammarCompiler | None = None
    ):
        self.model = model
        self.kv = kv
        self.tables = tables
        self.ops = ops
        self.grammars = GrammarRows(grammars) if grammars is not None else None

    def launch(self, plan: Plan) -> Result:
        self.kv.move(plan.moves)
        step = build_step(plan, self.tables)
        hidden = self._forward(step.batch)  # (S, hidden): samplers' rows, then prompt rows
        details: dict[int, Details] = {}
        tokens = self._sample(plan, step, hidden, details)
        for rows in step.prompts:
            details.setdefault(rows.work, Details()).prompt_logprobs = self._score_prompt(plan, rows, hidden)
        return Result(tokens, details)

    def collect(self, handle: Result) -> Result:
        return handle

    # ---- what depends on the arrays of the backend -------------------------------------------------------------------

    def _forward(self, batch: Batch) -> Array:
        return self.model.forward(batch, self.kv)

    def _logits(self, hidden: Array) -> np.ndarray:
        return self.model.logits(hidden)

    def _argmax(self, logits: np.ndarray) -> np.ndarray:
        return self.ops.argmax(logits)

    # ---- the rows somebody wants -------------------------------------------------------------------------------------

    def _sample(
        self, plan: Plan, step: StepRows, hidden: Array, details: dict[int, Details]
    ) -> tuple[tuple[int, ...], ...]:
        sampled: list[tuple[int, ...]] = [()] * len(plan.works)
        if not step.samplers:
            return tuple(sampled)
        logits = self._logits(hidden[: len(step.samplers)])
        requests = [plan.works[index].request for index in step.samplers]
        masks = self.grammars.masks(requests) if self.grammars is not None else NO_MASKS
        chosen = choose(logits, requests, self._argmax, masks.allowed)
        for row, (index, token) in enumerate(zip(step.samplers, chosen, strict=True)):
            if token is None or row in masks.errors:
                details[index] = Details(error=masks.errors.get(row, NOT_FINITE))
                continue
            sampled[index] = (token,)
            wanted = requests[row].params.logprobs
            if wanted is not None:
                details[index] = Details(logprobs=(logprobs(logits[row], token, wanted),))
        return tuple(sampled)

    def _score_prompt(self, plan: Plan, rows: PromptRows, hidden: Array) -> dict:
        request = plan.works[rows.work].request
        best = request.params.prompt_logprobs or 0
        scores = {}
        for offset in range(0, rows.count, LOGIT_ROWS):
            count = min(LOGIT_ROWS, rows.count - offset)
            logits = self._logits(hidden[rows.first + offset : rows.first + offset + count])
            for i in range(count):
                position = rows.position + offset + i
                scores[position] = logprobs(logits[i], request.tokens[position], best)
        return scores
