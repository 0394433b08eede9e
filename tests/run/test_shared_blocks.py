"""Blocks of floats lie alike in the caches of a GPU and of a CPU: one can go on where the other has begun.

Under Triton's interpreter, or on the card."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
pytest.importorskip("triton")

from tests import tiny  # noqa: E402
from twostroke.config import make_config, resolve  # noqa: E402
from twostroke.engine.core import Core  # noqa: E402
from twostroke.hardware import this_machine  # noqa: E402
from twostroke.kv.storage import KVStorage  # noqa: E402
from twostroke.ops.cuda.backend import CudaOps  # noqa: E402
from twostroke.ops.select import make_ops  # noqa: E402
from twostroke.run.cuda.runner import CudaRunner  # noqa: E402
from twostroke.run.runner import ModelRunner  # noqa: E402
from twostroke.run.torch_runner import TorchRunner  # noqa: E402
from twostroke.sampling import SamplingParams  # noqa: E402
from twostroke.schedule.make import make_scheduler  # noqa: E402
from twostroke.types import Request  # noqa: E402
from twostroke.weights.checkpoint import open_checkpoint  # noqa: E402
from twostroke.weights.load import load_arch, load_model  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_CARD else []
PROMPT = tuple((7 * i) % 290 + 3 for i in range(50))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pool_after_a_prompt(folder: Path, device: str, kv_dtype: str) -> list[bytes]:
    """All blocks, of an engine that has done nothing else."""
    checkpoint = open_checkpoint(folder)
    arch = load_arch(checkpoint)
    config = make_config(max_model_len=160, dtype="float32", max_batch_tokens=64, kv_blocks=20, kv_dtype=kv_dtype)
    settings = resolve(config, arch, this_machine("cpu"), 0)
    on_card = CudaOps(torch.float32, "cuda" if ON_CARD else "cpu") if device == "cuda" else None
    ops = on_card or make_ops("cpu", "float32", 1)
    kv = KVStorage(settings.layout, settings.kv_blocks, settings.kv_dtype, ops.device)
    scheduler = make_scheduler(arch, settings, "tiny", bytes(32))
    kind = CudaRunner if on_card else ModelRunner if ops.device is None else TorchRunner
    core = Core(scheduler, kind(load_model(checkpoint, ops, settings.max_model_len), kv, scheduler.tables.array, ops))
    core.submit(Request(0, PROMPT, SamplingParams(max_tokens=1, temperature=0.0), 7, limit=len(PROMPT) + 1))
    while not core.idle:
        core.step()
    return [kv.export(block) for block in range(settings.kv_blocks)]


def numbers(content: bytes, kv_dtype: str) -> np.ndarray:
    return torch.frombuffer(bytearray(content), dtype=DTYPES[kv_dtype]).float().numpy()


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma", "deepseek"])
def test_blocks_are_the_same_but_for_rounding(
    family: str, kv_dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = getattr(tiny, f"tiny_{family}")(tmp_path_factory.mktemp(family))
    pools = [pool_after_a_prompt(folder, device, kv_dtype) for device in ("cpu", "cuda")]
    used = [(here, there) for here, there in zip(*pools, strict=True) if any(here)]
    assert len(used) >= len(PROMPT) // 16
    for here, there in used:
        ours, theirs = numbers(here, kv_dtype), numbers(there, kv_dtype)
        written = ours != 0  # the rest of a block is never read, and on a card it may hold anything
        np.testing.assert_allclose(theirs[written], ours[written], atol=1e-4 if kv_dtype == "float32" else 0.06)
