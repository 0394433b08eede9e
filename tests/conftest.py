from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available() and "TRITON_COMPILE_ONLY" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, whichever tests are collected first

from tests import interpreter, tiny

# The same examples on every machine and in every run, however slow it is; a test may still ask for more of them.
settings.register_profile(
    "steady", derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("steady")


# Files that take long. In front, so that no process waits for one at the end.
LONG = (
    "tests/ops/test_native_address.py",
    "tests/ops/test_native_threads.py",
    "tests/ops/test_native_emulated.py",
    "tests/test_house.py",
    "tests/model/test_default_model.py",
    "tests/weights/test_divergence.py",
    "tests/cost/answers/",
    "tests/engine/test_exactness.py",
    "tests/ops/test_gpu_",
    "tests/weights/test_catalog.py",
)


def pytest_configure(config: pytest.Config) -> None:
    # Tests start hundreds of processes. Each would compile this package, and each run of the tests all tests.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Processes of xdist get the files in the order of this process, and an environment in which threads of torch that
    # have nothing to do sleep: another process can use their core.
    if getattr(config.option, "numprocesses", None):
        config.option.loadscopereorder = False
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules of tests and of libraries are a million objects that stay: no collection of garbage looks at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish() -> None:
    interpreter.prepare()


def quiet_pair(factory: pytest.TempPathFactory, plain: Path, **shape: int) -> tuple[Path, Path]:
    """A target whose last layer adds little, and a draft model that often agrees with it."""
    target = tiny.quiet_end(factory.mktemp("target"), plain)
    return target, tiny.tiny_draft(factory.mktemp("draft"), target, **shape)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="session")
def llama_pair(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path) -> tuple[Path, Path]:
    """A target and a draft model that often agrees with it."""
    return quiet_pair(tmp_path_factory, llama_folder)


@pytest.fixture(scope="session")
def gemma_pair(tmp_path_factory: pytest.TempPathFactory, gemma_folder: Path) -> tuple[Path, Path]:
    """The same with windows, in the draft model too."""
    return quiet_pair(tmp_path_factory, gemma_folder, layers=2)


@pytest.fixture(scope="session")
def deepseek_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same with latent attention, in the draft model too."""
    return quiet_pair(tmp_path_factory, tiny.tiny_deepseek(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="session")
def compressed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compressed attention: windows, entries for several tokens, states."""
    return tiny.tiny_deepseek_v4(tmp_path_factory.mktemp("compressed"))


@pytest.fixture(scope="session")
def mixture_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same with experts, in the draft model too."""
    return quiet_pair(tmp_path_factory, tiny.tiny_mixture(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="session")
def gpt_oss_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same with sinks and experts, in the draft model too."""
    return quiet_pair(tmp_path_factory, tiny.tiny_gpt_oss(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The real default model, fetched on first use."""
    from twostroke.weights.catalog import DEFAULT, fetch

    return fetch(DEFAULT)
