"""The GPU's runner, two plans in flight, gives the tokens of the CPU's: under Triton's interpreter, or on the card."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
pytest.importorskip("triton")

from tests import tiny  # noqa: E402
from tests.engine.oracle import OracleDrafter  # noqa: E402
from tests.model import test_latent, test_parity, test_sinks  # noqa: E402
from twostroke.config import make_config, resolve  # noqa: E402
from twostroke.engine.core import Core  # noqa: E402
from twostroke.hardware import this_machine  # noqa: E402
from twostroke.kv.storage import KVStorage  # noqa: E402
from twostroke.ops.cuda.backend import CudaOps  # noqa: E402
from twostroke.ops.cuda.exact import ExactCudaOps  # noqa: E402
from twostroke.ops.cuda.weights import shape_of  # noqa: E402
from twostroke.ops.reference.backend import ReferenceOps  # noqa: E402
from twostroke.run.cuda import capture, shared_prefix  # noqa: E402
from twostroke.run.cuda import runner as cuda_runner  # noqa: E402
from twostroke.run.cuda import steps as cuda_steps  # noqa: E402
from twostroke.run.cuda.buckets import all_mixed_rows  # noqa: E402
from twostroke.run.cuda.capture import Chain  # noqa: E402
from twostroke.run.cuda.runner import CudaRunner  # noqa: E402
from twostroke.run.cuda.warm_up import (  # noqa: E402
    compile_kernels,
    kinds_of_attention,
    plan_row_counts,
    product_kernels,
    run_largest_step,
)
from twostroke.run.torch_runner import TorchRunner  # noqa: E402
from twostroke.sampling import SamplingParams  # noqa: E402
from twostroke.schedule.make import make_scheduler  # noqa: E402
from twostroke.types import Request, Result  # noqa: E402
from twostroke.weights.checkpoint import open_checkpoint  # noqa: E402
from twostroke.weights.load import load_arch, load_model  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_CARD else []
slow_here = pytest.mark.gpu if ON_CARD else pytest.mark.slow  # the interpreter takes long
ASKED = (
    SamplingParams(max_tokens=4, temperature=0.0),
    SamplingParams(max_tokens=4, temperature=1.0),
    SamplingParams(max_tokens=4, temperature=0.8, top_k=20, repetition_penalty=1.3, logprobs=1, prompt_logprobs=0),
)


PROMPTS = [[(7 * i + 31 * number) % 300 + 3 for i in range(9 + 11 * number)] for number in range(len(ASKED))]


def tokens_of(
    folder: Path, kind: str, prompts: list[list[int]] = PROMPTS, batch: int = 24, drafter: OracleDrafter | None = None,
    runner_type: type | None = None, asked: tuple[SamplingParams, ...] = ASKED, quantize: str | None = None,
) -> list[tuple[list[int], object]]:  # fmt: skip
    checkpoint = open_checkpoint(folder)
    arch = load_arch(checkpoint)
    config = make_config(max_model_len=160, dtype="float32", max_batch_tokens=batch, kv_blocks=40, seed=1)
    settings = resolve(config, arch, this_machine("cpu"), 0)
    ops = CudaOps(torch.float32, "cuda" if ON_CARD else "cpu", quantize) if kind == "cuda" else ReferenceOps()
    model = load_model(checkpoint, ops, settings.max_model_len)
    kv = KVStorage(settings.layout, settings.kv_blocks, settings.kv_dtype, ops.device)
    scheduler = make_scheduler(arch, settings, "tiny")
    made = runner_type or (CudaRunner if kind == "cuda" else TorchRunner)
    runner = made(model, kv, scheduler.tables.array, ops)
    core = Core(scheduler, runner)
    scheduler.drafter = drafter
    requests = []
    for number, tokens in enumerate(prompts):
        params = asked[number % len(asked)]
        request = Request(number, tuple(tokens), params, 7 + number, limit=len(tokens) + params.max_tokens)
        requests.append(core.submit(request))
    while not core.idle:
        core.step()
    return [(request.tokens, request.finish_reason) for request in requests]


def known_answers(
    prompts: list[list[int]], right: list[tuple[list[int], object]]
) -> dict[tuple[tuple[int, ...], float], list[list[int]]]:
    """As OracleDrafter takes them."""
    found = enumerate(zip(prompts, right, strict=True))
    return {(tuple(prompt), ASKED[n].temperature): [tokens[len(prompt) :]] for n, (prompt, (tokens, _)) in found}


def watch_shapes(monkeypatch: pytest.MonkeyPatch) -> list[cuda_steps.Shape]:
    """A list that grows by the shape of every mixed step."""
    shapes, find = [], cuda_steps.Mixture.padded_shape
    monkeypatch.setattr(cuda_steps.Mixture, "padded_shape", lambda *args: shapes.append(find(*args)) or shapes[-1])
    return shapes


class CapturingRunner(CudaRunner):
    """As on a card, with graphs that run the step again. A capture computes on a CPU, so it has padding to compute."""

    made: ClassVar[list[CapturingRunner]] = []

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.graphs = True
        self.left_out = 0
        self.made.append(self)

    def _entry(self, shape: cuda_steps.Shape) -> Any:
        known = shape in self.shapes
        entry = super()._entry(shape)
        if not known:
            shape.fill_padding(self.staging.begin(entry.arrays))
            self.staging.send(entry.arrays, entry.buffer)
        return entry

    def collect(self, handle: Any) -> Result:
        if self.capturing:
            self._capture_more()
        for shape, entry in self.shapes.items():
            if isinstance(entry.graph, Chain):
                assert len(entry.graph.graphs) > 1, "a step in several parts"
                entry.graph = SimpleNamespace(replay=partial(self._again, shape, entry))
        result = super().collect(handle)
        self.left_out += not result.verified
        return result

    def _again(self, shape: cuda_steps.Shape, entry: Any) -> None:
        entry.tokens.copy_(self._step(shape, entry))


@pytest.mark.skipif(ON_CARD, reason="a card has graphs of its own: tests/run/test_gpu_exactness.py")
@pytest.mark.parametrize("trouble", ["", "a capture fails", "too many graphs"])
def test_drafts_are_left_out_until_their_step_is_captured(llama_folder: Path, monkeypatch, caplog, trouble) -> None:
    asked = (SamplingParams(max_tokens=16, temperature=0.0),)
    right = tokens_of(llama_folder, "cpu", PROMPTS[:2], asked=asked)
    monkeypatch.setattr(capture, "LAYERS", 1)
    monkeypatch.setattr(capture, "capturing", lambda pool: nullcontext(object()))
    if trouble == "a capture fails":
        monkeypatch.setattr(capture.Capture, "advance", lambda self: 1 / 0)
    if trouble == "too many graphs":
        monkeypatch.setattr(cuda_runner, "MOST_GRAPHS", 0)
    answers = {(tuple(p), 0.0): [tokens[len(p) :]] for p, (tokens, _) in zip(PROMPTS[:2], right, strict=True)}
    drafter = OracleDrafter(answers, most=2, errors=0.3)
    found = tokens_of(llama_folder, "cuda", PROMPTS[:2], drafter=drafter, runner_type=CapturingRunner, asked=asked)
    assert found == right
    runner = CapturingRunner.made.pop()
    drafted = {shape: entry for shape, entry in runner.shapes.items() if shape.drafts}
    assert drafted and (runner.left_out > 0) is (trouble != "too many graphs")
    assert all(entry.occurred for entry in drafted.values() if entry.failed or not entry.pending), "verified in the end"
    if trouble == "a capture fails":
        assert any(entry.failed for entry in drafted.values()) and "cannot be captured" in caplog.text
    elif not trouble:
        assert any(entry.graph is not None and entry.occurred for entry in drafted.values())


def test_both_runners_choose_the_same_tokens(llama_folder: Path) -> None:
    assert tokens_of(llama_folder, "cuda") == tokens_of(llama_folder, "cpu")


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("few", [2, 8])
def test_drafts_are_verified_in_steps_of_their_own_shape(llama_folder: Path, monkeypatch, splits, few) -> None:
    """Two requests whose tokens the device chooses. few: rows of a request that make a small tile."""
    prompts = PROMPTS[:2]
    right = tokens_of(llama_folder, "cpu", prompts)
    monkeypatch.setattr(cuda_steps, "FEW_QUERIES", few)
    monkeypatch.setattr(cuda_steps, "draft_splits", lambda *_: splits)
    shapes = watch_shapes(monkeypatch)
    drafter = OracleDrafter(known_answers(prompts, right), most=3, errors=0.3)
    assert tokens_of(llama_folder, "cuda", prompts, drafter=drafter) == right
    drafted = [shape for shape in shapes if shape.drafts]
    assert drafted and {shape.tile_splits for shape in drafted} == {(splits,)}
    assert (few == 8) <= any(shape.queries for shape in drafted)


@pytest.mark.parametrize("drafts", [False, True])
@torch.no_grad()
def test_with_sinks_biases_and_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: bool) -> None:
    """Contexts on both sides of the window's border, also where drafts are verified."""
    test_sinks.without_experts(monkeypatch)
    test_sinks.make_peer(tmp_path, "yarn", num_hidden_layers=2)
    prompts = [[token % 90 for token in prompt[:22]] for prompt in PROMPTS[:2]]
    right = tokens_of(tmp_path, "cpu", prompts)
    shapes = watch_shapes(monkeypatch)
    drafter = OracleDrafter(known_answers(prompts, right), most=3, errors=0.3) if drafts else None
    assert tokens_of(tmp_path, "cuda", prompts, drafter=drafter) == right
    assert any(shape.queries for shape in shapes) == drafts


