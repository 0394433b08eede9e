"""What answers and steps cost, from the architecture alone: FLOPs needed, bytes moved.

Of an answer as if it ran alone: weights count once for each step it took part in; in a batch, neighbours share that.
"""

from __future__ import annotations

from collections import Counter

from twostroke.config import Resolved
from twostroke.metrics.steplog import Step
from twostroke.metrics.timeline import Timeline
from twostroke.model.arch import Arch, seen_pairs


def work(arch: Arch, settings: Resolved, weight_bytes: int, timeline: Timeline) -> dict[str, float]:
    prompt, cached = timeline.prompt_tokens, timeline.cached_tokens
    read = prompt - cached if timeline.token_times else 0  # of one that never wrote, nothing certain is known
    written = max(0, timeline.output_tokens - 1)  # the first token is prefill's
    entry = settings.layout.entry_bytes
    seen = sum(seen_pairs(prompt, written, layer.window) for layer in arch.layers)
    return {
        "prefill_flops": float(arch.linear_flops(read, 1) + arch.attention_flops(cached, read)) if read else 0.0,
        "prefill_bytes": float(timeline.chunks * weight_bytes + prompt * len(arch.layers) * entry) if read else 0.0,
        "decode_flops": float(arch.linear_flops(written, written) + arch.attention_flops(prompt, written)),
        "decode_bytes": float(written * weight_bytes + seen * entry),
    }


def step_work(arch: Arch, settings: Resolved, weight_bytes: int, step: Step) -> dict[str, float]:
    """A whole step: the weights once, K and V of each context once in every layer that sees it."""
    pairs = seen = 0
    for window, layers in Counter(layer.window for layer in arch.layers).items():
        pairs += layers * sum(seen_pairs(piece.start, piece.count, window) for piece in step.pieces)
        deep = (piece.start + piece.count for piece in step.pieces)
        seen += layers * sum(deep if window is None else (min(context, window) for context in deep))
    return {
        "flops": float(arch.linear_flops(step.tokens, step.sampled) + 4 * pairs * arch.heads * arch.head_dim),
        "bytes": float(weight_bytes + seen * settings.layout.entry_bytes),
    }
