"""What one answer cost, by phase, from the architecture alone: the FLOPs it needed and the bytes it would move alone.

Weights count once for each step the request took part in; in a batch, neighbours share that reading.
"""

from __future__ import annotations

from twostroke.config import Resolved
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
