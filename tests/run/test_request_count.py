"""How many requests run at once follows from steps that were measured, and from the memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from benchmarks.random_weights import LLAMA_1B, LLAMA_8B, qwen3_30b_shape, v2_lite_shape
from twostroke.config import Config
from twostroke.cost.model.devices import DEVICES
from twostroke.cost.simulation.deployment import Deployment
from twostroke.kv.layout import make_layout
from twostroke.ops.interface import BLOCK
from twostroke.record import replace
from twostroke.run.cuda.request_count import CONTEXT, RowTimes, request_count

LARGE = RowTimes(4.0e-3, 5.0e-3, 9.5e-3)  # about Llama-3.1-8B's on an H200
LAYOUT = make_layout(LLAMA_8B, "bfloat16")
PLENTY = 1 << 20


def test_steps_grow_with_their_rows() -> None:
    times = [LARGE.of(rows) for rows in (1, 64, 128, 256, 512, 1024)]
    assert times == sorted(times)
    assert LARGE.of(128) == pytest.approx(5.0e-3) and LARGE.of(512) == pytest.approx(9.5e-3)
    assert RowTimes(4e-3, 4e-3, 3.9e-3).of(1024) == 4e-3  # noise: more rows are never faster


def test_a_step_takes_half_of_the_gap() -> None:
    count = request_count(LARGE, 15_000_000_000, LAYOUT, PLENTY, 0.05)
    assert 256 <= count <= 512
    assert request_count(LARGE, 15_000_000_000, LAYOUT, PLENTY, 0.2) == 1024
    assert request_count(LARGE, 15_000_000_000, LAYOUT, PLENTY, 0.001) == 64


def test_a_small_model_serves_the_most() -> None:
    times = RowTimes(0.8e-3, 1.0e-3, 1.9e-3)
    assert request_count(times, 2_500_000_000, make_layout(LLAMA_1B, "bfloat16"), PLENTY, 0.05) == 1024


def test_the_cache_holds_them() -> None:
    blocks = 100 * CONTEXT // BLOCK
    assert request_count(LARGE, 15_000_000_000, LAYOUT, blocks, 0.2) == 96


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("given", [{}, {"max_requests": 100}, {"exact": True}])
def test_a_plan_has_as_many_as_a_server_on_one_gpu_would_have(gpus: int, given: dict) -> None:
    deployment = Deployment(LLAMA_8B, DEVICES["h200"], Config(**given), gpus=gpus)
    found = deployment.settings
    if given or gpus > 1:
        assert found.max_requests == given.get("max_requests", 256)
        return
    assert 256 < found.max_requests < 512 and "max_gap" in found.reasons["max_requests"]
    quicker = replace(deployment, config=Config(max_gap=0.2)).settings
    assert (found.max_requests, quicker.max_requests) == (320, 768)


def test_latents_keep_the_usual_number_in_a_plan() -> None:
    assert Deployment(v2_lite_shape(), DEVICES["h200"]).settings.max_requests == 256


def test_a_plan_knows_of_copies_of_narrow_weights() -> None:
    many = Config(max_requests=1024)
    wide, narrow = (Deployment(LLAMA_8B, DEVICES["h200"], many, precision) for precision in ("bfloat16", "int4"))
    small = replace(narrow, device=replace(DEVICES["h200"], memory=24 * 10**9))
    copies = 2 * (LLAMA_8B.layer_weights + LLAMA_8B.head_weights)
    assert narrow._copies(narrow.config, 130 * 10**9) == copies and narrow.settings.kv_blocks > 0
    assert not wide._copies(wide.config, 130 * 10**9)
    assert not small._copies(small.config, 20 * 10**9)
    assert not narrow._copies(Config(kv_blocks=100), 130 * 10**9)
    saved = (wide.model.bytes - narrow.model.bytes - copies) * 0.9 / narrow.settings.layout.block_bytes
    assert narrow.settings.kv_blocks - wide.settings.kv_blocks == pytest.approx(saved, abs=2)


def test_a_plan_counts_the_bytes_that_a_step_reads_of_experts() -> None:
    """As a server does, which measures a step of one row."""
    mixture = Deployment(qwen3_30b_shape(), DEVICES["h200"])
    line, found = mixture.roofline(mixture.settings), mixture.settings
    times = RowTimes.measure(lambda rows: line.decode_seconds(rows, 0))
    read = round(mixture.model.read_bytes(1) + mixture.model.head_bytes)
    assert read < mixture.model.bytes / 5
    assert found.max_requests == request_count(times, read, found.layout, PLENTY, found.max_gap)
