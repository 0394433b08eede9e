"""Our int8 and int4 against the gguf package's Q8_0 and Q4_0 of the same weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from twostroke import LLM, ConfigError, SamplingParams
from twostroke.ops.cpu.library import available
from twostroke.ops.formats import dequantize, from_float
from twostroke.weights.quantize import native_encoder, quantize, to_q4_0, to_q8_0


def weights(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((64, 256)) * rng.uniform(0.01, 1.0, (64, 1))).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "peer"), [("int8", gguf.GGMLQuantizationType.Q8_0), ("int4", gguf.GGMLQuantizationType.Q4_0)]
)
def test_no_worse_than_the_plain_format(kind, peer):
    for seed in range(5):
        original = weights(seed)
        ours = dequantize(quantize(from_float(original), kind))
        theirs = gguf.dequantize(gguf.quantize(original, peer), peer)
        assert np.square(ours - original).sum() <= np.square(theirs - original).sum() * 1.0001


def test_the_search_beats_rounding_to_the_nearest():
    original = weights(9)
    ours = dequantize(quantize(from_float(original), "int4"))
    plain = gguf.dequantize(gguf.quantize(original, gguf.GGMLQuantizationType.Q4_0), gguf.GGMLQuantizationType.Q4_0)
    assert np.square(ours - original).sum() < 0.95 * np.square(plain - original).sum()


def test_zeros_and_odd_widths():
    assert not dequantize(quantize(from_float(np.zeros((3, 64), np.float32)), "int4")).any()
    odd = from_float(weights(0)[:, :50].copy())
    assert quantize(odd, "int4") is odd


@pytest.mark.skipif(not available(), reason="the native library is not built")
@pytest.mark.parametrize(("kind", "specified"), [("int8", to_q8_0), ("int4", to_q4_0)])
def test_the_native_search_gives_the_same_bits(kind, specified):
    groups = np.concatenate([weights(seed).reshape(-1, 32) for seed in range(20)])
    groups[0], groups[1], groups[2] = 0, 1e-9, 65504.0
    groups[3, ::2] = -groups[3, 1::2]  # equal sizes of both signs
    assert np.array_equal(native_encoder(kind)(groups), specified(groups))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_float_checkpoint_runs_in_fewer_bits(llama_folder, kind):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    prompt = list(range(5, 60))
    exact = LLM(llama_folder, dtype="float32")
    small = LLM(llama_folder, quantize=kind)
    assert len(small.generate([prompt], params)[0].token_ids) == 8
    assert small.engine.core.runner.model.weight_bytes() < exact.engine.core.runner.model.weight_bytes()


def test_what_a_cpu_does_not_serve(llama_folder):
    with pytest.raises(ConfigError, match="fp8"):
        LLM(llama_folder, quantize="fp8", device="cpu")
