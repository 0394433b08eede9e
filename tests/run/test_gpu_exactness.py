"""exact=True on the GPU: a request's tokens are the same alone, among others, in chunks, after a hit and preempted.

On the card with layers in the shape of Llama-3.1-8B; under Triton's interpreter with a tiny model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from twostroke.record import replace

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
pytest.importorskip("triton")

from benchmarks.random_weights import LLAMA_8B, random_model  # noqa: E402
from tests.draft.paying import make_rows_free  # noqa: E402
from tests.engine.oracle import OracleDrafter, RandomModelDrafter  # noqa: E402
from tests.tiny import tiny_deepseek, tiny_deepseek_v4, tiny_mixture  # noqa: E402
from twostroke.config import make_config, resolve  # noqa: E402
from twostroke.draft import answers  # noqa: E402
from twostroke.draft.speculate import Speculation, make_drafter, never_forced  # noqa: E402
from twostroke.engine.core import Core  # noqa: E402
from twostroke.hardware import this_machine  # noqa: E402
from twostroke.kv.layout import KVLayout, make_layout  # noqa: E402
from twostroke.kv.storage import KVStorage  # noqa: E402
from twostroke.model.arch import Arch, DenseArch, GroupedArch, LayerArch, Rope  # noqa: E402
from twostroke.model.transformer import Transformer  # noqa: E402
from twostroke.ops.cuda.exact import ExactCudaOps  # noqa: E402
from twostroke.run.cuda import capture  # noqa: E402
from twostroke.run.cuda.runner import CudaRunner  # noqa: E402
from twostroke.run.drafting import Drafting  # noqa: E402
from twostroke.sampling import SamplingParams  # noqa: E402
from twostroke.schedule.make import make_scheduler  # noqa: E402
from twostroke.types import Request  # noqa: E402
from twostroke.weights.checkpoint import open_checkpoint  # noqa: E402
from twostroke.weights.load import load_model  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_CARD else []
slow_here = pytest.mark.gpu if ON_CARD else pytest.mark.slow  # the interpreter takes long
WINDOWS = (None, 24) if ON_CARD else (None,)


def tiny_arch(hidden: int, windows: tuple[int | None, ...] = WINDOWS, *, sinks: bool = False) -> Arch:
    """With heads and a feed-forward part in proportion. sinks: with biases too, as gpt-oss has them."""
    rope = Rope(tuple(100.0 ** (-4 * i / hidden) for i in range(hidden // 4)))
    mixers = [GroupedArch(2, 1, hidden // 2, w, rope, sinks=sinks, qkv_bias=sinks, output_bias=sinks) for w in windows]
    layers = tuple(LayerArch(mixer, DenseArch(hidden)) for mixer in mixers)
    return Arch(family="llama", vocab=64, hidden=hidden, layers=layers, max_positions=512, norm_eps=1e-5)


TINY, SLICED = tiny_arch(32), tiny_arch(64)  # codes of eight bits come in slices of 64 inputs
SINKS = tiny_arch(32, (None, 24), sinks=True)
NEW = 24 if ON_CARD else 3
LENGTHS = (1100, 37, 700, 64) if ON_CARD else (23, 7)
LARGE = replace(LLAMA_8B, layers=LLAMA_8B.layers[:3], vocab=32000)
MODELS: dict[str, tuple[Arch, torch.dtype, str | None]] = {
    "8B": (LARGE, torch.bfloat16, None),
    "8B fp8": (LARGE, torch.bfloat16, "fp8"),
    "8B int8": (LARGE, torch.bfloat16, "int8"),
    "8B int4": (LARGE, torch.bfloat16, "int4"),
    "tiny": (TINY, torch.bfloat16, None),
    "tiny int4": (TINY, torch.bfloat16, "int4"),
    "tiny fp8": (SLICED, torch.bfloat16, "fp8"),
    "tiny int8": (SLICED, torch.bfloat16, "int8"),
    "tiny float32": (TINY, torch.float32, None),
    "sinks": (SINKS, torch.bfloat16, None),
    "sinks float32": (SINKS, torch.float32, None),
} if ON_CARD else {
    "tiny float32": (TINY, torch.float32, None),
    "tiny int4": (TINY, torch.float32, "int4"),
    "tiny fp8": (SLICED, torch.float32, "fp8"),
    "tiny int8": (SLICED, torch.float32, "int8"),
    "sinks float32": (SINKS, torch.float32, None),
}  # fmt: skip


CHECKPOINTS = {  # DeepSeek V4's layers, each of another kind; V3's with experts in groups; Qwen3's mixture
    f"{kind} {name}": (make, getattr(torch, name))
    for kind, make in (("compressed", tiny_deepseek_v4), ("latent", tiny_deepseek), ("mixture", tiny_mixture))
    for name in ("bfloat16", "float32")[0 if ON_CARD else 1 :]
}


def loaded_model(name: str, folder: Path) -> Transformer:
    make, dtype = CHECKPOINTS[name]
    return load_model(open_checkpoint(make(folder)), ExactCudaOps(dtype, "cuda" if ON_CARD else "cpu"), 512)


class Served:
    """An engine of its own around a model: token ids in, token ids out."""

    def __init__(self, model: Transformer, draft: Transformer | None = None, **settings: object):
        ops, arch = model.ops, model.arch
        assert isinstance(ops, ExactCudaOps)
        dtype = "float32" if ops.dtype == torch.float32 else "bfloat16"
        config = make_config(dtype=dtype, seed=1, **settings)
        resolved = resolve(config, arch, this_machine("cpu"), 0, draft.arch if draft is not None else None)
        kv = KVStorage(
            resolved.layout, resolved.kv_blocks, resolved.kv_dtype, ops.device, resolved.host_slots
        )  # fmt: skip
        self.scheduler = make_scheduler(arch, resolved, "random")
        tables = self.scheduler.tables.array
        drafting = None
        if draft is not None:
            part = kv.draft_part(len(model.layers))
            drafting = Drafting(CudaRunner(draft, part, tables, ops, vocab=arch.vocab), draft.arch.vocab)
            self.scheduler.drafter = RandomModelDrafter(4)
        self.core = Core(self.scheduler, CudaRunner(model, kv, tables, ops, drafting=drafting))
        self.asked = 0

    def answers(self, prompts: list[list[int]], temperatures: Sequence[float] = ()) -> list[list[int]]:
        """temperatures: of the first requests; the others are greedy."""
        requests = []
        for prompt, temperature in zip_longest(prompts, temperatures, fillvalue=0.0):
            params = SamplingParams(max_tokens=NEW, temperature=temperature)
            request = Request(self.asked, tuple(prompt), params, 7, limit=len(prompt) + NEW)
            self.asked += 1
            requests.append(self.core.submit(request))
        while not self.core.idle:
            self.core.step()
        assert all(len(r.tokens) == len(p) + NEW for r, p in zip(requests, prompts, strict=True))
        return [r.tokens[-NEW:] for r in requests]


def prompt(arch: Arch, number: int, length: int) -> list[int]:
    return [(7919 * i + 104729 * number * (i + 1)) % arch.vocab for i in range(1, length + 1)]


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=slow_here) if quantize else name for name, (_, _, quantize) in MODELS.items()),
        *(pytest.param(name, marks=slow_here) for name in CHECKPOINTS),
    ],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Transformer, list[list[int]], list[list[int]]]:  # fmt: skip
    """A model, prompts, and what it answers to each alone."""
    lengths = LENGTHS
    if request.param in CHECKPOINTS:
        model = loaded_model(request.param, tmp_path_factory.mktemp("checkpoint"))
        arch = model.arch
        if arch.streams > 1 and not ON_CARD:
            lengths = (41, 7)  # entries of 32 tokens are shared
    else:
        arch, dtype, quantize = MODELS[request.param]
        ops = ExactCudaOps(dtype, "cuda" if ON_CARD else "cpu", quantize)
        model = random_model(arch, ops, longest(arch))
    lengths = tuple(min(length, longest(arch) - 112) for length in lengths)
    prompts = [prompt(arch, number, length) for number, length in enumerate(lengths)]
    alone = [engine(model).answers([p])[0] for p in prompts]
    return model, prompts, alone


def engine(model: Transformer, draft: Transformer | None = None, **changes: object) -> Served:
    sizes = {"max_model_len": longest(model.arch), "kv_blocks": 1200, "max_batch_tokens": 2048}
    return Served(model, draft, **(sizes | changes))


def layout_of(model: Transformer) -> KVLayout:
    return make_layout(model.arch, "float32" if model.ops.dtype == torch.float32 else "bfloat16")


def longest(arch: Arch) -> int:
    return min(2048, arch.max_positions)


def test_among_neighbours(served) -> None:  # type: ignore[no-untyped-def]
    model, prompts, alone = served
    others = [prompt(model.arch, 50 + n, 3 + 11 * n % 60) for n in range(32 - len(prompts) if ON_CARD else 1)]
    assert engine(model, max_requests=64).answers(others + prompts)[len(others) :] == alone


@slow_here
@pytest.mark.parametrize("budget", [16, 50, 256, 1024] if ON_CARD else [16])
def test_in_chunks(served, budget: int) -> None:  # type: ignore[no-untyped-def]
    model, prompts, alone = served
    assert engine(model, max_batch_tokens=budget, max_requests=8).answers(prompts) == alone


@slow_here
def test_drafted_by_an_oracle(served, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """On the card drafts are verified once their step is captured, a layer at a time while other steps run."""
    model, prompts, alone = served
    monkeypatch.setattr(capture, "LAYERS", 1)
    drafted = engine(model, max_requests=8)
    known = {(tuple(p), 0.0): [answer] for p, answer in zip(prompts, alone, strict=True)}
    drafted.scheduler.drafter = OracleDrafter(known, 4, 0.2, last=model.arch.vocab - 1)
    counters, runner = drafted.scheduler.counters, drafted.core.runner
    for turn in range(60 if ON_CARD else 1):
        assert drafted.answers(prompts) == alone
        if turn >= 5 and counters.accepted_tokens:
            break
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    graphs = [entry.graph for shape, entry in runner.shapes.items() if shape.drafts and entry.graph is not None]
    assert all(len(graph.graphs) > 1 for graph in graphs) and (graphs or not ON_CARD)


def lookup_drafter() -> Speculation:
    """Guesses wherever there is a match, as if rows cost no time."""
    drafter = make_drafter("lookup", "cuda", never_forced)
    assert drafter is not None
    make_rows_free(drafter)
    return drafter


@slow_here
@pytest.mark.parametrize("kind", ["oracle", "lookup"])
def test_seeded_samples_beside_greedy_answers_with_drafts(served, kind: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """In chunks and after hits, in one batch: as each alone without drafts. Lookup finds what was answered before."""
    model, prompts, greedy = served
    monkeypatch.setattr(capture, "LAYERS", 1)
    monkeypatch.setattr(answers, "PAST", 2)  # also answers as short as these are kept
    hot = [1.0] * len(prompts)
    sampled = [engine(model).answers([p], hot[:1])[0] for p in prompts]
    mixed = engine(model, max_requests=8, max_batch_tokens=256 if ON_CARD else 16)
    known = {(tuple(p), 0.0): [answer] for p, answer in zip(prompts, greedy, strict=True)}
    known |= {(tuple(p), 1.0): [answer] for p, answer in zip(prompts, sampled, strict=True)}
    oracle = OracleDrafter(known, 4, 0.2, last=model.arch.vocab - 1)
    mixed.scheduler.drafter = oracle if kind == "oracle" else lookup_drafter()
    for turn in range(60 if ON_CARD else 2):
        assert mixed.answers(prompts * 2, hot) == sampled + greedy
        if turn and mixed.scheduler.counters.accepted_tokens:
            break
    assert mixed.scheduler.counters.accepted_tokens > 0
    assert ON_CARD or sampled != greedy


@slow_here
def test_drafted_by_a_model(served, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The model drafts for itself: what it has read and written must be right for the drafts to be accepted."""
    model, prompts, alone = served
    if model.arch.streams > 1:
        pytest.skip("a draft model has no windows, and these layers have")
    drafted = engine(model, model, max_batch_tokens=64, max_requests=8)
    drafted.scheduler.drafter.reads = lambda request: True
    monkeypatch.setattr(Drafting, "write", None)  # the device writes these drafts by itself
    chosen = slice(None) if ON_CARD else slice(1, 2)
    for _ in range(2 if ON_CARD else 1):
        assert drafted.answers(prompts[chosen]) == alone[chosen]
    counters = drafted.scheduler.counters
    assert counters.drafted_tokens == counters.accepted_tokens > 0


