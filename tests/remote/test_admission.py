"""Admission: by what a request may cost, before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.remote.engines import SETTINGS
from twostroke.config import make_config, resolve
from twostroke.errors import InputError
from twostroke.hardware import Hardware
from twostroke.remote.admission import Admission, BusyError
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.describe import load_arch


def test_admission_is_by_cost(llama_folder: Path) -> None:
    arch = load_arch(open_checkpoint(llama_folder))
    config = make_config(max_requests=4, kv_blocks=128, **SETTINGS)
    now = [0.0]
    admission = Admission(
        resolve(config, arch, Hardware("cpu", 2, 1 << 30), 1000), 4, lambda: now[0], lambda samples, key: None
    )
    assert admission.max_samples == 8 and admission.max_blocks == 256
    with pytest.raises(InputError, match="n: 9 samples"):
        admission.take(9, 9)
    with pytest.raises(InputError, match="KV blocks"):
        admission.take(2, 257)
    admission.take(2, 200)
    with pytest.raises(BusyError):
        admission.take(1, 57)
    admission.take(1, 56)
    with pytest.raises(BusyError):
        admission.check()
    for _ in range(2):
        now[0] += 10.0
        admission.release(100)
    with pytest.raises(BusyError) as busy:
        admission.take(1, 256)
    assert busy.value.retry_after == 6  # 56 blocks too many, at 100 in 10 s
