"""Two engines on the card: blocks go from one pool to the other over NIXL, not through the host's memory. `-m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests import tiny
from tests.cluster.pairs import PEERS, Pair, answer, moved, needs_nixl, run_pair
from tests.cluster.test_pair import Alone
from twostroke.cluster.sockets import SharedMemoryTransport
from twostroke.cluster.transports import direct_reads
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.segment import Segment

pytestmark = [pytest.mark.gpu, needs_nixl]
ON_CARD = {"device": "cuda", "exact": True, "kv_blocks": 256, "max_model_len": 1024}
PROMPTS = [[(7 * i + k) % 290 + 3 for i in range(700)] for k in (0, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("card"), max_position_embeddings=1024)


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_blocks_go_from_pool_to_pool(folder: Path, kv_dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what `--transport auto` chooses for workers of one machine."""
    settings = ON_CARD | {"kv_dtype": kv_dtype}
    alone = Alone(folder, **settings)
    want = [alone.answer(prompt) for prompt in PROMPTS]

    def refuse(size: int) -> Segment:
        raise AssertionError("bytes went through the host's memory")

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert pair.prefill.worker.engine.ready.direct and pair.decode.worker.engine.ready.direct
        monkeypatch.setattr(Segment, "create", refuse)
        assert [await answer(engine, prompt) for prompt in PROMPTS] == want
        await moved(pair)
        counts = pair.counts
        assert counts.done == 2 and counts.blocks > 60 and not counts.failed
        assert pair.decode.counts.computed_tokens < 40, "the prompts were not computed again"

    run_pair(
        folder, scenario, lambda: SharedMemoryTransport(PEERS), "process", prefill=settings, decode=settings,
        direct=direct_reads("127.0.0.1"),
    )  # fmt: skip
