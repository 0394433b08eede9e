"""From logits to a token: a chain of small pure functions over one row.

A sampled token is argmax(logits + Gumbel noise), and the noise is a hash of (seed, sample, position, token): randomness
has no state, so a result does not depend on what else was in the batch, and a draft can be verified by equality.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from twostroke.ops.interface import Ops
from twostroke.sampling import MASK, MIX_1, MIX_2, SamplingParams, mix
from twostroke.types import EMPTY, Request, TokenLogprobs

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: steps of a Weyl sequence
SLACK = 1e-9  # off top_p: how the probabilities before a token were added up must not decide whether it stays
NOT_FINITE = "the model produced logits that are not numbers for this request"


def choose(
    logits: Tensor, requests: list[Request], ops: Ops, allowed: Mapping[int, np.ndarray] = EMPTY
) -> list[int | None]:
    """logits: (S, V), a row for each request. None where the logits are not numbers.

    allowed: by row, the tokens a grammar allows there: booleans (V,), at least one of them true.
    """
    tokens: list[int | None] = [None] * len(requests)
    plain = [index for index, request in enumerate(requests) if is_plain_greedy(request)]
    if plain:
        rows = logits if len(plain) == len(requests) else logits[plain]
        for index, token in zip(plain, greedy(rows, ops), strict=True):
            tokens[index] = token
    for index, request in enumerate(requests):
        if not is_plain_greedy(request):
            tokens[index] = choose_one(logits[index], request, allowed.get(index))
    return tokens


def is_plain_greedy(request: Request) -> bool:
    return request.params.temperature == 0 and request.params.grammar is None and not needs_adjusting(request)


def needs_adjusting(request: Request) -> bool:
    params = request.params
    return bool(
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or request.output_length < params.min_tokens
    )


def greedy(logits: Tensor, ops: Ops) -> list[int | None]:
    values = logits.numpy()
    tokens = ops.argmax(logits).tolist()  # -1: a NaN in the row
    return [token if token >= 0 and isfinite(values[row, token]) else None for row, token in enumerate(tokens)]


def choose_one(row: Tensor, request: Request, allowed: np.ndarray | None = None) -> int | None:
    """row: (V,). The whole chain for one request."""
    if not torch.isfinite(row).all():
        return None
    if allowed is not None:
        row = torch.where(torch.from_numpy(allowed).to(row.device), row, -torch.inf)
    if needs_adjusting(request):
        row = adjust(row, request)
    if request.params.temperature == 0:
        return int(row.argmax())
    values, ids = keep_likely(row / request.params.temperature, request.params)
    key = noise_key(request.seed, request.sample, len(request.tokens))
    return int(ids[(values + gumbel(key, ids)).argmax()])


def adjust(row: Tensor, request: Request) -> Tensor:
    """Bias, penalties and the minimal length."""
    params = request.params
    row = row.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.asarray(request.tokens, dtype=np.int64)))
        scores = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if (params.presence_penalty or params.frequency_penalty) and request.output_length:
        written, counts = np.unique(request.tokens[request.prompt_length :], return_counts=True)
        penalty_row = params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts)
        row[torch.from_numpy(written)] -= penalty_row.to(row.dtype)
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if request.output_length < params.min_tokens:
        row[list(request.stop_ids)] = -torch.inf
    return row


def keep_likely(row: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The tokens that top_k, top_p and min_p leave: (values, ids), the likeliest first, equal ones in order of ids."""
    vocab = row.shape[0]
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return row, torch.arange(vocab)
    ids = torch.arange(vocab)
    if 0 < params.top_k < vocab:
        least = torch.topk(row, params.top_k).values[-1]
        equal = (row == least).nonzero().flatten()
        higher = (row > least).nonzero().flatten()
        ids = torch.cat((higher, equal[: params.top_k - len(higher)]))
    values, order = torch.sort(row[ids], descending=True, stable=True)
    ids = ids[order]
    probabilities = torch.softmax(values.double(), dim=0)
    keep = probabilities >= params.min_p * probabilities[0]
    if params.top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities
        keep &= before < max(params.top_p - SLACK, SLACK)  # what came before has not reached top_p yet
    return values[keep], ids[keep]


def noise_key(seed: int, sample: int, position: int) -> int:
    """One 64-bit key for one choice."""
    key = seed & MASK
    for part in (sample, position):
        key = mix((key + GOLDEN * (part + 1)) & MASK)
    return key


def gumbel(key: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise for each token id, a pure function of (key, id)."""
    z = np.uint64(key) + np.uint64(GOLDEN) * (ids.numpy().astype(np.uint64) + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    z ^= z >> np.uint64(31)
    uniform = ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    return torch.from_numpy(-np.log(-np.log(uniform))).float()


def logprobs(row: Tensor, token: int, best: int) -> TokenLogprobs:
    """Of the model's own distribution, before temperature, penalties and filters."""
    row = row.double()
    total = torch.logsumexp(row, dim=0)
    top: tuple[tuple[int, float], ...] = ()
    if best:
        values, ids = torch.topk(row, min(best, row.shape[0]))
        top = tuple(zip(ids.tolist(), (values - total).tolist(), strict=True))
    return TokenLogprobs(token, float(row[token] - total), top)
