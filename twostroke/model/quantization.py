"""How a published checkpoint codes its matrices: `quantization_config` as a `Scheme`, or a refusal. Torch-free.

The shapes of the tensors say the rest, and weights/published.py reads them. Scales of activations are not used: what is
multiplied with the weights here is at least as exact as their rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from twostroke.model.fields import Fields

Method = Literal["fp8", "compressed-tensors", "awq", "gptq", "mxfp4"]
SQUARE = (128, 128)
READ = "fp8, fbgemm_fp8, modelopt (FP8), compressed-tensors, awq, gptq and, for gpt_oss, mxfp4"
INSTEAD = "Use the model's bfloat16 version, or one in a format that is read"
_FP8 = ("fp8", "fbgemm_fp8")  # the same codes: scales for squares, for outputs or for a whole matrix
_LAYOUTS = ("dense", "naive-quantized", "int-quantized", "float-quantized", "pack-quantized", "mixed-precision")
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class Scheme:
    method: Method
    bits: int = 8  # awq, gptq
    group: int = -1  # awq, gptq: inputs that share a scale; -1: all of them
    square: tuple[int, int] = SQUARE  # outputs and inputs that share a scale, where scales are of squares
    zero_shift: int = 0  # gptq: what is added to zero points


def read_scheme(c: Fields) -> Scheme | None:
    """None: floats. ModelError: a format that is not read."""
    if not c.has("quantization_config"):
        return read_scheme(c.section("text_config")) if c.get("model_type") == "kimi_k25" else None
    q, family = c.section("quantization_config"), c.text("model_type")
    method = q.text("quant_method", "missing")
    if method == "mxfp4" and family == "gpt_oss":
        return Scheme("mxfp4")
    if method not in (*_FP8, *_READERS) or (family == "deepseek_v4" and method != "fp8"):
        raise c.error(
            "quantization_config",
            f"has quant_method {method!r:.40}, which is not read for {family}; read are {READ}. {INSTEAD}",
        )
    return _fp8(q) if method in _FP8 else _READERS[method](q)


def _fp8(q: Fields) -> Scheme:
    q.only("fmt", "e4m3", "float8_e4m3fn")
    return Scheme("fp8", square=_square(q, "weight_block_size"))


def _modelopt(q: Fields) -> Scheme:
    algorithm = q.text("quant_algo")
    if algorithm != "FP8":
        raise q.error("quant_algo", f"is {algorithm!r:.40}; only 'FP8' is read. {INSTEAD}")
    return Scheme("fp8")


def _square(q: Fields, key: str) -> tuple[int, int]:
    value = q.get(key)
    if value is None:
        return SQUARE
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int or n < 1 for n in value):
        raise q.error(key, f"is {value!r:.80}; it must be two whole numbers above 0, like [128, 128]")
    return value[0], value[1]


def _awq(q: Fields) -> Scheme:
    for key in ("version", "checkpoint_format", "format"):
        layout = q.text(key, "gemm").lower()
        if layout != "gemm":
            raise q.error(key, f"is {layout!r:.40}, whose order of codes is not read; only 'gemm' is. {INSTEAD}")
    _bits(q, 4)
    q.only("zero_point", True)
    return Scheme("awq", 4, _group(q))


def _gptq(q: Fields) -> Scheme:
    for key in ("checkpoint_format", "format"):
        q.only(key, "gptq", "gptq_v2")
    q.only("is_marlin_format", False)
    q.only("pack_dtype", "int32")
    second = "gptq_v2" in (q.get("checkpoint_format"), q.get("format"))
    return Scheme("gptq", _bits(q, 4, 8), _group(q), zero_shift=0 if second else 1)


def _bits(q: Fields, *read: int) -> int:
    bits = q.integer("bits", most=64)
    if bits not in read:
        raise q.error("bits", f"is {bits}; read are {' and '.join(map(str, read))}. {INSTEAD}")
    return bits


def _group(q: Fields) -> int:
    group = q.integer("group_size", -1, least=-1)
    if group == 0:
        raise q.error("group_size", "is 0; it must be above 0, or -1 for one group of all inputs")
    return group


def _compressed_tensors(q: Fields) -> Scheme:
    q.only("format", *_LAYOUTS)
    q.only("transform_config", {})
    if q.has("sparsity_config"):
        q.section("sparsity_config").only("format", "dense")
    square = SQUARE
    for group in _config_groups(q):
        group.only("format", *_LAYOUTS)
        if group.has("weights"):
            square = _check_weights(group.section("weights")) or square
    return Scheme("compressed-tensors", square=square)


def _config_groups(q: Fields) -> Iterator[Fields]:
    if q.has("config_groups"):
        groups = q.section("config_groups")
        for name in groups.values:
            yield groups.section(name)


def _check_weights(w: Fields) -> tuple[int, int] | None:
    """The size of its squares, where scales are of squares."""
    kind, bits = w.text("type", "int"), w.integer("num_bits", 8, most=64)
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise w.error("num_bits", f"is {bits} of type {kind!r:.20}; read are int of 4 or 8 and float of 8. {INSTEAD}")
    w.only("strategy", *_STRATEGIES)
    w.only("dynamic", False)
    return _square(w, "block_structure") if w.get("strategy") == "block" else None


_READERS = {"compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq, "modelopt": _modelopt}
