"""Weights that are NaN or infinite: a clear error, at the load or for the request that meets them. No answer is wrong,
and other requests are not harmed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import tiny
from tests.hostile import tiny_gguf
from tests.hostile.one_end import check_choices
from tests.serve.server import Server, events
from twostroke import LLM, SamplingParams
from twostroke.errors import ModelError
from twostroke.ops.formats import FORMATS

SLOW = pytest.mark.slow  # seconds
BAD = [float("nan"), float("inf"), float("-inf")]
PROMPTS = ["Once upon a time", "dog 0123"]
TENSORS = ["blk.0.attn_q", "blk.0.attn_k", "blk.1.attn_v", "blk.0.attn_output", "blk.1.ffn_gate", "blk.0.ffn_down"]
NORMS = ["blk.0.attn_norm", "blk.1.ffn_norm", "output_norm"]


def errors_of(path: Path, **settings: object) -> list[str | None]:
    """The errors of greedy and sampled answers; None for an answer that has none."""
    llm = LLM(path, threads=1, kv_blocks=64, seed=1, **settings)
    found = []
    for temperature in (0.0, 1.0):
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=temperature, ignore_eos=True))
        found += [output.samples[0].error for output in outputs]
    return found


def damaged(folder: Path, kind: str, tensor: str, value: float) -> Path:
    def change(name: str, data: np.ndarray) -> None:
        if name == f"{tensor}.weight":
            tiny_gguf.set_scale(data, "F32" if "norm" in name else kind, 7, value)

    return tiny_gguf.write(folder / "model.gguf", kind, change)


@pytest.mark.parametrize("kind", [kind if kind == "Q4_1" else pytest.param(kind, marks=SLOW) for kind in FORMATS])
def test_no_format_hides_a_bad_scale(tmp_path: Path, kind: str) -> None:
    """One scale of one matrix, or one weight of a norm."""
    assert errors_of(tiny_gguf.write(tmp_path / "model.gguf", kind)) == [None] * 4
    for number, tensor in enumerate([*TENSORS, *NORMS]):
        found = errors_of(damaged(tmp_path, kind, tensor, BAD[number % len(BAD)]))
        assert all(error is not None and "NaN or infinite" in error for error in found), (tensor, found)


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("value", BAD)
def test_a_conversion_names_the_tensor(tmp_path: Path, bits: str, value: float) -> None:
    """Codes of few bits have no NaN: rounding would hide it."""
    path = damaged(tmp_path, "F32", "blk.1.ffn_gate", value)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_gate\.weight holds a weight that is not a finite number"):
        LLM(path, quantize=bits)


@pytest.fixture(scope="module", params=["nan", "inf"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """A healthy model, the same with a bad embedding of one token, and that token."""
    healthy = tiny.tiny_llama(tmp_path_factory.mktemp("healthy"), tie_word_embeddings=False)
    bad = tmp_path_factory.mktemp("bad") / "model"
    shutil.copytree(healthy, bad)
    tensors = dict(load_file(healthy / "model.safetensors"))
    token = 200
    embedding = tensors["model.embed_tokens.weight"].copy()
    embedding[token, 5] = float(request.param)
    save_file(tensors | {"model.embed_tokens.weight": embedding}, bad / "model.safetensors", {"format": "pt"})
    return healthy, bad, token


@SLOW
def test_a_request_that_meets_a_bad_weight_fails_alone(folders: tuple[Path, Path, int]) -> None:
    """Good requests run in the same steps, and their answers are those of the healthy model."""
    healthy, bad, token = folders
    good = [{"prompt": [5, 9, 40 + i], "max_tokens": 60, "logit_bias": {str(token): -100}} for i in range(6)]
    good = [body | {"ignore_eos": True, "temperature": 0, "logprobs": 2} for body in good]
    llm = LLM(healthy, threads=1, kv_blocks=256)
    biased = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={token: -100}, temperature=0.0)
    right = [llm.generate([body["prompt"]], biased)[0].samples[0].text for body in good]
    server = Server(bad).wait()
    try:
        texts, refused, streamed = asyncio.run(mixed(server, good, {"prompt": [5, token, 9], "max_tokens": 20}))
        server.assert_no_blocks_held()
        assert server.health()["restarts"] == 0
    finally:
        assert server.stop() == 0
    assert texts == right * 3
    for answer in refused:
        error = answer.json()["error"]
        assert answer.status_code == 500 and error["code"] == "not_finite" and "weights" in error["message"]
    for answer in streamed:
        assert check_choices({"n": 2}, events(answer.text)) == "not_finite"


async def mixed(
    server: Server, good: list[dict], poison: dict
) -> tuple[list[str], list[httpx.Response], list[httpx.Response]]:
    """Texts of good requests, and the answers to poisoned ones, whole and streamed."""
    async with server.async_client() as client:

        async def ask(body: dict) -> httpx.Response:
            return await client.post("/v1/completions", json=body)

        asked = [ask(body) for _ in range(3) for body in [*good, poison, poison | {"stream": True, "n": 2}]]
        answers = await asyncio.gather(*asked)
    size = len(good) + 2
    rounds = [answers[first : first + size] for first in range(0, len(answers), size)]
    texts = [answer.json()["choices"][0]["text"] for part in rounds for answer in part[: len(good)]]
    return texts, [part[-2] for part in rounds], [part[-1] for part in rounds]


@SLOW
def test_a_server_does_not_start_with_a_model_that_cannot_answer(tmp_path: Path) -> None:
    """Every answer would fail: the reason is said at the start."""
    with pytest.raises(AssertionError, match=r"the warm-up failed: .*\(NaN or infinite\).*its\s+weights are damaged"):
        Server(damaged(tmp_path, "Q4_1", "output_norm", float("nan"))).wait()
