"""A tiny tokenizer, a compiler of its grammars and a tiny model, each made once for a file of tests."""

from __future__ import annotations

import pytest

from tests import tiny
from twostroke import LLM
from twostroke.grammar.compile import GrammarCompiler
from twostroke.text.tokenizer import from_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    tiny.save_tokenizer(folder)
    return from_folder(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer, tiny.VOCAB + 5)  # logits are wider than the vocabulary
    yield made
    made.checker.close()


@pytest.fixture(scope="module")
def llm(llama_folder):
    return LLM(llama_folder, dtype="float32", max_requests=16)
