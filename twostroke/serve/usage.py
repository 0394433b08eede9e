"""Parts of an answer that several APIs share: token counts, timings and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from twostroke.metrics.timeline import Timeline
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import TokenLogprobs

NEVER = -9999.0  # in place of minus infinity, which JSON does not have


def openai_usage(prompt: int, cached: int, written: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings(timeline: Timeline, costs: dict[str, float]) -> dict[str, Any]:
    """Where the time of one answer went: queue_s + prefill_s + decode_s = e2e_s; transfer_s and decode_queue_s are
    parts of decode_s. costs: FLOPs and bytes by phase."""
    return {
        "queue_s": timeline.queue,
        "prefill_s": timeline.prefill,
        "decode_s": timeline.decode,
        "transfer_s": timeline.transfer,
        "decode_queue_s": timeline.decode_queue,
        "ttft_s": timeline.ttft,
        "tpot_s": timeline.tpot,
        "e2e_s": timeline.e2e,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "preemptions": timeline.preemptions,
        "drafted_tokens": timeline.drafted_tokens,
        "accepted_tokens": timeline.accepted_tokens,
        "tokens_per_step": timeline.tokens_per_step,
        **costs,
    }


def server_timing(timeline: Timeline) -> str:
    """The phases as a Server-Timing header, in milliseconds: browsers draw it."""
    phases = (("queue", timeline.queue), ("prefill", timeline.prefill), ("decode", timeline.decode))
    return ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in (*phases, ("total", timeline.e2e)))


def chat_logprobs(tokenizer: Tokenizer, scores: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    documents = []
    for one in scores:
        best = [token_score(tokenizer, token, logprob) for token, logprob in one.top]
        documents.append({**token_score(tokenizer, one.token_id, one.logprob), "top_logprobs": best})
    return documents


def token_score(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


def text_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], scores: Sequence[TokenLogprobs | None], offset: int
) -> dict[str, Any]:
    """The older form, of /v1/completions. The first token of a prompt has no score."""
    texts = [tokenizer.token_text(token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    best = [
        None if one is None else {tokenizer.token_text(token): finite(logprob) for token, logprob in one.top}
        for one in scores
    ]
    own = [None if one is None else finite(one.logprob) for one in scores]
    return {"tokens": texts, "token_logprobs": own, "top_logprobs": best, "text_offset": offsets}


def finite(value: float) -> float:
    return value if isfinite(value) else NEVER
