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


def test_one_key_has_a_share_and_the_wait_is_that_of_what_is_missing(llama_folder: Path) -> None:
    arch = load_arch(open_checkpoint(llama_folder))
    config = make_config(max_requests=4, kv_blocks=1280, **SETTINGS)
    now = [0.0]
    settings = resolve(config, arch, Hardware("cpu", 2, 1 << 30), 1000)
    admission = Admission(settings, 12, lambda: now[0], lambda samples, key: 7.3 * samples)
    with pytest.raises(InputError, match="the 12 that one key"):
        admission.take(13, 13, key=1)
    admission.take(12, 12, key=1)
    with pytest.raises(BusyError, match="its share of the server") as busy:
        admission.check(1)
    assert busy.value.retry_after == 8, "no sample has ended: the first answer that can end tells"
    admission.take(3, 3, key=2)
    with pytest.raises(BusyError, match="its share of the server"):
        admission.check(2)
    admission.take(1, 1, key=3)
    with pytest.raises(BusyError, match="at capacity"):
        admission.check(4)
    for _ in range(4):
        now[0] += 5.0
        admission.release(1, key=1)
    admission.take(3, 3, key=3)
    admission.take(1, 1, key=4)  # full again
    with pytest.raises(BusyError) as busy:
        admission.take(2, 2, key=5)
    assert busy.value.retry_after == 10, "two samples too many, at one in 5 s"
    now[0] += 1000.0  # what happened long ago is no rate
    with pytest.raises(BusyError) as busy:
        admission.check(5)
    assert busy.value.retry_after == 8
    for key, count in ((1, 8), (2, 3), (3, 4), (4, 1)):
        for _ in range(count):
            admission.release(1, key)
    assert admission.samples == admission.blocks == 0 and not admission.held
