"""The catalog's real files: known tokens, and llama.cpp's answers for awkward text."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.text.llama_oracle import llama_tokens
from tests.text.samples import TEXTS, mixtures
from twostroke.text.tokenizer import Tokenizer, from_gguf
from twostroke.weights.catalog import fetch
from twostroke.weights.gguf import open_gguf


@pytest.fixture(scope="module")
def smollm(default_model: Path) -> Tokenizer:
    return from_gguf(open_gguf(default_model).metadata)


def test_known_tokens_of_the_default_model(smollm: Tokenizer) -> None:
    assert smollm.encode("Once upon a time") == [6403, 1980, 253, 655]  # and no begin token: its flag is false
    assert len(smollm.encode("12345")) == 5
    assert smollm.vocab_size == 49152
    assert smollm.eos_ids == {0, 2}
    assert smollm.bos_id == 1
    assert smollm.token_text(2) == "<|im_end|>"


def test_chat_of_the_default_model(smollm: Tokenizer) -> None:
    assert smollm.chat is not None
    prompt = smollm.chat.render([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm.encode(prompt, add_special=False)
    assert ids[0] == 1
    assert ids.count(2) == 2
    assert smollm.decode(ids, skip_special=False) == prompt


def test_default_model_as_llama_cpp(default_model: Path, smollm: Tokenizer) -> None:
    texts = [*TEXTS, *mixtures(150)]
    assert [smollm.encode(text, parse_special=False) for text in texts] == llama_tokens(default_model, texts)
    assert all(smollm.decode(smollm.encode(text, parse_special=False)) == text for text in texts)
    special = ["<|im_start|>user\nHi<|im_end|>\n", "x<|endoftext|>y"]
    assert [smollm.encode(text) for text in special] == llama_tokens(default_model, special, special=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "ends", "once"),
    [
        ("qwen2.5-coder-0.5b", 151936, {151643, 151645}, [12522, 5193, 264, 882]),
        ("gemma3-270m", 262144, {1, 106}, [2, 14946, 3324, 496, 990]),
    ],
)
def test_catalog_models_as_llama_cpp(name: str, size: int, ends: set[int], once: list[int]) -> None:
    file = fetch(name)
    began = time.process_time()
    tokenizer = from_gguf(open_gguf(file).metadata)
    assert time.process_time() - began < 8
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (size, ends)
    assert tokenizer.encode("Once upon a time") == once
    texts = [text for text in (*TEXTS, *mixtures(400)) if "\u0301" not in text]  # which Qwen composes, llama.cpp not
    assert [tokenizer.encode(text, parse_special=False) for text in texts] == llama_tokens(file, texts)
