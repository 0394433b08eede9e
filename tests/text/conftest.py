from __future__ import annotations

from pathlib import Path

import pytest

from tests.text import vocabularies
from twostroke.text.tokenizer import Tokenizer, from_folder, from_gguf


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vocabularies.train_byte_level(tmp_path_factory.mktemp("bpe"), "smollm")


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return from_folder(byte_level_folder)


@pytest.fixture(scope="session")
def spaced() -> Tokenizer:
    """SentencePiece with the leading space, as Llama 2 has it."""
    return from_gguf(vocabularies.sentencepiece_header(vocabularies.train_sentencepiece()))


@pytest.fixture(scope="session")
def unspaced() -> Tokenizer:
    """SentencePiece without it, as Gemma has it."""
    model = vocabularies.train_sentencepiece(space=False)
    return from_gguf(vocabularies.sentencepiece_header(model, space=False))


@pytest.fixture(params=["byte_level", "spaced", "unspaced"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found
