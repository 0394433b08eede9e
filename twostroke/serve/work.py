"""What answers and steps cost, from the architecture alone: FLOPs needed, bytes moved.

Of an answer as if it ran alone: weights count once for each step it took part in; in a batch, neighbours share that.
"""

from __future__ import annotations

from twostroke.config import Resolved
from twostroke.metrics.steplog import Step
from twostroke.metrics.timeline import Timeline
from twostroke.model.arch import Arch, seen_pairs


def work(arch: Arch, settings: Resolved, weight_bytes: int, timeline: Timeline) -> dict[str, float]:
    prompt, cached = timeline.prompt_tokens, timeline.cached_tokens
    read = prompt - cached if timeline.token_times else 0  # the cost of one that never wrote is not known
    written = max(0, timeline.output_tokens - 1)  # the first token is prefill's
    layout = settings.layout
    seen = sum(
        seen_pairs(prompt, written, group.window) * len(group.layers) * group.entry.bytes / group.entry.tokens
        for group in layout.groups
    )
    return {
        "prefill_flops": float(arch.linear_flops(read, 1) + arch.attention_flops(cached, read)) if read else 0.0,
        "prefill_bytes": float(timeline.chunks * weight_bytes + prompt * layout.token_bytes) if read else 0.0,
        "decode_flops": float(arch.linear_flops(written, written) + arch.attention_flops(prompt, written)),
        "decode_bytes": float(written * weight_bytes + seen),
    }


def step_work(arch: Arch, settings: Resolved, weight_bytes: int, step: Step) -> dict[str, float]:
    """A whole step: the weights once, K and V of each context once in every layer that sees it."""
    attention = sum(arch.attention_flops(piece.start, piece.count) for piece in step.pieces)
    seen = sum(settings.layout.read_bytes(piece.start + piece.count) for piece in step.pieces)
    return {
        "flops": float(arch.linear_flops(step.tokens, step.sampled) + attention),
        "bytes": float(weight_bytes + seen),
    }
