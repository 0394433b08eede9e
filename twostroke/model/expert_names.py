"""Names and layouts of experts in checkpoints. Torch-free.

    ours                 transformers, one tensor for each expert    transformers, stacked      GGUF
    router               mlp.gate                                    the same                   ffn_gate_inp
    correction           mlp.gate.e_score_correction_bias            the same                   exp_probs_b
    experts.3.gate       mlp.experts.3.gate_proj                     mlp.experts.gate_up_proj   ffn_gate_exps
    experts.3.down       mlp.experts.3.down_proj                     mlp.experts.down_proj      ffn_down_exps
    shared_gate          mlp.shared_experts.gate_proj                the same                   ffn_gate_shexp

Mixtral writes block_sparse_moe for mlp, and w1, w3, w2 for gate, up, down. gpt-oss stacks its experts as (inputs,
outputs) with the rows of gate and up alternating, in floats or as MXFP4 codes and scales; its router is mlp.router.
"""

from __future__ import annotations

from collections.abc import Collection

from twostroke.errors import ModelError
from twostroke.model.arch import ExpertsArch
from twostroke.model.source import Source

PARTS = ("gate", "up", "down")
_GGUF = {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "mlp.router")
MXFP4_GROUP = 32


def expert_sources(
    hidden: int, feed: ExpertsArch, gguf: bool, stem: str, present: Collection[str]
) -> dict[str, Source]:
    """Every parameter of a layer's experts. stem: what the layer's tensor names begin with."""
    count = feed.routing.experts
    router = f"{stem}ffn_gate_inp" if gguf else _first(present, [f"{stem}{name}" for name in _ROUTERS])
    sources = {"router": Source(f"{router}.weight", (count, hidden))}
    if feed.router_bias:
        sources["router_bias"] = Source(f"{router}.bias", (count,))
    if feed.corrected:
        name = f"{stem}exp_probs_b.bias" if gguf else f"{router}.e_score_correction_bias"
        sources["correction"] = Source(name, (count,))
    if feed.shared:
        for part, shape in _shapes(hidden, feed.shared).items():
            name = f"{_GGUF[part]}_shexp" if gguf else f"mlp.shared_experts.{part}_proj"
            sources[f"shared_{part}"] = Source(f"{stem}{name}.weight", shape)
    if gguf:
        return sources | _gguf_stacks(hidden, feed, stem, present)
    if feed.expert_bias:
        return sources | _alternating(hidden, feed, f"{stem}mlp.experts.", present)
    block = f"{stem}{'block_sparse_moe' if 'block_sparse_moe' in router else 'mlp'}.experts."
    stacked = next((f"{stem}{at}.experts." for at in ("mlp", "block_sparse_moe")
                    if f"{stem}{at}.experts.gate_up_proj" in present), None)  # fmt: skip
    if stacked is not None:
        return sources | _stacked(hidden, feed, stacked)
    spelling = _MIXTRAL if "block_sparse_moe" in block else {part: f"{part}_proj" for part in PARTS}
    for expert in range(count):
        for part, shape in _shapes(hidden, feed.width).items():
            sources[f"experts.{expert}.{part}"] = Source(f"{block}{expert}.{spelling[part]}.weight", shape)
    return sources


def _first(present: Collection[str], routers: list[str]) -> str:
    return next((name for name in routers if f"{name}.weight" in present), routers[0])


def _shapes(hidden: int, width: int) -> dict[str, tuple[int, int]]:
    return {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}


def _gguf_stacks(hidden: int, feed: ExpertsArch, stem: str, present: Collection[str]) -> dict[str, Source]:
    """gate and up may be one tensor: the rows of gate, then those of up."""
    count, width, sources = feed.routing.experts, feed.width, {}
    fused = f"{stem}ffn_gate_up_exps" if f"{stem}ffn_gate_up_exps.weight" in present else None
    for part, (outputs, inputs) in _shapes(hidden, width).items():
        tensor, rows = f"{stem}{_GGUF[part]}_exps", None
        if fused is not None and part != "down":
            tensor, outputs = fused, 2 * width
            rows = (0, width) if part == "gate" else (width, 2 * width)
        for expert in range(count):
            sources[f"experts.{expert}.{part}"] = Source(
                f"{tensor}.weight", (count, outputs, inputs), rows, entry=expert
            )
            if feed.expert_bias:
                sources[f"experts.{expert}.{part}_bias"] = Source(
                    f"{tensor}.bias", (count, outputs), rows, entry=expert
                )
    return sources


def _stacked(hidden: int, feed: ExpertsArch, block: str) -> dict[str, Source]:
    count, width, sources = feed.routing.experts, feed.width, {}
    for expert in range(count):
        for part, rows in (("gate", (0, width)), ("up", (width, 2 * width))):
            sources[f"experts.{expert}.{part}"] = Source(
                f"{block}gate_up_proj", (count, 2 * width, hidden), rows, entry=expert
            )
        sources[f"experts.{expert}.down"] = Source(f"{block}down_proj", (count, hidden, width), entry=expert)
    return sources


def _alternating(hidden: int, feed: ExpertsArch, block: str, present: Collection[str]) -> dict[str, Source]:
    """gpt-oss: row 2i of gate_up is row i of gate, row 2i + 1 is row i of up."""
    count, width, sources = feed.routing.experts, feed.width, {}
    for part in PARTS:
        name, outputs, inputs = (
            (f"{block}down_proj", hidden, width) if part == "down" else (f"{block}gate_up_proj", 2 * width, hidden)
        )
        rows = None if part == "down" else (0 if part == "gate" else 1, outputs)
        step = 1 if part == "down" else 2
        coded = f"{name}_blocks" in present
        if coded and inputs % MXFP4_GROUP:
            raise ModelError(
                f"{name}_blocks: MXFP4 has groups of {MXFP4_GROUP}, which do not divide {inputs} inputs. Weights and "
                "description do not fit: fetch both again."
            )
        for expert in range(count):
            if coded:
                shape: tuple[int, ...] = (count, outputs, inputs // MXFP4_GROUP, MXFP4_GROUP // 2)
                source = Source(f"{name}_blocks", shape, rows, entry=expert, step=step, scales=f"{name}_scales")
            else:
                source = Source(name, (count, inputs, outputs), rows, entry=expert, step=step, transposed=True)
            sources[f"experts.{expert}.{part}"] = source
            sources[f"experts.{expert}.{part}_bias"] = Source(
                f"{name}_bias", (count, outputs), rows, entry=expert, step=step
            )
    return sources
