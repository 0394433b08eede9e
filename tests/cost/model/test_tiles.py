"""Attention over prompts on a GPU: as the kernels share it out, as an H200 took, and as a fit finds it."""

from __future__ import annotations

import random
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.cost_model import HELD_OUT
from tests.cost.model.test_roofline import roofline
from twostroke.bench.grid import CALIBRATION
from twostroke.cost.model.fit import errors, fit, predicted
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.model.rates import TileRates
from twostroke.cost.model.roofline import Roofline
from twostroke.cost.model.tiles import attend, dense_tokens, rows_run, splits_of, tile_queries
from twostroke.metrics.steplog import LoggedWork, Step
from twostroke.record import replace
from twostroke.run.cuda.buckets import CAPTURED_TOKENS
from twostroke.run.step import StepRows
from twostroke.sampling import SamplingParams
from twostroke.types import Plan, Work

LLAMA = known_arch("llama-3.1-8b")


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-7b", "llama-2-7b", "smollm2-135m"])
def test_prompts_are_shared_out_as_the_kernels_do_it(model):
    cuda, steps = pytest.importorskip("twostroke.ops.cuda.cuts"), pytest.importorskip("twostroke.run.cuda.steps")
    torch, prefill = pytest.importorskip("torch"), pytest.importorskip("twostroke.ops.cuda.kernels.prefill")
    mixer = known_arch(model).layers[0].mixer
    share = mixer.heads // mixer.kv_heads
    queries = prefill.tile_rows(torch.bfloat16, mixer.head_dim, share) // share
    assert tile_queries(mixer) == queries
    kind = cuda.AttentionKind(queries, True, mixer.kv_heads, 0)
    rng = random.Random(1)
    for _ in range(60):
        chunks = [(rng.choice((0, 100, 1024, 2048, 8192)), rng.choice((2, 48, 192, 768, 2048, 6144)))
                  for _ in range(rng.choice((1, 1, 3)))]  # fmt: skip
        request = SimpleNamespace(
            row=0, params=SamplingParams(), tokens=[0] * 99_999, output_length=0, sample=0, scores_prompt=False
        )
        plan = Plan(0, tuple(Work(request, start, count) for start, count in chunks))
        counts, contexts = np.array([c for _, c in chunks]), np.array([s + c for s, c in chunks])
        mine = cuda.cut_step(counts, contexts, kind)
        first = [dense_tokens(*chunk) for chunk in chunks]
        assert sum(first) == sum(count for _, count, _ in mine.rows)
        rest = [(s + done, c - done) for (s, c), done in zip(chunks, first, strict=True) if c > done]
        if not rest:
            assert not len(mine.tiles)
            continue
        rows = int(counts.sum())
        mixture = steps.Mixture(StepRows(plan.works), (mine,))
        shape = mixture.padded_shape((kind,), 4096) if rows <= CAPTURED_TOKENS else None
        assert splits_of(mixer, rest, rows) == (shape.tile_splits[0] if shape else mine.tile_splits)
        assert rows_run(rows, prompts=True) == (shape.tokens if shape else rows)


def test_padding_of_streams_is_that_of_the_runner():
    counts, rows = (1, 3, 20, 65, 512, 600, 1025), [1, 4, 24, 80, 512, 640, 1025]
    assert [rows_run(count, prompts=False) for count in counts] == rows
    assert [rows_run(count, prompts=True) for count in (2, 33, 160, 257, 2047, 2048)] == [16, 64, 192, 384, 2048, 2048]


def test_a_stretch_of_whole_units_is_dense_and_the_rest_walks():
    whole, short = attend(LLAMA, [(8192, 6144)], 6144), attend(LLAMA, [(8192, 192)], 192)
    assert whole.tiled == 0 and whole.walk == 0 and whole.dense == LLAMA.attention_flops(8192, 6144)
    assert short.dense == 0 and short.walk == pytest.approx(32 * (8192 + 192) / 8) and short.merged > 0
    part = attend(LLAMA, [(0, 7680)], 7680)
    assert part.dense == LLAMA.attention_flops(0, 6144) and part.tiled == LLAMA.attention_flops(6144, 1536)
    assert attend(LLAMA, [(1000, 4096)], 4096).dense == 0, "the library takes nothing that begins between its units"


@pytest.mark.parametrize(("start", "count", "more"), [(1024, 48, 1.84e-3), (8192, 48, 2.48e-3)])
def test_keys_before_a_small_chunk_cost_what_they_cost_on_an_h200(start, count, more):
    """Measured (benchmarks/results/cost-model-h200.json): the same 48 tokens after nothing took 5.55 ms."""
    line = roofline("llama-3.1-8b")
    found = line.step([(start, count)], [], 1) - line.step([(0, count)], [], 1)
    assert found == pytest.approx(more, rel=0.25)


def test_a_fit_finds_the_rates_of_tiles():
    line = roofline("llama-3.1-8b")
    slow = ((1.0, 1.0), (64.0, 1.3), (128.0, 1.4), (512.0, 1.2), (4096.0, 1.0))
    known = replace(line.rates, slowdown=slow, attention_compute=500e12, tiles=TileRates(350e12, 9e-8))
    truth = Roofline(line.model, line.layout, known)
    rng = random.Random(0)
    found = fit(grid_steps(CALIBRATION["cuda"], truth, rng), line.model, line.layout, line.rates)
    assert found.tiles.key_seconds == pytest.approx(9e-8, rel=0.15)
    assert found.tiles.compute == pytest.approx(350e12, rel=0.15)
    assert found.attention_compute == pytest.approx(500e12, rel=0.15)
    fresh = grid_steps(HELD_OUT["cuda"], truth, rng)
    assert errors(fresh, Roofline(line.model, line.layout, found))["p95"] < 0.08


def grid_steps(sizes, truth, rng):
    """The cells of a grid as one machine would take them, give or take 2 %."""
    steps = []
    shapes = [(batch, context, 0, 0) for batch, context in product(sizes.batches, sizes.contexts)]
    shapes += [(0, 0, start, count) for start, count in product(sizes.starts, sizes.chunks)]
    shapes += [(*streams, *chunk) for streams, chunk in product(sizes.streams, sizes.mixed)]
    for streams, context, start, count in shapes:
        pieces = [LoggedWork(number, context, 1) for number in range(streams)]
        pieces += [LoggedWork(streams, start, count, "read")] if count else []
        step = Step(0, 0.0, 1.0, tuple(pieces), len(pieces))
        steps.append(step._replace(seconds=predicted(step, truth) * rng.uniform(0.98, 1.02)))
    return steps