@slow_here
@pytest.mark.parametrize("family", ["qwen3_moe", "v2 lite experts", "v3 experts"])
@torch.no_grad()
def test_with_experts_and_latent_attention(family: str, tmp_path: Path) -> None:
    (test_latent if family in test_latent.FAMILIES else test_parity).make_peer(family, tmp_path)
    prompts = [[token % 90 for token in prompt[:23]] for prompt in PROMPTS]
    assert tokens_of(tmp_path, "cuda", prompts) == tokens_of(tmp_path, "cpu", prompts)


@slow_here
@pytest.mark.parametrize("drafts", [False, True])
def test_with_compressed_attention(compressed_folder: Path, drafts: bool) -> None:
    """Contexts past the window and the first entry of 32 tokens; residual streams, experts chosen by a table."""
    prompts = PROMPTS if not drafts else PROMPTS[:2]
    right = tokens_of(compressed_folder, "cpu", prompts)
    drafter = OracleDrafter(known_answers(prompts, right), most=3, errors=0.3) if drafts else None
    assert tokens_of(compressed_folder, "cuda", prompts, drafter=drafter) == right


@slow_here
@pytest.mark.parametrize("ahead", [False, True])
def test_kernels_of_compressed_attention_are_compiled_before_they_are_needed(compressed_folder: Path, ahead) -> None:
    checkpoint = open_checkpoint(compressed_folder)
    config = make_config(max_model_len=160, dtype="float32", kv_blocks=100, max_batch_tokens=24, seed=1)
    settings = resolve(config, load_arch(checkpoint), this_machine("cpu"), 0)
    model = load_model(checkpoint, CudaOps(torch.float32, "cuda" if ON_CARD else "cpu"), settings.max_model_len)
    assert kinds_of_attention(model) == [0, 1, 2]  # the window alone, entries that are chosen, all entries
    compile_kernels(model, settings, ahead=ahead)


