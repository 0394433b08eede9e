"""Every storage format against ggml's own Python definition, and the row moves that fusing weights relies on."""

import warnings

import gguf
import numpy as np
import pytest

from twostroke.ops.formats import FORMATS, Stored, dequantize, from_float, stored_bytes

QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.block > 1]


def random_stored(name: str, shape: tuple[int, ...], seed: int = 0) -> Stored:
    data = np.random.default_rng(seed).integers(0, 256, stored_bytes(name, shape), dtype=np.uint8)
    return Stored(name, shape, data)


def oracle(stored: Stored) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[stored.format]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gguf.dequantize(stored.data.reshape(-1, stored_bytes(stored.format, stored.shape[-1:])), kind)


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_ggmls(name: str) -> None:
    assert (FORMATS[name].block, FORMATS[name].bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(3, 256), (300, 768)])
def test_random_bytes_decode_as_in_ggml(name: str, shape: tuple[int, ...]) -> None:
    stored = random_stored(name, shape)
    ours, theirs = dequantize(stored), oracle(stored).reshape(shape)
    assert ours.shape == shape
    assert ours.dtype == np.float32
    nan = np.isnan(theirs)  # random scales include nan, whose payload is not specified
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


@pytest.mark.parametrize("name", ["BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_floats_come_back(name: str) -> None:
    values = np.random.default_rng(1).standard_normal((7, 64), dtype=np.float32)
    data = gguf.quantize(values, gguf.GGMLQuantizationType[name]).reshape(-1).view(np.uint8)
    decoded = dequantize(Stored(name, (7, 64), data))
    assert np.array_equal(decoded, oracle(Stored(name, (7, 64), data)).reshape(7, 64))
    assert np.abs(decoded - values).max() < 0.5


@pytest.mark.parametrize("name", FORMATS)
def test_rows_move_as_bytes(name: str) -> None:
    stored = random_stored(name, (6, 512), seed=2)
    whole = dequantize(stored)
    order = np.array([5, 0, 3, 3])
    assert np.array_equal(dequantize(stored.rows(2, 5)), whole[2:5], equal_nan=True)
    assert np.array_equal(dequantize(stored.take_rows(order)), whole[order], equal_nan=True)


def test_rows_are_views_and_read_only_data_is_fine() -> None:
    stored = random_stored("Q4_0", (4, 64))
    stored.data.flags.writeable = False
    assert np.shares_memory(stored.rows(1, 3).data, stored.data)
    assert dequantize(stored).flags.writeable


def test_expert_stacks_have_rows_on_the_first_axis() -> None:
    stored = random_stored("Q8_0", (3, 4, 32))
    assert np.array_equal(dequantize(stored.rows(1, 2)), dequantize(stored)[1:2], equal_nan=True)


def test_vectors_scalars_and_empty_tensors() -> None:
    vector = from_float(np.arange(5, dtype=np.float32))
    assert np.array_equal(dequantize(vector.take_rows(np.array([4, 1]))), [4, 1])
    assert dequantize(from_float(np.float16(1.5).reshape(()))).shape == ()
    assert dequantize(Stored("F16", (0, 8), np.empty(0, np.uint8))).shape == (0, 8)


@pytest.mark.parametrize("name", QUANTIZED)
def test_wrong_sizes_are_refused(name: str) -> None:
    good = random_stored(name, (2, 256))
    with pytest.raises(ValueError, match="takes"):
        Stored(name, (2, 256), good.data[:-1])
    with pytest.raises(ValueError, match="multiple"):
        Stored(name, (2, 255), good.data)
    with pytest.raises(ValueError, match="no rows"):
        random_stored(name, (256,)).take_rows(np.array([0]))
    with pytest.raises(ValueError, match="outside"):
        good.rows(0, 3)
