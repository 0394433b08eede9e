"""Weights of few bits on a GPU: their bytes as the backend holds them, their times as an H200 took, the levers."""

from __future__ import annotations

import pytest

from tests.cost.cases import on_gpu, rag
from twostroke.config import QUANTIZATIONS_OF, check_quantize
from twostroke.cost.answers.levers import LEVERS, Scenario
from twostroke.cost.answers.workers import precisions
from twostroke.cost.model.calibration import Calibration
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.model.rates import datasheet_rates
from twostroke.cost.model.roofline import model_cost
from twostroke.cost.simulation.deployment import Deployment
from twostroke.errors import ConfigError
from twostroke.record import replace

LLAMA = known_arch("llama-3.1-8b")


@pytest.mark.parametrize("precision", ["bfloat16", "fp8", "int8", "int4"])
def test_bytes_are_those_that_the_backend_holds(precision):
    torch, cuda = pytest.importorskip("torch"), pytest.importorskip("twostroke.ops.cuda.backend")
    from benchmarks.random_weights import llama_shape, random_model

    arch = llama_shape(256, 512, 2, 4, 2, 64, vocab=640, max_positions=64)
    ops = cuda.CudaOps(torch.bfloat16, "cpu", None if precision == "bfloat16" else precision)
    cost = model_cost(arch, precision, kind="cuda")
    assert cost.layer_bytes + cost.head_bytes == random_model(arch, ops, 64).weight_bytes()


def test_what_is_offered_is_what_the_engine_takes():
    for kind, served in QUANTIZATIONS_OF.items():
        for precision in served:
            check_quantize(precision, kind)
    with pytest.raises(ConfigError):
        check_quantize("fp8", "cpu")
    assert precisions(find_device("h200")) == ["bfloat16", "fp8", "int8", "int4"]
    assert precisions(find_device("a100")) == ["bfloat16", "int8", "int4"], "it has no fp8"


# docs/gpu.md: steps of two to five streams beside those of bfloat16; the time of a prompt of 8,192 tokens likewise
@pytest.mark.parametrize(
    ("precision", "stream", "prompt"), [("fp8", 1.51, 1.01), ("int8", 1.49, 1.0), ("int4", 1.83, 1.02)]
)
def test_gains_are_those_of_an_h200(precision, stream, prompt):
    wide, narrow = (
        Deployment(LLAMA, find_device("h200"), precision=name).roofline() for name in ("bfloat16", precision)
    )
    assert wide.decode_seconds(1, 400) / narrow.decode_seconds(1, 400) == pytest.approx(stream, rel=0.1)
    if prompt is not None:
        assert narrow.prefill_seconds(8192) / wide.prefill_seconds(8192) == pytest.approx(prompt, rel=0.1)


def test_a_measured_gpu_gains_as_one_from_the_table_does():
    h200 = find_device("h200")
    rates = replace(datasheet_rates(h200, "bfloat16"), source="step log")
    this = Calibration(h200.title, "m", rates, h200.memory, 8, "cuda").device()
    assert this.flops["fp8"] == pytest.approx(2 * rates.compute, rel=0.01)
    for precision in QUANTIZATIONS_OF["cuda"]:
        measured = Deployment(LLAMA, this, rates=rates).quantized(precision).roofline()
        table = Deployment(LLAMA, h200).quantized(precision).roofline()
        assert measured.decode_seconds(4, 1000) == pytest.approx(table.decode_seconds(4, 1000), rel=0.02)
        assert measured.prefill_seconds(4096) == pytest.approx(table.prefill_seconds(4096), rel=0.02)


@pytest.mark.parametrize(("lever", "device", "reason"), [
    ("weights-fp8", "a100", "no products in fp8"), ("weights-fp8", "xeon-8480", "not served on a cpu"),
    ("weights-int8", "a100", None), ("weights-int8", "h200", None), ("weights-int4", "h200", None),
])  # fmt: skip
def test_levers_of_weights_say_what_a_device_cannot_do(lever, device, reason):
    case = Scenario(replace(on_gpu(), device=find_device(device)), rag().arrivals)
    after = {one.name: one for one in LEVERS}[lever].pull(case)
    if reason is not None:
        assert isinstance(after, str) and reason in after
    else:
        assert after.deployment.config.quantize == lever.removeprefix("weights-")
        assert after.deployment.model.bytes < 0.6 * case.deployment.model.bytes
