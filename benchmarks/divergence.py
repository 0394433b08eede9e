"""How much narrow weights change next-token distributions: mean KL divergence from float32 on stories15M.

twostroke's int8 and int4 are made from the float weights when the model is loaded; beside them, the `gguf` package's
Q8_0 and Q4_0 of the same weights. The same kernels run all of them, with 8-bit activations. Like twostroke's, the
package's 4-bit model keeps its embedding and head in 8 bits; "pure" has those in 4 bits too. With 32 stories the
difference between int8 and Q8_0 has a standard error of 1.5 % of either, so "worse" means by more than two of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from benchmarks.stories import write_stories
from twostroke import LLM, SamplingParams

Q8, Q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0
NO_WORSE_THAN = {"int8": "gguf Q8_0", "int4": "gguf Q4_0"}
TWO_ERRORS = 1.03


def divergences(
    data: bytes, stories: int = 32, length: int = 200, names: Collection[str] | None = None
) -> dict[str, float]:
    """Mean KL in nats for each variant, over stories that the float model wrote. names: of variants; None: all."""
    with tempfile.TemporaryDirectory() as folder:
        exact = write_stories(data, Path(folder) / "float.gguf")
        variants: dict[str, tuple[Any, dict[str, Any]]] = {  # (how the file stores tensors, settings)
            "int8": (None, {"quantize": "int8"}),
            "gguf Q8_0": (all_in(Q8), {}),
            "int4": (None, {"quantize": "int4"}),
            "gguf Q4_0": (layers_in_four, {}),
            "gguf Q4_0 pure": (all_in(Q4), {}),
        }
        reference = LLM(exact, dtype="float32", prefix_cache=False)
        texts = write(reference, stories, length)
        wanted = [distributions(reference, text) for text in texts]
        found = {}
        for name in variants if names is None else names:
            stored, settings = variants[name]
            path = exact if stored is None else write_stories(data, Path(folder) / f"{name}.gguf", stored)
            llm = LLM(path, prefix_cache=False, kv_dtype="float32", **settings)
            sums = [divergence(p, distributions(llm, text)) for p, text in zip(wanted, texts, strict=True)]
            found[name] = float(torch.cat(sums).mean())
        return found


def all_in(kind: gguf.GGMLQuantizationType) -> Any:
    return lambda name, values: (gguf.quantize(np.ascontiguousarray(values), kind), kind)


def layers_in_four(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    kind = Q8 if name == "token_embd" else Q4
    return gguf.quantize(np.ascontiguousarray(values), kind), kind


def write(llm: LLM, stories: int, length: int) -> list[list[int]]:
    params = [SamplingParams(max_tokens=length, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(stories)]
    outputs = llm.generate(["Once upon a time"] * stories, params)
    return [[*out.prompt_token_ids, *out.token_ids] for out in outputs]


def distributions(llm: LLM, tokens: list[int]) -> Tensor:
    """(tokens - 1, vocabulary) log-probabilities of what follows each token: the logits that scoring a prompt makes."""
    model = llm.engine.core.runner.model
    rows: list[np.ndarray] = []
    plain = model.logits
    model.logits = lambda hidden: rows.append(plain(hidden)) or rows[-1]
    try:
        out = llm.generate([tokens], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))[0]
    finally:
        model.logits = plain
    logits = torch.from_numpy(np.concatenate(rows))
    found = logits.log_softmax(-1)[:-1]  # the last row is the sampled token's
    assert out.prompt_logprobs is not None
    for position in range(1, len(tokens)):  # the rows are those of these tokens
        score = out.prompt_logprobs[position]
        assert score is not None
        assert abs(score.logprob - float(found[position - 1, tokens[position]])) < 1e-3
    return found


def divergence(wanted: Tensor, found: Tensor) -> Tensor:
    return (wanted.exp() * (wanted - found)).sum(-1)
