"""FLOPs and bytes of an answer and of a step, computed from the model's architecture.

An answer's costs are those of the answer alone: the weights count once for every step it took part in, although in a
batch all requests of a step share them. Of experts, those count that its own tokens are expected to choose.
"""

from __future__ import annotations

from twostroke.config import Resolved
from twostroke.metrics.steplog import Step
from twostroke.metrics.timeline import Timeline
from twostroke.model.arch import Arch, seen_pairs

NO_COSTS = dict.fromkeys(("prefill_flops", "prefill_bytes", "decode_flops", "decode_bytes"), 0.0)  # of a known answer


def answer_costs(arch: Arch, settings: Resolved, weight_bytes: int, timeline: Timeline) -> dict[str, float]:
    prompt, cached = timeline.prompt_tokens, timeline.cached_tokens
    read = prompt - cached if timeline.token_times else 0  # unknown if there was no output
    written = max(0, timeline.output_tokens - 1)  # prefill gives the first token
    layout = settings.layout
    chunk = weight_bytes * arch.read_share(-(-read // max(1, timeline.chunks)))  # read by a chunk of the mean size
    seen = sum(
        seen_pairs(prompt, written, group.window) * len(group.layers) * group.entry.bytes / group.entry.tokens
        for group in layout.groups
        if not group.draft
    )
    return {
        "prefill_flops": float(arch.linear_flops(read, 1) + arch.attention_flops(cached, read)) if read else 0.0,
        "prefill_bytes": float(timeline.chunks * chunk + prompt * layout.token_bytes) if read else 0.0,
        "decode_flops": float(arch.linear_flops(written, written) + arch.attention_flops(prompt, written)),
        "decode_bytes": float(written * weight_bytes * arch.read_share(1) + seen),
    }


def step_costs(arch: Arch, settings: Resolved, weight_bytes: int, step: Step) -> dict[str, float]:
    """A whole step reads the weights once, and K and V of each context once in every layer that attends to it."""
    attention = sum(arch.attention_flops(work.start, work.count) for work in step.works)
    seen = sum(settings.layout.read_bytes(work.start + work.count) for work in step.works)
    return {
        "flops": float(arch.linear_flops(step.tokens, step.sampled) + attention),
        "bytes": float(weight_bytes * arch.read_share(step.tokens) + seen),
    }
