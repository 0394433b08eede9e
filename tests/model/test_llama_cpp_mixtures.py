"""Tiny mixtures of experts in GGUF files: the same probabilities as llama.cpp on the same file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import run_tokens
from tests.model import test_latent, test_parity
from tests.model.gpt_oss_files import random_peer, write_gpt_oss
from tests.model.llama_logprobs import llama_logprobs
from tests.model.test_compressed_gguf import write_v4
from tests.model.test_gguf_parity import write_gguf
from tests.model.test_latent_gguf import SAME_MSCALE, converted, deepseek_keys, write
from tests.model.test_sinks import ROPES
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.text.gguf_vocabulary import CONTROL, NORMAL
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model

NEW_TOKENS = 8
CLOSE = 2e-3  # nats: both compute with 32-bit floats
CLOSE_CODES = 0.2  # llama.cpp rounds what it multiplies with codes to 8 bits
Header = dict[str, Any]
Write = Callable[[Path, Header], None]  # the file, its vocabulary
MLA = {"num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def vocabulary() -> Header:
    """Tokens that are whole characters: llama.cpp says nothing of the probabilities of a part of one."""
    letters = [chr(code) for code in range(33, 127)]
    tokens = ["<s>", "</s>", "<pad>", *letters, "\u0120", "\u010a", *(f"tok{i}" for i in range(29))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([CONTROL] * 3 + [NORMAL] * (len(tokens) - 3), np.int32),
        "tokenizer.ggml.merges": ["t o", "to k"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def size(header: Header) -> int:
    return len(header["tokenizer.ggml.tokens"])


def grouped(family: str, arch: str, **more: Any) -> Write:
    def write_file(path: Path, header: Header) -> None:
        peer = test_parity.make_peer(family, path.parent / "folder", vocab_size=size(header), **more)
        write_gguf(path, arch, peer, {"vocab_size": size(header)}, header=header)

    return write_file


def deepseek(family: str, **more: Any) -> Write:
    def write_file(path: Path, header: Header) -> None:
        peer = test_latent.make_peer(family, path.parent / "folder", vocab_size=size(header), **MLA, **more)
        keys = deepseek_keys(peer.config, True) | {"vocab_size": size(header)}
        write(path, "deepseek2", converted(peer, True, {}), keys, header=header)

    return write_file


def gpt_oss(coded: bool) -> Write:
    """Without YaRN: llama.cpp rounds its ramp to whole pairs, which the model's own code does not."""

    def write_file(path: Path, header: Header) -> None:
        peer = random_peer(vocab_size=size(header), rope_parameters=ROPES["plain"])
        write_gpt_oss(path, peer, coded, {"vocab_size": size(header)}, header)

    return write_file


def deepseek_v4(path: Path, header: Header) -> None:
    """llama.cpp wants dimensions that 64 divides, and heads of another width than the indexer's."""
    sizes = {"head_dim": 128, "index_head_dim": 64, "qk_rope_head_dim": 16, "max_position_embeddings": 512}
    write_v4(path, header=header, vocab_size=size(header), **sizes)


FILES: dict[str, Write] = {
    "olmoe": grouped("olmoe", "olmoe", num_key_value_heads=6),
    "qwen3moe": grouped("qwen3_moe", "qwen3moe", mlp_only_layers=[]),
    "mixtral": grouped("mixtral", "llama"),
    # Without groups: llama.cpp takes a group for its two best experts, V2 for its best one.
    "deepseek v2": deepseek("v2 experts", topk_method="greedy", n_group=1, topk_group=1),
    # llama.cpp knows the Lite model, which has a direct q, by the number of its layers.
    "deepseek v2 lite": deepseek("v2 lite experts", topk_group=1, num_hidden_layers=27),
    "deepseek v3": deepseek("v3 experts"),
    "deepseek v3, yarn": deepseek("v3 experts", rope_parameters=SAME_MSCALE),
    "deepseek v4": deepseek_v4,
    "gpt-oss": gpt_oss(False),
    "gpt-oss in MXFP4": gpt_oss(True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_same_probabilities_as_llama_cpp(name: str, tmp_path: Path) -> None:
    path, header = tmp_path / "model.gguf", vocabulary()
    FILES[name](path, header)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, size(header), (n,), generator=generator).tolist() for n in (5, 40, 150)]
    theirs = llama_logprobs(path, prompts, NEW_TOKENS)
    model = load_model(open_checkpoint(path), ReferenceOps(), 256)
    close = CLOSE_CODES if "MXFP4" in name else CLOSE
    for prompt, answer in zip(prompts, theirs, strict=True):
        assert len(answer) == NEW_TOKENS
        tokens = [*prompt, *(token for token, _ in answer[:-1])]
        ours = run_tokens(model, tokens)[len(prompt) - 1 :].log_softmax(-1)
        worst = max(abs(float(row[t]) - p) for row, (_, top) in zip(ours, answer, strict=True) for t, p in top.items())
        assert worst < close