@pytest.mark.slow
def test_streams_that_share_a_prefix_choose_the_same_tokens(llama_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(shared_prefix, "LEAST", 128)
    monkeypatch.setattr(shared_prefix, "WORTHWHILE", 1)
    found = []
    find = shared_prefix.find_sharing
    monkeypatch.setattr(cuda_steps, "find_sharing", lambda *args: found.append(find(*args)) or found[-1])
    shared = [(11 * i) % 300 + 3 for i in range(130)]
    prompts = [[*shared, 5], [*shared, 9, 8]]
    assert tokens_of(llama_folder, "cuda", prompts, 160) == tokens_of(llama_folder, "cpu", prompts, 160)
    assert any(sharing is not None for sharing in found)


@slow_here
@torch.inference_mode()
def test_exact_products_with_codes_are_compiled_and_tried_ahead(tmp_path: Path) -> None:
    """Each tile for each shape: no stream waits for a compiler or a trial."""
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "head_dim": 64}
    folder = tiny.tiny_llama(tmp_path / "model", num_attention_heads=2, num_key_value_heads=1, **shape)
    ops = ExactCudaOps(torch.bfloat16 if ON_CARD else torch.float32, "cuda" if ON_CARD else "cpu", "int8")
    model = load_model(open_checkpoint(folder), ops, 96)
    for task in product_kernels(model, 40, ahead=True):
        task()
    known = dict(ops.narrow_products.same)
    assert known and all(known.values())
    weights = [*(product.weight for product in model.layers[0].products()), model.head]
    for weight in weights:
        for rows in (1, 9, 16, 17, 33, 40) if ON_CARD else (1, 17):
            ops.linear(torch.zeros(rows, shape_of(weight)[1], dtype=ops.dtype, device=ops.device), weight)
    assert ops.narrow_products.same == known


@slow_here
@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
def test_parts_of_a_prompt_choose_nothing_with_narrow_weights(llama_folder: Path, quantize: str) -> None:
    """The last layer of such a step has no rows after its attention."""
    prompts, asked = [PROMPTS[-1][:60]], (SamplingParams(max_tokens=3, temperature=0.0),)
    whole, parts = (
        tokens_of(llama_folder, "cuda", prompts, batch, asked=asked, quantize=quantize) for batch in (64, 24)
    )
    assert parts == whole and len(parts[0][0]) == len(prompts[0]) + 3


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_largest_step_can_be_run_before_there_is_a_cache(llama_folder: Path, quantize: str | None) -> None:
    checkpoint = open_checkpoint(llama_folder)
    arch = load_arch(checkpoint)
    config = make_config(max_model_len=96, dtype="float32", max_batch_tokens=12, max_requests=3, kv_blocks=40, seed=1)
    settings = resolve(config, arch, this_machine("cpu"), 0)
    ops = CudaOps(torch.float32, "cuda" if ON_CARD else "cpu", quantize)
    model = load_model(checkpoint, ops, settings.max_model_len)
    compile_kernels(model, settings, ahead=True)
    assert plan_row_counts(model, all_mixed_rows(12), 60.0) == [16]
    assert plan_row_counts(model, all_mixed_rows(12), -1.0) == []
    if quantize is not None:
        return  # the interpreter takes long for whole steps
    tokens = run_largest_step(model, ops, settings)
    assert len(tokens) == 3 and len(set(tokens)) == 1  # the same prompt three times
