"""The GPU's runner, two plans in flight, gives the tokens of the CPU's: under Triton's interpreter, or on the card."""

from __future__ import annotations

import os
from pathlib import Path

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
from twostroke.run.cuda import shared_prefix  # noqa: E402
from twostroke.run.cuda import steps as cuda_steps  # noqa: E402
from twostroke.run.cuda.buckets import all_mixed_rows  # noqa: E402
from twostroke.run.cuda.runner import CudaRunner  # noqa: E402
from twostroke.run.cuda.warm_up import compile_kernels, plan_row_counts, product_kernels, run_largest_step  # noqa: E402
from twostroke.run.torch_runner import TorchRunner  # noqa: E402
from twostroke.sampling import SamplingParams  # noqa: E402
from twostroke.schedule.make import make_scheduler  # noqa: E402
from twostroke.types import Request  # noqa: E402
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
    folder: Path, kind: str, prompts: list[list[int]] = PROMPTS, batch: int = 24, drafter: OracleDrafter | None = None
) -> list[tuple[list[int], object]]:
    checkpoint = open_checkpoint(folder)
    arch = load_arch(checkpoint)
    config = make_config(max_model_len=160, dtype="float32", max_batch_tokens=batch, kv_blocks=40, seed=1)
    settings = resolve(config, arch, this_machine("cpu"), 0)
    ops = CudaOps(torch.float32, "cuda" if ON_CARD else "cpu") if kind == "cuda" else ReferenceOps()
    model = load_model(checkpoint, ops, settings.max_model_len)
    kv = KVStorage(settings.layout, settings.kv_blocks, settings.kv_dtype, ops.device)
    scheduler = make_scheduler(arch, settings, "tiny")
    runner = (CudaRunner if kind == "cuda" else TorchRunner)(model, kv, scheduler.tables.array, ops)
    core = Core(scheduler, runner)
    scheduler.drafter = drafter
    requests = []
    for number, tokens in enumerate(prompts):
        request = Request(number, tuple(tokens), ASKED[number % 3], 7 + number, limit=len(tokens) + 4)
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
