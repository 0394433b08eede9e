"""From logits to a token: a chain of small pure functions over one row.

A sampled token is argmax(logits + Gumbel noise), and the noise is a hash of (seed, sample, position, token): randomness
has no state, so a result does not depend on what else was in the batch, and a draft can be verified by equality.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, isnan, nan

import numpy as np

from twostroke.sampling import MASK, MIX_1, MIX_2, SamplingParams, mix
from twostroke.types import EMPTY, Choice, Details, TokenLogprobs

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: steps of a Weyl sequence
SLACK = 1e-9  # taken off top_p: the rounding of a sum of probabilities must not decide whether a token is kept
TINY = 1e-4  # temperatures below it: a logit over the temperature is too large for float32 to keep the noise apart
LEAST = -9999.0  # the log probability of a token that cannot be chosen: JSON has no infinity
STRETCH = 64  # ids whose maximum is taken together
NOT_FINITE = (
    "the model computed values that are not numbers (NaN or infinite) for this request: its weights are damaged, or "
    "too large for their type"
)


def of_width(logits: np.ndarray, vocab: int | None) -> np.ndarray:
    """Logits (…, V) cut or padded to `vocab` tokens; those that were added are never chosen. None: as they are."""
    if vocab is None or logits.shape[-1] == vocab:
        return logits
    missing = max(0, vocab - logits.shape[-1])
    widths = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return np.ascontiguousarray(np.pad(logits[..., :vocab], widths, constant_values=np.float32(-1e30)))


def choose(
    logits: np.ndarray,
    choices: Sequence[Choice],
    argmax: Callable[[np.ndarray], np.ndarray],
    allowed: Mapping[int, np.ndarray] = EMPTY,
) -> list[int | None]:
    """logits: (S, V) float32, a row for each choice. None where the logits are not numbers.

    argmax: the backend's. allowed: by row, the tokens a grammar allows there: booleans (V,), at least one of them true.
    """
    plain = [index for index, choice in enumerate(choices) if is_plain_greedy(choice)]
    if len(plain) == len(choices):
        return greedy(logits, argmax)
    tokens: list[int | None] = [None] * len(choices)
    if plain:
        for index, token in zip(plain, greedy(logits[plain], argmax), strict=True):
            tokens[index] = token
    for index in sorted(set(range(len(choices))).difference(plain)):
        tokens[index] = choose_one(logits[index], choices[index], allowed.get(index))
    return tokens


def is_plain_greedy(choice: Choice) -> bool:
    params = choice.request.params
    return params.temperature == 0 and params.grammar is None and not needs_adjusting(choice)


def needs_adjusting(choice: Choice) -> bool:
    params = choice.request.params
    return bool(
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or choice.output_length < params.min_tokens
    )


def greedy(logits: np.ndarray, argmax: Callable[[np.ndarray], np.ndarray]) -> list[int | None]:
    tokens = argmax(logits).tolist()  # -1: a NaN in the row
    return [token if token >= 0 and isfinite(logits[row, token]) else None for row, token in enumerate(tokens)]


def choose_one(row: np.ndarray, choice: Choice, allowed: np.ndarray | None = None) -> int | None:
    """row: (V,) float32. The whole chain for one token."""
    request = choice.request
    if not np.isfinite(row).all():
        return None
    if allowed is not None:
        row = np.where(allowed, row, np.float32(-np.inf))
    if needs_adjusting(choice):
        row = adjust(row, choice)
    if request.params.temperature == 0:
        return int(row.argmax())
    values, ids = keep_likely(tempered(row, request.params.temperature), request.params)
    key = noise_key(request.seed, request.sample, choice.position)
    return int(ids[(values + gumbel(key, ids)).argmax()])


def has_tiny_temperature(params: SamplingParams) -> bool:
    return 0.0 < params.temperature < TINY


def tempered(row: np.ndarray, temperature: float) -> np.ndarray:
    """The logits over the temperature. Below TINY they are first shifted so that the largest is 0, and divided in
    float64: the largest stays 0 and the others become as small as they are, down to minus infinity."""
    if temperature >= TINY:
        return row / np.float32(temperature)
    with np.errstate(over="ignore"):
        return (row.astype(np.float64) - float(row.max())) / temperature


def adjust(row: np.ndarray, choice: Choice) -> np.ndarray:
    """Bias, penalties and the minimal length."""
    request, tokens, params = choice.request, choice.tokens, choice.request.params
    row = row.copy()
    if params.repetition_penalty != 1.0:
        seen = np.fromiter(set(tokens), np.int64)  # np.unique imports numpy.ma, 25 ms of the first answer
        scores, penalty = row[seen], np.float32(params.repetition_penalty)
        row[seen] = np.where(scores > 0, scores / penalty, scores * penalty)
    if (params.presence_penalty or params.frequency_penalty) and choice.output_length:
        counts = Counter(tokens[request.prompt_length :])
        often = np.float32(params.frequency_penalty) * np.fromiter(counts.values(), np.float32)
        row[list(counts)] -= np.float32(params.presence_penalty) + often
    for token, bias in params.logit_bias.items():
        row[token] += np.float32(bias)
    if choice.output_length < params.min_tokens:
        row[list(request.stop_ids)] = -np.inf
    return row


def keep_likely(row: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that top_k, top_p and min_p leave: (values, ids), the likeliest first, equal ones in order of ids."""
    vocab = row.shape[0]
    ids = np.arange(vocab)
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return row, ids
    if 0 < params.top_k < vocab:
        ids = highest(row, params.top_k)
    values = row[ids]
    weights = np.exp(values.astype(np.float64) - float(values.max()))
    probabilities = weights / weights.sum()
    keep = probabilities >= params.min_p * probabilities.max()
    if params.top_p < 1.0:  # the rarer ones together are less than top_p leaves out: they need not be sorted
        keep &= probabilities >= (1.0 - params.top_p) / len(ids)
    values, ids, probabilities = values[keep], ids[keep], probabilities[keep]
    order = np.argsort(-values, kind="stable")
    values, ids, probabilities = values[order], ids[order], probabilities[order]
    if params.top_p < 1.0:
        before = probabilities.cumsum() - probabilities
        among = before < max(params.top_p - SLACK, SLACK)  # what came before has not reached top_p yet
        values, ids = values[among], ids[among]
    return values, ids


