from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The real default model, fetched on first use."""
    from twostroke.weights.catalog import DEFAULT, fetch

    return fetch(DEFAULT)
