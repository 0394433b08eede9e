"""Chooses the tokens of steps whose logits are not enough: grammar masks, penalties, log probabilities.

The forward pass of such a step ends with its last rows, and is a captured graph as that of any other step. What follows
is launched kernel by kernel: the head, the edits of the logits, the choice, the scores. A grammar needs the tokens that
the step before has chosen: the host waits for that step alone, and makes the masks while the device runs this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from twostroke.grammar.masks import NO_MASKS, GrammarRows, RowMasks
from twostroke.ops.cuda.kernels.edits import EditLists, edit_rows, mask_rows, temper_rows
from twostroke.ops.cuda.kernels.sample import Filters, sample
from twostroke.ops.cuda.kernels.scores import best_scores
from twostroke.run.cuda.edits import EditedRows
from twostroke.run.cuda.scores import Scores, to_host
from twostroke.run.cuda.staging import StagedArrays, Staging
from twostroke.run.runner import LOGIT_ROWS
from twostroke.run.sample import SLACK, has_tiny_temperature
from twostroke.types import Choice


@dataclass(slots=True, eq=False)
class Chosen:
    tokens: Tensor
    scores: Scores | None = None
    errors: dict[int, str] = field(default_factory=dict)  # of choices that could not be made


@dataclass(slots=True, eq=False)
class Newest:
    """A copy of the tokens that steps in flight have chosen, on its way to the host."""

    tokens: Tensor
    copied: Any  # the event of its end; None: it is there


class ScoredRows(NamedTuple):
    """Rows of a prompt whose own tokens are scored."""

    tokens: Sequence[int]
    best: int
    make_logits: Callable[[slice], Tensor]  # of some of the positions before them


class Choosing:
    def __init__(
        self, device: torch.device, grammars: GrammarRows | None, vocab: int | None, until: Callable[[Any], None]
    ):
        """vocab: of the logits, where it is not the model's own. until: waits for an event."""
        self.device, self.grammars, self.vocab, self.until = device, grammars, vocab, until
        self.on_card = device.type == "cuda"
        self.staging = Staging(device, until)
        self.edited = EditedRows()

    def newest(self, choices: Sequence[Choice], newest: Tensor) -> Newest | None:
        """Before the forward pass is launched: asks for the tokens that the host has to know."""
        bound = (choice for choice in choices if choice.request.params.grammar is not None)
        if all(len(choice.tokens) == choice.position for choice in bound):
            return None
        tokens = to_host(newest)
        copied = None
        if self.on_card:
            copied = torch.cuda.Event()
            copied.record()
        return Newest(tokens, copied)

    def choose(
        self, logits: Tensor, choices: Sequence[Choice], there: dict[str, Tensor], newest: Tensor,
        known: Newest | None, reports: bool = True,
    ) -> Chosen:  # fmt: skip
        """logits: of each choice. there: the step's arrays of temperatures, keys and filters. known: what `newest`
        gave. reports: log probabilities, where they are wanted."""
        count = len(choices)
        scored = [n for n, choice in enumerate(choices) if reports and choice.request.params.logprobs is not None]
        masks = self._masks(choices, known)
        sent = self._send(choices, masks, scored, self.vocab or logits.shape[1])
        edited = wide(logits, self.vocab)
        mask_rows(edited, sent["masked"], sent["words"])
        penalties = sent["penalties"].view(torch.float32)
        edit_rows(edited, newest, EditLists(sent["places"], penalties, sent["ids"], sent["values"]))
        temper_rows(edited, sent["cold"], sent["lowest"].view(torch.float64))
        rows, temperatures = there["rows"][:count], there["temperatures"].view(torch.float32)[:count]
        filters = Filters(there["top_k"][:count], there["top_p"].view(torch.float64)[:count], SLACK)
        out = torch.empty(count, dtype=torch.int32, device=self.device)
        tokens = sample(edited, temperatures, there["keys"][:count], rows, newest, out, filters)
        if not scored:
            return Chosen(tokens, None, dict(masks.errors))
        best = max(choices[n].request.params.logprobs or 0 for n in scored)
        table = best_scores(logits, sent["scored"], tokens[sent["scored"]], best)
        return Chosen(tokens, Scores(scored, to_host(table)), dict(masks.errors))

    def _masks(self, choices: Sequence[Choice], known: Newest | None) -> RowMasks:
        if self.grammars is None:
            return NO_MASKS
        if known is not None:
            if known.copied is not None:
                self.until(known.copied)
            bound = (choice.request.params.grammar is not None for choice in choices)
            choices = [with_newest(one, known.tokens) if b else one for one, b in zip(choices, bound, strict=True)]
        return self.grammars.masks(choices)

    def _send(self, choices: Sequence[Choice], masks: RowMasks, scored: list[int], vocab: int) -> dict[str, Tensor]:
        """What the rows ask for, on the device after one copy."""
        masked = sorted(masks.allowed.keys() | masks.unmasked)
        cold = [n for n, choice in enumerate(choices) if has_tiny_temperature(choice.request.params)]
        edits = self.edited.edits(enumerate(choices))._asdict()
        shapes = {name: array.shape for name, array in edits.items()}
        shapes |= {"scored": (len(scored),), "cold": (len(cold),), "lowest": (len(cold), 2)}
        arrays = StagedArrays.lay({"masked": (len(masked),), "words": (len(masked), -(-vocab // 32)), **shapes})
        host = self.staging.begin(arrays)
        host["masked"][:], host["scored"][:], host["cold"][:] = masked, scored, cold
        host["lowest"].view(np.float64)[:, 0] = [choices[n].request.params.temperature for n in cold]
        for name, array in edits.items():
            host[name][:] = array.view(np.int32)
        for line, n in zip(host["words"].view(np.uint8), masked, strict=True):
            if n in masks.allowed:
                bits = np.packbits(masks.allowed[n], bitorder="little")
                line[: len(bits)] = bits
        return arrays.views(self.staging.send(arrays))

    def score_prompts(self, prompts: Sequence[ScoredRows]) -> list[Scores]:
        """Log probabilities of the prompts' own tokens."""
        tokens = [token for prompt in prompts for token in prompt.tokens]
        arrays = StagedArrays.lay({"rows": (LOGIT_ROWS,), "tokens": (len(tokens),)})
        host = self.staging.begin(arrays)
        host["rows"][:], host["tokens"][:] = range(LOGIT_ROWS), tokens
        sent, found, done = arrays.views(self.staging.send(arrays)), list[Scores](), 0
        for prompt in prompts:
            tables, count = [], len(prompt.tokens)
            for first in range(0, count, LOGIT_ROWS):
                logits = prompt.make_logits(slice(first, first + LOGIT_ROWS))
                mine = sent["tokens"][done + first : done + first + len(logits)]
                tables.append(best_scores(logits, sent["rows"][: len(logits)], mine, prompt.best))
            found.append(Scores(range(count), to_host(torch.cat(tables))))
            done += count
        return found


def with_newest(choice: Choice, newest: Tensor) -> Choice:
    """The choice with the token that is still in flight, if there is one."""
    if len(choice.tokens) == choice.position:
        return choice
    return choice._replace(tokens=[*choice.tokens, int(newest[choice.request.row])])


def wide(logits: Tensor, vocab: int | None) -> Tensor:
    """A copy in float32, cut or padded to `vocab` tokens; those that were added are never chosen."""
    if vocab is None or vocab == logits.shape[1]:
        return logits.to(torch.float32, copy=True)
    out = torch.full((len(logits), vocab), -1e30, device=logits.device)
    most = min(vocab, logits.shape[1])
    out[:, :most] = logits[:, :most]
    return out