def highest(row: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest values, the lowest ids among equals; equal ones are in order, others are not."""
    among = may_be_highest(row, count)
    values = row[among]
    least = np.partition(values, len(values) - count)[len(values) - count]
    higher, equal = np.flatnonzero(values > least), np.flatnonzero(values == least)
    return among[np.concatenate((higher, equal[: count - len(higher)]))]


def may_be_highest(row: np.ndarray, count: int) -> np.ndarray:
    """Ids, in order, that contain the `count` largest values. The `count` largest maxima of stretches are so many
    values, so none of the largest is below the least of them: few of a vocabulary need to be sorted."""
    stretches = len(row) // STRETCH
    if stretches > 2 * count:
        peaks = row[: stretches * STRETCH].reshape(stretches, STRETCH).max(axis=1)
        ids = np.flatnonzero(row >= np.partition(peaks, stretches - count)[stretches - count])
        if len(ids) >= count:  # fewer: something is not a number
            return ids
    return np.arange(len(row))


def noise_key(seed: int, sample: int, position: int) -> int:
    """One 64-bit key for one choice."""
    key = seed & MASK
    for part in (sample, position):
        key = mix((key + GOLDEN * (part + 1)) & MASK)
    return key


def gumbel(key: int, ids: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise for each token id, a pure function of (key, id)."""
    z = np.uint64(key) + np.uint64(GOLDEN) * (ids.astype(np.uint64) + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    z ^= z >> np.uint64(31)
    uniform = ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    return (-np.log(-np.log(uniform))).astype(np.float32)


def logprobs(row: np.ndarray, token: int, best: int) -> TokenLogprobs:
    """Log probabilities of the model's own distribution, before temperature, penalties and filters. NaN if it has
    none."""
    peak = float(row.max())
    total = peak + float(np.log(np.exp(row.astype(np.float64) - peak).sum())) if isfinite(peak) else nan
    top: tuple[tuple[int, float], ...] = ()
    if best:
        ids = highest(row, min(best, len(row)))
        ids = ids[np.argsort(-row[ids], kind="stable")]
        values = row[ids].astype(np.float64)
        top = tuple(zip(ids.tolist(), np.maximum(values - total, LEAST).tolist(), strict=True))
    return TokenLogprobs(token, float(np.maximum(float(row[token]) - total, LEAST)), top)


def prompt_details(scores: dict[int, TokenLogprobs]) -> Details:
    """The details of a work that scores its prompt; an error if a score is not a number."""
    bad = any(isnan(score.logprob) for score in scores.values())
    return Details(prompt_logprobs=scores, error=NOT_FINITE if bad else None)
