"""On the card, exact=True: random requests under random levers, with drafts, have the tokens of each request alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from tests.engine.test_exactness import Alone, check_levers, random_lives

pytestmark = pytest.mark.gpu
MODELS = {"llama": "llama_pair", "windows": "gemma_pair", "latent": "deepseek_pair"}


@pytest.fixture(
    scope="module", params=["llama bfloat16", "llama float32", "llama int8 KV", "windows bfloat16", "latent bfloat16"]
)
def card_model(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    name, _, kind = request.param.partition(" ")
    folder, draft = request.getfixturevalue(MODELS[name])
    extra: dict[str, Any] = {"device": "cuda", "exact": True, "dtype": "bfloat16"}
    extra |= {"kv_dtype": "int8"} if kind == "int8 KV" else {"dtype": kind}
    return folder, extra, Alone(folder, **extra), draft


@random_lives(12)
def test_levers_do_not_change_a_token(card_model, many, lever) -> None:  # type: ignore[no-untyped-def]
    check_levers(card_model, many, lever)
