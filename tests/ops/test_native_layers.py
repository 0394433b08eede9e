"""All layers in one native call: the bits of the ops called one by one, for every family."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import Sequences
from tests.model.test_parity import FAMILIES, make_peer, tokens_of
from twostroke.model.transformer import Transformer
from twostroke.ops.cpu.library import available
from twostroke.ops.interface import KVFormat, Ops
from twostroke.record import replace
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model

if not available():
    pytest.skip("the native library is not built", allow_module_level=True)

from twostroke.ops.cpu.backend import NativeCpuOps


class OneByOne(NativeCpuOps):
    """The same backend without its call for all layers."""

    fuse = Ops.fuse  # type: ignore[assignment]  # declines


def both_ways(folder: Path, bits: str | None = None) -> tuple[Transformer, Transformer]:
    """The same model, run by the call for all layers and op by op."""
    ops = NativeCpuOps(2)
    whole = load_model(open_checkpoint(folder), ops, 256, bits=bits)
    single = load_model(open_checkpoint(folder), OneByOne(2), 256, bits=bits)
    assert len(whole._make_runs(Sequences(whole, 1, 16).kv)) == 1 < len(single._make_runs(Sequences(single, 1, 16).kv))
    return whole, single


# Prefill beside decode, a chunk, single tokens; each with other rows asked for: none, some, out of order, all
STEPS: tuple[tuple[tuple[tuple[int, int], ...], list[int]], ...] = (
    (((0, 41), (1, 5)), [40, 45]),
    (((0, 1), (2, 30)), []),
    (((2, 17), (0, 1), (1, 3)), [20, 17, 3, 3]),
    (((1, 1), (2, 1), (0, 1)), [0, 1, 2]),
    (((1, 1),), [0]),
)


def hidden_rows(model: Transformer, kv_format: KVFormat) -> list[np.ndarray]:
    sequences = Sequences(model, 3, 64, kv_format)
    found = []
    for work, wanted in STEPS:
        batch = sequences.batch([(which, tokens_of(count)) for which, count in work])
        batch = replace(batch, logit_rows=np.array(wanted, np.int64))
        found.append(model.forward(batch, sequences.kv))
    return found


def check(whole: Transformer, single: Transformer, kv_format: KVFormat) -> None:
    for (_, wanted), got, expected in zip(
        STEPS, hidden_rows(whole, kv_format), hidden_rows(single, kv_format), strict=True
    ):
        assert got.shape == (len(wanted), whole.arch.hidden)
        assert np.isfinite(got).all()
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    make_peer(family, tmp_path)
    whole, single = both_ways(tmp_path)
    for kv_format in ("float32", "int8"):
        check(whole, single, kv_format)


@pytest.mark.parametrize("family", ["llama bias, head_dim", "gemma3 scaled", "qwen3 bias", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantized_weights(family: str, bits: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    if family == "qwen3_moe":
        shape["moe_intermediate_size"] = 64
    make_peer(family, tmp_path, **shape)
    whole, single = both_ways(tmp_path, bits)
    for kv_format in ("float16", "bfloat16", "int4"):
        check(whole, single, kv_format)


def test_a_pool_is_not_kept_alive(tmp_path: Path) -> None:
    make_peer("llama", tmp_path)
    model, _ = both_ways(tmp_path)
    sequences = Sequences(model, 1, 16)
    sequences.step([(0, tokens_of(3))])
    pool = weakref.ref(sequences.kv)
    del sequences
    gc.collect()
    assert pool() is None


def test_refusals(tmp_path: Path) -> None:
    make_peer("llama", tmp_path)
    model, _ = both_ways(tmp_path)
    sequences = Sequences(model, 1, 16)
    batch = sequences.batch([(0, tokens_of(3))])
    for row in (-1, 3):
        with pytest.raises(ValueError, match="bad argument"):
            model.forward(replace(batch, logit_rows=np.array([row])), sequences.kv)
    fused = model.ops.fuse([layer.fused() for layer in model.layers], [sequences.kv.layer(i) for i in range(3)])
    for x in (np.zeros((2, 48), np.float32), np.zeros((3, 48))):
        with pytest.raises(ValueError, match="does not fit"):
            fused(x, batch, batch.logit_rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_newest_tokens_in_one_call(family: str, tmp_path: Path) -> None:
    """The same logits as embedding, layers and head one by one, and the best tokens of the rows. A request may have
    several rows: its newest token and guesses."""
    make_peer(family, tmp_path)
    model = load_model(open_checkpoint(tmp_path), NativeCpuOps(2), 256)
    sequences, apart = (Sequences(model, 3, 64, "int8") for _ in range(2))
    decode = model.decoder(sequences.kv, sequences.tables.numpy())
    if decode is None:
        assert model.arch.logit_softcap
        return
    prompt = [(which, tokens_of(count)) for which, count in ((0, 31), (1, 5), (2, 16))]
    sequences.step(prompt), apart.step(prompt)
    for works in (((2, 1), (0, 1), (1, 1)), ((1, 1),), ((0, 1), (1, 1), (2, 1)), ((1, 3), (2, 1), (0, 17)), ((2, 4),)):
        newest = [(which, tokens_of(which + count)[-count:]) for which, count in works]
        given = [
            (int(token), place, which)
            for which, tokens in newest
            for place, token in enumerate(tokens, sequences.computed[which])
        ]
        logits, best = decode(given, True)
        for which, count in works:
            sequences.computed[which] += count
        expected = apart.step(newest).numpy()
        assert np.array_equal(logits, expected) and best == expected.argmax(1).tolist()
        assert decode([(token, place, which) for token, place, which in given], False)[1] is None
    for wrong in ((model.arch.vocab, 0, 0), (1, 64, 0), (1, 0, 3), (1, -1, 0)):
        with pytest.raises(ValueError, match="outside"):
            decode([wrong], True)
