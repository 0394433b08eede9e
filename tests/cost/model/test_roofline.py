"""The formulas against worked examples, and the fit against a machine whose rates are known."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from benchmarks.served_trace import with_time_between
from tests.cost.fleets import parts
from twostroke.cost.model.calibration import Calibration, load_calibration
from twostroke.cost.model.devices import DEVICES, find_device
from twostroke.cost.model.fit import between, coldness, errors, fit, fit_launched, predicted
from twostroke.cost.model.known_models import CONFIGS, known_arch
from twostroke.cost.model.rates import Rates, datasheet_rates
from twostroke.cost.model.roofline import Roofline, kv_bytes_per_token, model_cost
from twostroke.cost.simulation.served import Served
from twostroke.errors import ConfigError
from twostroke.kv.layout import make_layout
from twostroke.metrics.steplog import LoggedWork, Step
from twostroke.record import replace


def roofline(model="llama-3-8b", device="h200", precision="bfloat16", kv="bfloat16"):
    arch = known_arch(model)
    rates = datasheet_rates(find_device(device), precision)
    return Roofline(model_cost(arch, precision), make_layout(arch, kv), rates)


def test_end_to_end_of_the_worked_example():
    one = Served(0.0, 100, first=0.400, end=5.375, output=200)
    assert one.tpot == pytest.approx(0.025)
    assert one.ttft + (one.output - 1) * one.tpot == pytest.approx(5.375), "E2E = TTFT + (n − 1)·TPOT"


@pytest.mark.parametrize(
    ("name", "size"), [("llama-3-8b", 131_072), ("llama-3-70b", 327_680), ("llama-2-13b", 819_200)]
)
def test_kv_bytes_of_a_token(name, size):
    assert kv_bytes_per_token(make_layout(known_arch(name), "float16")) == size


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-0.5b", 494_032_768),
        ("llama-3.2-1b", 1_235_814_400),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameters_are_the_published_ones(name, count):
    assert known_arch(name).parameters == count


def test_prefill_flops_are_two_per_weight_and_token_plus_attention():
    line = roofline()
    arch, n = line.model.arch, 2048
    matrices = arch.layer_weights
    attention = 4 * len(arch.layers) * arch.layers[0].mixer.width * n * (n + 1) / 2
    flops = line.flops([(0, n)], [], 0)
    assert flops == pytest.approx(2 * matrices * n + attention)
    assert flops == pytest.approx(2 * arch.parameters * n, rel=0.15)


def test_decode_at_batch_one_does_about_one_flop_for_each_byte():
    assert roofline().intensity([], [1], 1) == pytest.approx(1.0, rel=0.02)
    assert roofline(precision="float32").intensity([], [1], 1) == pytest.approx(0.5, rel=0.02)


def test_the_two_strokes_lie_on_both_sides_of_the_ridge():
    line = roofline()
    assert line.intensity([], [1000], 1) < 0.01 * line.ridge
    assert line.intensity([(0, 2048)], [], 1) > 2 * line.ridge


def test_decode_time_is_bytes_over_bandwidth():
    line = roofline()
    bare = replace(line.rates, step_seconds=0.0, request_seconds=0.0)
    line = Roofline(line.model, line.layout, bare)
    read = line.model.layer_bytes + line.model.head_bytes + 131_072 * 500
    assert line.decode_seconds(1, 500) == pytest.approx(read / bare.bandwidth)
    assert line.decode_seconds(32, 500) < 1.5 * line.decode_seconds(1, 500), "neighbours share the weights"


def test_a_decode_run_is_its_steps_one_by_one():
    for name in ("llama-3-8b", "smollm2-135m"):
        line = roofline(name)
        steps = line.decode_run([100, 3000, 17], 50)
        each = [line.step([], [100 + i, 3000 + i, 17 + i], 3) for i in range(50)]
        assert steps == pytest.approx(each, rel=1e-12)


def test_chunks_add_up_and_cost_more_when_they_are_tiny():
    line = roofline()
    whole, chunked, tiny = (line.prefill_seconds(4096, 0, size) for size in (None, 2048, 16))
    assert whole <= chunked < 1.5 * whole
    assert tiny > 5 * whole


def test_windows_bound_what_a_stream_reads():
    arch = known_arch("mistral-7b")
    windowed = arch.with_mixers(window=4096)
    line = Roofline(model_cost(windowed), make_layout(windowed, "bfloat16"), roofline().rates)
    assert line.stream_bytes([100_000]) == line.stream_bytes([4096])
    assert line.decode_run([4000], 200)[-1] == pytest.approx(line.step([], [4199], 1))


def test_several_devices_are_faster_but_not_in_proportion():
    arch = known_arch("llama-3-70b")
    device = find_device("h100")
    layout = make_layout(arch, "bfloat16")
    times = [
        Roofline(model_cost(arch), layout, datasheet_rates(device, "bfloat16", n), n, device.link).decode_seconds(
            8, 1000
        )
        for n in (2, 4)
    ]
    assert times[0] / 2 < times[1] < times[0]


def test_fit_finds_the_machine_that_made_the_log():
    arch = known_arch("smollm2-135m")
    model, layout = model_cost(arch, "int4"), make_layout(arch, "float16")
    guess = Rates(10e9, 100e9, 10e9, 50e9, 0.001, 3e-5)
    slow = ((1.0, 1.6), (8.0, 1.2), (64.0, 1.1), (512.0, 1.05))
    truth = Roofline(model, layout, replace(guess, slowdown=slow, kv_bandwidth=6e9, attention_compute=20e9))
    rng = random.Random(0)
    steps = [random_step(rng, truth, number) for number in range(400)]
    for step in rng.sample(range(400), 12):
        steps[step] = steps[step]._replace(seconds=5 * steps[step].seconds)  # another program used the machine
    found = Roofline(model, layout, fit(steps, model, layout, guess))
    fresh = [random_step(rng, truth, number) for number in range(200)]
    reached = errors(fresh, found)
    assert reached["median"] < 0.05 and reached["p95"] < 0.15


def test_time_between_steps_is_found():
    steps = [Step(i, 0.012 * i, 0.01, (LoggedWork(1, i, 1),), 1) for i in range(10)]
    steps += [Step(10, 5.0, 0.01, (LoggedWork(1, 9, 1),), 1)]  # after a pause with nothing to do
    assert between(steps) == pytest.approx(0.002)
    assert between(steps[:1]) == 0.0


def test_who_waits_for_the_next_step_waits_for_the_time_between_too():
    steps = [Step(i, 0.012 * i, 0.01, (LoggedWork(1, i, 1),), 1) for i in range(4)]
    steps += [Step(4, 5.0, 0.01, (LoggedWork(2, 0, 16, "read"),), 1, waiting=1)]  # no request was left: a pause
    steps += [Step(5, 5.5, 0.01, (LoggedWork(3, 0, 16, "read"),), 1), Step(7, 5.6, 0.01, (LoggedWork(3, 16, 1),), 1)]
    seen = [step.seconds for step in with_time_between(steps)]
    assert seen == pytest.approx([0.012, 0.012, 0.012, 0.01, 0.5, 0.01, 0.01]), "a step that is missing tells nothing"


def random_step(rng, truth, number):
    pieces = [LoggedWork(i, rng.randrange(1, 2000), 1) for i in range(rng.choice([0, 1, 2, 4, 8, 16, 32]))]
    if not pieces or rng.random() < 0.4:
        pieces.append(LoggedWork(99, rng.choice([0, 0, 256, 1024]), rng.choice([16, 60, 128, 333, 512]), "read"))
    step = Step(number, 0.0, 0.0, tuple(pieces), sum(piece.count == 1 for piece in pieces) or 1)
    chunks = [(work.start, work.count) for work in step.chunks]
    seconds = truth.step(chunks, step.contexts, step.sampled)
    return step._replace(seconds=seconds * rng.uniform(0.97, 1.03))


def test_the_table_knows_the_common_machines():
    for name in ("a100", "h100", "h200", "b200", "l4", "l40s", "rtx4090", "mi300x", "m4-max", "epyc-9654"):
        assert DEVICES[name].bandwidth > 0 and DEVICES[name].peak("int4") > 0
    with pytest.raises(ConfigError, match="h100"):
        find_device("h10")
    assert all(known_arch(name) is not None for name in CONFIGS)


def test_a_calibration_survives_its_file(tmp_path):
    rates = replace(roofline().rates, slowdown=((1.0, 1.5), (2.0, 1.1)))
    made = Calibration("cpu", "m", rates, 10**9, 2, errors={"median": 0.03})
    made.save(tmp_path / "c" / "m.json")
    assert load_calibration(tmp_path / "c" / "m.json") == made
    with pytest.raises(ConfigError, match="calibrate"):
        load_calibration(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a calibration"):
        load_calibration(tmp_path / "bad.json")


def test_cost_imports_where_torch_is_not_installed():
    code = (
        "import sys; sys.modules['torch'] = None; import twostroke.cost.answers.verdict, twostroke.cost.answers.workers"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_fit_finds_how_cold_prompts_leave_the_cache():
    line, _ = parts()
    rng, steps = random.Random(2), []
    for number in range(400):
        streams = [LoggedWork(i, rng.randrange(1, 2000), 1) for i in range(rng.choice([1, 2, 4, 8, 16, 32]))]
        chunk = [LoggedWork(99, 0, rng.choice([16, 60, 128, 333]), "read")] if number % 20 == 0 else []
        step = Step(number, 0.0, 0.0, (*streams, *chunk), len(streams))
        steps.append(step._replace(seconds=predicted(step, line)))
    cold = 0.3 * float(np.median([step.seconds for step in steps if not step.chunks]))
    part = coldness(steps)
    assert part[0] == 0.0 and part[1] == 1.0 and 0.1 < part[17] < part[16] < part[2] < 1.0
    colder = [step._replace(seconds=step.seconds + some * cold) for step, some in zip(steps, part, strict=True)]
    found = fit(colder, line.model, line.layout, line.rates, part)
    assert found.cold_seconds == pytest.approx(cold, rel=0.1)
    assert fit(steps, line.model, line.layout, line.rates, part).cold_seconds < 0.05 * cold
    assert fit(colder, line.model, line.layout, line.rates).cold_seconds == 0.0, "no row, no telling"


def test_narrow_kv_saves_time_only_where_bytes_decide():
    for device, faster in (("h200", True), ("xeon-8480", False)):
        wide, narrow = (roofline(device=device, kv=kv) for kv in ("bfloat16", "int4"))
        assert narrow.stream_bytes([4096]) < 0.3 * wide.stream_bytes([4096])
        saved = 1 - narrow.decode_seconds(32, 4096) / wide.decode_seconds(32, 4096)
        assert saved > 0.3 if faster else saved == pytest.approx(0.0)


def test_a_fit_begins_where_another_ended():
    line, _ = parts()
    known = replace(line.rates, slowdown=((1.0, 1.5), (16.0, 2.0), (512.0, 1.2)))
    truth = Roofline(line.model, line.layout, known)
    step = Step(1, 0.0, 0.0, (LoggedWork(1, 100, 1),), 1)
    steps = [step._replace(seconds=truth.step([], [101], 1))] * 30  # single streams only
    found = Roofline(line.model, line.layout, fit(steps, line.model, line.layout, known))
    assert found.step([(0, 16)], [], 1) == pytest.approx(truth.step([(0, 16)], [], 1), rel=0.1), "as it was known"


def test_the_rates_of_a_fit_are_reached_by_some_products():
    line, _ = parts()
    rng = random.Random(1)
    steps = [random_step(rng, line, number) for number in range(300)]
    guess = replace(line.rates, bandwidth=line.rates.bandwidth / 7, compute=line.rates.compute / 5)
    found = fit(steps, line.model, line.layout, guess)
    assert found.compute == pytest.approx(line.rates.compute, rel=0.3)
    assert min(factor for rows, factor in found.slowdown if rows <= 512) > 0.8


def test_a_least_time_of_steps_with_prompts_is_found():
    line = roofline()
    truth = Roofline(line.model, line.layout, replace(line.rates, chunk_seconds=0.02))
    steps = []
    for number, (count, streams) in enumerate(product((0, 16, 64, 128, 256, 512, 1024, 4096), (0, 1, 4, 32))):
        pieces = [LoggedWork(i, 500 + number, 1) for i in range(streams)] + (
            [LoggedWork(99, 0, count, "read")] if count else []
        )
        if pieces:
            one = Step(number, 0.0, 0.0, tuple(pieces), streams + bool(count))
            steps.append(one._replace(seconds=predicted(one, truth)))
    found = fit_launched(steps, line.model, line.layout, line.rates)
    assert found.chunk_seconds == pytest.approx(0.02)
    plain = fit(steps, line.model, line.layout, line.rates)
    with_it, without = (errors(steps, Roofline(line.model, line.layout, rates))["p95"] for rates in (found, plain))
    assert with_it < 0.05 and with_it < 0.5 * without
