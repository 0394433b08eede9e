"""One prompt or several, with one set of sampling parameters for all or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from twostroke.engine.intake import Prompt
from twostroke.errors import InputError
from twostroke.sampling import SamplingParams


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string, or a flat list of token ids) or several."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InputError(f"prompts must be a string or a list, got {type(prompts).__name__}.")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count or not all(isinstance(one, SamplingParams) for one in params):
        raise InputError(f"params must be one SamplingParams or a list of {count}, one for each prompt.")
    return list(params)
