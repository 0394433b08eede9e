"""The device's choice is the host's: the same filters, the same noise, the same token."""

from __future__ import annotations

import os

import pytest
import torch

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
pytest.importorskip("triton")

from tests.choices import next_choice  # noqa: E402
from twostroke.ops.cuda.kernels.sample import Filters, sample  # noqa: E402
from twostroke.run.sample import MASK, SLACK, choose_one, noise_key  # noqa: E402
from twostroke.sampling import SamplingParams  # noqa: E402
from twostroke.types import Request, RequestState  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_CARD else []
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
ASKED = (
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "top_k": 100_000},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 1e-12},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.5, "min_p": 1.0},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.1, "top_k": 5, "top_p": 0.999, "min_p": 0.01},
    {"temperature": 3.0, "top_k": 500, "top_p": 0.7, "min_p": 0.05},
)


def on_device(logits: torch.Tensor, requests: list[RequestState]) -> list[int]:
    count = len(requests)
    keys = [noise_key(r.seed, r.sample, len(r.tokens)) & MASK for r in requests]
    halves = torch.tensor([[key & 0xFFFFFFFF, key >> 32] for key in keys], dtype=torch.int64)
    halves = torch.where(halves >= 1 << 31, halves - (1 << 32), halves).to(torch.int32)
    params = [r.params for r in requests]
    filters = Filters(
        torch.tensor([p.top_k for p in params], dtype=torch.int32, device=DEVICE),
        torch.tensor([[p.top_p, p.min_p] for p in params], dtype=torch.float64, device=DEVICE),
        SLACK,
    )
    temperatures = torch.tensor([p.temperature for p in params], device=DEVICE)
    rows, newest, out = (torch.zeros(count, dtype=torch.int32, device=DEVICE) for _ in range(3))
    rows.copy_(torch.arange(count))
    sample(logits.to(DEVICE), temperatures, halves.to(DEVICE), rows, newest, out, filters)
    assert torch.equal(out, newest)
    return out.tolist()


@pytest.mark.parametrize("kind", ["distinct", "ties", "all alike", "wide"])
def test_filters_leave_the_same_tokens(kind: str) -> None:
    vocab = 6000 if ON_CARD else 300
    generator = torch.Generator().manual_seed(3)
    for seed in range(8 if ON_CARD else 1):
        logits = torch.randn(len(ASKED), vocab, generator=generator) * (30 if kind == "wide" else 3)
        if kind == "ties":
            logits = logits.round()  # a few dozen different values, zeros of both signs among them
        if kind == "all alike":
            logits.fill_(-1.25)
        requests = [
            RequestState(Request(n, (1,) * (4 + n), SamplingParams(**asked), 11 * seed + n))
            for n, asked in enumerate(ASKED)
        ]
        wanted = [choose_one(row, next_choice(request)) for row, request in zip(logits.numpy(), requests, strict=True)]
        assert on_device(logits, requests) == wanted
