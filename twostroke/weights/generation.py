"""How a model samples where a caller says nothing about it: its own generation config, the same on every face.

Small models repeat themselves. Where such a model has no repetition penalty of its own, it gets a light one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from twostroke.errors import InputError
from twostroke.model.arch import Arch
from twostroke.sampling import SamplingParams
from twostroke.weights.checkpoint import Checkpoint

SMALL = 1_000_000_000  # parameters
LIGHT_PENALTY = 1.1
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # in generation_config.json
GGUF_NAMES = {
    "general.sampling.temp": "temperature", "general.sampling.top_p": "top_p", "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p", "general.sampling.penalty_repeat": "repetition_penalty",
}  # fmt: skip
# Of the catalog's files, which carry none: from the generation configs and the cards of the original models
CATALOG: Mapping[str, Mapping[str, float]] = {
    "smollm2-135m": {"temperature": 0.2, "top_p": 0.9},
    "qwen2.5-coder-0.5b": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
    "qwen2.5-coder-1.5b": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
    "gemma3-270m": {"top_k": 64, "top_p": 0.95},
}


def sampling_defaults(checkpoint: Checkpoint, arch: Arch) -> dict[str, float]:
    """Values of `SamplingParams` by name. A generation config with a value that is out of range says nothing."""
    found = _written(checkpoint) or dict(CATALOG.get(checkpoint.path.stem, {}))
    try:
        SamplingParams(**found)
    except InputError:
        found = {}
    if arch.parameters < SMALL:
        found.setdefault("repetition_penalty", LIGHT_PENALTY)
    return found


def _written(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the checkpoint itself says."""
    if checkpoint.kind == "gguf":
        return {name: checkpoint.config[key] for key, name in GGUF_NAMES.items() if key in checkpoint.config}
    try:
        config = json.loads((checkpoint.path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict):
        return {}
    return {name: config[name] for name in NAMES if config.get(name) is not None}
