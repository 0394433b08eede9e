"""A mixture that speaks: the default model's feed-forward networks, cut into experts.

A gated network is a sum over its neurons, so it is a sum over parts of its neurons. With a router of zeros every expert
has the same score; where all are chosen and their weights are 1, the mixture is the dense model but for the order of
sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.model.test_default_model import PROMPTS
from twostroke import LLM, SamplingParams
from twostroke.ops.formats import FORMATS
from twostroke.weights.gguf import open_gguf

EXPERTS = 6
TYPES = {name: gguf.GGMLQuantizationType[name] for name in FORMATS}


def write_split(source: Path, target: Path, chosen: int) -> Path:
    """The same file with `EXPERTS` experts in every layer, of which a token uses `chosen`."""
    file, reader = open_gguf(source), gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(target), "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    writer.add_uint32("llama.expert_count", EXPERTS)
    writer.add_uint32("llama.expert_used_count", chosen)
    writer.add_float32("llama.expert_weights_scale", float(chosen))
    hidden, width = reader.fields["llama.embedding_length"].contents(), 0
    for name, stored in file.tensors.items():
        rows = stored.by_row() if len(stored.shape) > 1 else stored.data.view(np.float32)
        part = name.rsplit(".", 2)[-2]
        if part in ("ffn_gate", "ffn_up"):  # rows are neurons
            name, rows, width = (
                name.replace(part, f"{part}_exps"),
                rows.reshape(EXPERTS, -1, rows.shape[1]),
                rows.shape[0],
            )
        elif part == "ffn_down":  # columns are
            columns = rows.reshape(rows.shape[0], EXPERTS, -1).swapaxes(0, 1)
            name, rows = name.replace(part, f"{part}_exps"), np.ascontiguousarray(columns)
            router = np.zeros((EXPERTS, hidden), np.float32)
            writer.add_tensor(name.replace("ffn_down_exps", "ffn_gate_inp"), router)
        writer.add_tensor(name, rows, raw_dtype=TYPES[stored.format])
    writer.add_uint32("llama.expert_feed_forward_length", width // EXPERTS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def answers(path: Path, prompts: list[str], tokens: int, **settings: Any) -> list[list[int]]:
    llm = LLM(path, max_model_len=256, speculate="off", **settings)
    asked = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return [output.samples[0].token_ids for output in llm.generate(prompts, asked)]


def check_equal(default_model: Path, folder: Path, prompts: list[str], tokens: int, **settings: Any) -> None:
    split = write_split(default_model, folder / "split.gguf", EXPERTS)
    assert answers(split, prompts, tokens, **settings) == answers(default_model, prompts, tokens, **settings)


FLOATS = {"dtype": "float32", "kv_dtype": "float32"}


@pytest.mark.slow
def test_all_experts_are_the_dense_model(default_model: Path, tmp_path: Path) -> None:
    """In float32: with activations of 8 bits another order of sums moves a few codes, and near ties fall otherwise."""
    check_equal(default_model, tmp_path, PROMPTS, 32, **FLOATS)


def scores(path: Path) -> np.ndarray:
    """Log probabilities of the prompts, read as one text."""
    llm = LLM(path, max_model_len=256)
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    read = llm.generate([" ".join(PROMPTS)], asked)[0].prompt_logprobs
    assert read is not None
    return np.array([score.logprob for score in read if score is not None])


@pytest.mark.slow
def test_all_experts_score_as_the_dense_model(default_model: Path, tmp_path: Path) -> None:
    """With codes: no further apart than the dense model in codes and in float32, 0.06 a token and 0.01 in the mean."""
    split = write_split(default_model, tmp_path / "split.gguf", EXPERTS)
    apart = scores(split) - scores(default_model)
    assert np.abs(apart).mean() < 0.1
    assert abs(apart.mean()) < 0.02


@pytest.mark.slow
def test_some_experts_stream_and_stay_exact(default_model: Path, tmp_path: Path) -> None:
    """Two of six: no longer the dense model, but the same tokens in every batch and in a stream."""
    split = write_split(default_model, tmp_path / "split.gguf", 2)
    llm = LLM(split, max_model_len=256, max_batch_tokens=17, seed=1)
    asked = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    together = [output.samples[0].token_ids for output in llm.generate(PROMPTS[:3], asked)]
    assert together == [answers(split, [prompt], 12, threads=1)[0] for prompt in PROMPTS[:3]]
    events = list(llm.stream(PROMPTS[0], asked))
    assert len(events) >= 2
    assert [token for event in events for token in event.token_ids] == together[0]
