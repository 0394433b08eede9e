"""Runs plans on the model: batch, forward, logits, sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from twostroke.grammar.masks import NO_MASKS, GrammarRows
from twostroke.kv.storage import KVStorage
from twostroke.model.transformer import Transformer
from twostroke.ops.interface import Array, Batch, Decode, Ops
from twostroke.run.drafting import Drafting
from twostroke.run.sample import NOT_FINITE, choose, is_plain_greedy, logprobs, of_width, prompt_details
from twostroke.run.step import NewestRows, PromptRows, StepRows
from twostroke.types import Details, Plan, RequestState, Result, TokenLogprobs, WorkKind

LOGIT_ROWS = 128  # rows of prompt logits made at a time: a long prompt times a large vocabulary does not fit in memory


class ModelRunner:
    """On a CPU a step is done when `launch` returns, so one plan is in flight at a time.

    For a backend that computes with NumPy arrays; torch_runner.py for one that takes tensors.
    """

    depth = 1

    def __init__(
        self,
        model: Transformer,
        kv: KVStorage,
        tables: np.ndarray,
        ops: Ops,
        grammars: GrammarRows | None = None,
        drafting: Drafting | None = None,
        vocab: int | None = None,
    ):
        """drafting: the draft model's part of each step. vocab: of a draft model's runner, how many logits the target
        has; the models' own numbers may differ by padding."""
        self.model = model
        self.kv = kv
        self.tables = tables
        self.ops = ops
        self.grammars = grammars
        self.drafting = drafting
        self.vocab = vocab
        self._decode = model.decoder(kv, tables)

    def launch(self, plan: Plan) -> Result:
        self.kv.move(plan.moves)
        works, passes = self.drafting.write(plan) if self.drafting is not None else (plan.works, ())
        details: dict[int, Details] = {}
        if self._decode is not None and all([work.kind is not WorkKind.READ for work in works]):  # noqa: C419 - faster
            tokens = self._write(self._decode, NewestRows(works), details)
        else:
            tokens = self._run(StepRows(works), details)
        return Result(tokens, details, passes=passes)

    def _write(self, decode: Decode, step: NewestRows, details: dict[int, Details]) -> tuple[tuple[int, ...], ...]:
        """A step of newest tokens and guesses. The backend makes plain greedy choices itself."""
        plain = all(map(is_plain_greedy, step.choices))
        logits, best = decode(step.given(), plain)
        if best is None:
            return self._choose(step, logits, details)
        kept = tuple(step.accepted([token if token >= 0 else None for token in best]))
        if min(best) < 0 or any([choice.request.params.logprobs is not None for choice in step.choices]):  # noqa: C419
            describe_choices(step, kept, scores_of(logits), {}, details)
        return kept

    def _run(self, step: StepRows, details: dict[int, Details]) -> tuple[tuple[int, ...], ...]:
        hidden = self._forward(step.batch(self.tables, self.kv.layout.groups))  # (S, hidden): choices, prompt rows
        for prompt in step.prompts:
            scores = score_prompt(step.works[prompt.work].request, prompt, hidden, self._logits)
            details[prompt.work] = prompt_details(scores)
        if not step.choices:
            return ((),) * len(step.works)
        return self._choose(step, self._logits(hidden[: len(step.choices)]), details)

    def collect(self, handle: Result) -> Result:
        return handle

    def next_tokens(self, rows: StepRows) -> list[int | None]:
        """What follows the rows that choose; for a draft model, of which nothing else is asked."""
        hidden = self._forward(rows.batch(self.tables, self.kv.layout.groups))
        if not rows.choices:
            return []
        return choose(of_width(self._logits(hidden), self.vocab), rows.choices, self._argmax)

    # ---- what depends on the arrays of the backend -------------------------------------------------------------------

    def _forward(self, batch: Batch) -> Array:
        return self.model.forward(batch, self.kv)

    def _logits(self, hidden: Array) -> np.ndarray:
        return self.model.logits(hidden)

    def _argmax(self, logits: np.ndarray) -> np.ndarray:
        return self.ops.argmax(logits)

    # ---- rows of logits ----------------------------------------------------------------------------------------------

    def _choose(self, step: StepRows, logits: np.ndarray, details: dict[int, Details]) -> tuple[tuple[int, ...], ...]:
        masks = self.grammars.masks(step.choices) if self.grammars is not None else NO_MASKS
        chosen = choose(logits, step.choices, self._argmax, masks.allowed)
        kept = step.accepted([None if row in masks.unmasked else token for row, token in enumerate(chosen)])
        describe_choices(step, kept, scores_of(logits), masks.errors, details)
        return tuple(kept)


def score_prompt(
    request: RequestState, prompt: PromptRows, hidden: Array, make_logits: Callable[[Array], np.ndarray]
) -> dict[int, TokenLogprobs]:
    """Log probabilities of the prompt's own tokens, by position. hidden: all rows of the step that go to the head."""
    scores, wanted = {}, request.params.prompt_logprobs or 0
    rows = hidden[prompt.first : prompt.first + prompt.count]
    for offset in range(0, prompt.count, LOGIT_ROWS):
        logits = make_logits(rows[offset : offset + LOGIT_ROWS])
        for position, row in enumerate(logits, prompt.position + offset):
            scores[position] = logprobs(row, request.tokens[position], wanted)
    return scores


ScoreOf = Callable[[int, int, int], TokenLogprobs]  # of a row of logits, its token, and so many best ones


def scores_of(logits: np.ndarray) -> ScoreOf:
    return lambda row, token, best: logprobs(logits[row], token, best)


def describe_choices(
    step: StepRows,
    kept: Sequence[tuple[int, ...]],
    score: ScoreOf,
    errors: Mapping[int, str],
    details: dict[int, Details],
) -> None:
    """Log probabilities of the tokens that each work keeps, and why a work chose nothing."""
    first: dict[int, int] = {}  # row of logits of each work's first choice
    for row, work in enumerate(step.chooser):
        first.setdefault(work, row)
    for work, row in first.items():
        tokens, wanted = kept[work], step.works[work].request.params.logprobs
        if not tokens:
            details.setdefault(work, Details()).error = errors.get(row, NOT_FINITE)
        elif wanted is not None:
            found = tuple(score(row + i, token, wanted) for i, token in enumerate(tokens))
            details.setdefault(work, Details()).logprobs = found
