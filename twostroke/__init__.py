"""twostroke: an LLM inference engine that knows its two strokes, prefill and decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twostroke.errors import ConfigError, InputError, ModelError, TwostrokeError
from twostroke.sampling import Grammar, SamplingParams

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "ConfigError", "Grammar", "InputError", "ModelError", "SamplingParams", "TwostrokeError"]


def __getattr__(name: str) -> Any:
    """`LLM` brings the whole engine with it: imported at its first use, so planning tools start without it."""
    if name == "LLM":
        from twostroke.startup import collector_paused

        with collector_paused():
            from twostroke.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'twostroke' has no attribute {name!r}")