@slow_here
def test_after_a_hit(served) -> None:  # type: ignore[no-untyped-def]
    model, prompts, alone = served
    again = engine(model)
    assert again.answers(prompts) == alone
    assert again.answers(prompts) == alone
    assert again.scheduler.counters.cached_tokens > 0


@slow_here
def test_after_blocks_went_to_the_host(served) -> None:  # type: ignore[no-untyped-def]
    """Room for one prompt at a time: each takes the blocks of the one before, and finds its own again."""
    model, prompts, alone = served
    longest = len(prompts[0]) + NEW
    blocks = layout_of(model).blocks_for(longest)
    tight = engine(model, kv_blocks=blocks, max_model_len=longest, kv_offload=1 << 28)
    other = prompt(model.arch, 60, len(prompts[0]))
    chosen = slice(None if ON_CARD else 1)
    for again in (False, True):
        assert [tight.answers([p])[0] for p in prompts[chosen]] == alone[chosen]
        if not again:
            tight.answers([other])
    host = tight.scheduler.tables.pool.host
    assert host is not None and host.restored > 0
    assert tight.scheduler.counters.cached_tokens > 0


@slow_here
def test_preempted(served) -> None:  # type: ignore[no-untyped-def]
    """All prompts find room at once, but not all that they grow by."""
    model = served[0]
    growing = [prompt(model.arch, 90 + n, 15) for n in range(8 if ON_CARD else 2)]
    alone = [engine(model).answers([p])[0] for p in growing]
    each = sum(-(-len(growing[0]) // group.span) for group in layout_of(model).groups)
    tight = engine(
        model, kv_blocks=len(growing) * each + 1, prefix_cache=False,
        max_model_len=len(growing[0]) + NEW, max_batch_tokens=2048,
    )  # fmt: skip
    assert tight.answers(growing) == alone
    assert tight.scheduler.counters.preemptions > 0
