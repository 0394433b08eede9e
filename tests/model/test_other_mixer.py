"""A mixer that only this test knows: one head, keys without values, entries of another size, and a window.

It runs through sizing, the pool, prefix sharing, preemption and the cost model beside layers that the backend fuses.
The backend declines it, so it runs op by op.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.model.test_parity import make_peer
from twostroke.config import make_config, resolve
from twostroke.cost.model.roofline import Roofline, model_cost
from twostroke.cost.simulation.recording import UNKNOWN
from twostroke.engine.core import Core
from twostroke.hardware import Hardware
from twostroke.kv.storage import KVStorage
from twostroke.model.arch import Arch, LayerArch, Product, seen_pairs
from twostroke.model.entry import KVEntry, KVPart
from twostroke.model.layers import Branch, Layer, PackedProduct
from twostroke.model.transformer import Transformer
from twostroke.ops.cpu.backend import NativeCpuOps
from twostroke.ops.cpu.library import available
from twostroke.ops.formats import from_float
from twostroke.ops.interface import BLOCK, Array, Batch, KVLayer, Ops, Weight
from twostroke.record import replace
from twostroke.run.runner import ModelRunner
from twostroke.sampling import SamplingParams
from twostroke.schedule.make import make_scheduler
from twostroke.types import Request
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model

if not available():
    pytest.skip("the native library is not built", allow_module_level=True)

WIDTH, WINDOW = 24, 40


@dataclass(frozen=True)
class MeanArch:
    """Each token adds the mean of what the last `window` tokens left: one head, no values, float32."""

    window: int | None = WINDOW

    @property
    def kind(self) -> str:
        return "mean"

    def products(self, hidden: int) -> tuple[Product, ...]:
        return Product("down", hidden, WIDTH), Product("up", WIDTH, hidden)

    def attention_flops(self, start: int, count: int) -> int:
        return seen_pairs(start, count, self.window) * WIDTH

    def entries(self, kv_dtype: str) -> tuple[KVEntry, ...]:
        return (KVEntry((KVPart("keys", 1, WIDTH, "float32"),), self.window),)

    def stores(self, kv_dtype: str) -> bool:
        return True  # it keeps float32 in any case

    def small_weights(self) -> int:
        return 0


@dataclass(frozen=True, eq=False)
class Mean:
    arch: MeanArch
    down: Weight
    up: Weight

    def run(self, ops: Ops, x: Array, cache: KVLayer, batch: Batch, group: int) -> Branch:
        blocks = batch.groups[group]
        rows = ops.linear(x, self.down)
        cache.keys[blocks.slots // BLOCK, 0, blocks.slots % BLOCK] = rows
        out = np.empty_like(rows)
        for request in range(len(batch.contexts)):
            for row in range(batch.starts[request], batch.starts[request + 1]):
                end = int(batch.positions[row]) + 1
                seen = np.arange(max(0, end - (self.arch.window or end)), end)
                out[row] = cache.keys[blocks.tables[request][seen // BLOCK], 0, seen % BLOCK].mean(axis=0)
        return Branch(out, self.up, None, None)

    def products(self) -> tuple[PackedProduct, ...]:
        return PackedProduct("down", self.down, None, False), PackedProduct("up", self.up, None, True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Transformer:
    """A llama whose second layer mixes that way."""
    folder = tmp_path_factory.mktemp("plain")
    make_peer("llama", folder)
    ops = NativeCpuOps(2)
    plain = load_model(open_checkpoint(folder), ops, 256)
    rng = np.random.default_rng(3)

    def matrix(product: Product) -> Weight:
        return ops.pack([from_float(0.3 * rng.standard_normal((product.outputs, product.inputs), np.float32))])

    arch, shape = plain.arch, MeanArch()
    layers = list(arch.layers)
    layers[1] = LayerArch(shape, layers[1].feed)
    loaded = list(plain.layers)
    loaded[1] = Layer(Mean(shape, *map(matrix, shape.products(arch.hidden))), loaded[1].feed)
    return Transformer(
        replace(arch, layers=tuple(layers)), ops, embedding=plain.embedding, layers=loaded,
        final_norm=plain.final_norm, head=plain.head, max_positions=256,
    )  # fmt: skip


def engine(model: Transformer, **settings: object) -> Core:
    config = make_config(**({"max_model_len": 160, "seed": 1, "kv_dtype": "float16"} | settings))
    resolved = resolve(config, model.arch, Hardware("cpu", 2, 1 << 28), 0)
    kv = KVStorage(resolved.layout, resolved.kv_blocks, resolved.kv_dtype, None)
    scheduler = make_scheduler(model.arch, resolved, "mean")
    return Core(scheduler, ModelRunner(model, kv, scheduler.tables.array, model.ops))


def answers(core: Core, prompts: list[list[int]], count: int = 20) -> list[list[int]]:
    params = SamplingParams(max_tokens=count, temperature=0)
    states = [core.submit(Request(n, tuple(p), params, limit=len(p) + count)) for n, p in enumerate(prompts)]
    while not core.idle:
        core.step()
        core.scheduler.check()
    assert all(state.finish_reason == "length" for state in states)
    return [state.tokens[state.prompt_length :] for state in states]


PROMPTS = [[(5 * i + n) % 90 + 3 for i in range(50 + 7 * n)] for n in range(5)]


def test_sizing_reads_the_entries(model):
    layout = engine(model).scheduler.tables.layout
    grouped = model.arch.layers[0].mixer.entries("float16")[0]
    mine = model.arch.layers[1].mixer.entries("float16")[0]
    assert [group.entry for group in layout.groups].count(mine) == 1
    assert layout.token_bytes == (len(model.arch.layers) - 1) * grouped.bytes + 4 * WIDTH
    assert layout.block_bytes == max(len(group.layers) * group.entry.block_bytes for group in layout.groups)
    assert layout.read_bytes(100) == (len(model.arch.layers) - 1) * 100 * grouped.bytes + WINDOW * 4 * WIDTH


def test_the_backend_takes_what_it_knows_and_declines_the_rest(model):
    core = engine(model)
    assert len(model._make_runs(core.runner.kv)) == 3  # fused, by itself, fused


def test_levers_do_not_change_a_token(model):
    alone = [answers(engine(model), [prompt])[0] for prompt in PROMPTS]
    shared = [[*PROMPTS[4], *prompt[:9]] for prompt in PROMPTS]
    roomy = engine(model)
    first = answers(roomy, shared)
    for settings in (
        {},
        {"max_batch_tokens": 16, "max_requests": 3},
        {"kv_blocks": 40, "max_requests": 5},
        {"prefix_cache": False, "batching": "static"},
    ):
        core = engine(model, **settings)
        assert answers(core, PROMPTS) == alone
        assert answers(core, PROMPTS) == alone
        assert answers(core, shared) == first
    assert roomy.scheduler.counters.cached_tokens > 0


def test_preemption(model):
    alone = [answers(engine(model), [prompt], 40)[0] for prompt in PROMPTS]
    core = engine(model, kv_blocks=33, max_requests=5)
    assert answers(core, PROMPTS, 40) == alone
    assert core.scheduler.counters.preemptions > 0


def test_the_cost_model_reads_the_same_numbers(model):
    arch: Arch = model.arch
    layout = engine(model).scheduler.tables.layout
    line = Roofline(model_cost(arch, "float32"), layout, replace(UNKNOWN, kv_by_bytes=True))
    assert line.stream_bytes([100]) == layout.read_bytes(100)
    assert arch.layer_weights == sum(product.weights for product in arch.products)
    assert arch.attention_flops(10, 5) > 0 and line.step([(0, 50)], [100, 40], 3) > 0
