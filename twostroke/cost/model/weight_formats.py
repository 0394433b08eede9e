"""How many bytes a weight takes: in the formats that an engine converts to, and in those in which models are published.

A published format has a width for each part of a model. A step reads the experts that its rows choose, so what a stream
costs depends on which part is narrow, not only on the size of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from twostroke.errors import ConfigError
from twostroke.model.fields import Fields
from twostroke.model.quantization import SQUARE, read_scheme
from twostroke.ops.formats import FORMATS

WEIGHT_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": FORMATS["Q8_0"].bits / 8,
    "int4": FORMATS["Q4_0"].bits / 8,
}


class WeightFormat(NamedTuple):
    """Bytes of a weight by the part of the model that it belongs to."""

    layers: float
    experts: float  # of which a row uses some
    outer: float  # embedding and head
    row_scale: int = 0  # beside each row of a matrix in a layer
    outer_row_scale: int = 0

    @property
    def small(self) -> float:
        """Bytes of a number in norms and biases, which are not quantized."""
        return max(2.0, self.outer)


# On a GPU: codes, and four bytes of scales for every row of a matrix, or for every 32 codes of int4. The embedding and
# the head of a model in few bits are int8.
_ON_GPU = {
    "fp8": WeightFormat(1.0, 1.0, 1.0, 4, 4),
    "int8": WeightFormat(1.0, 1.0, 1.0, 4, 4),
    "int4": WeightFormat(0.5 + 4 / 32, 0.5 + 4 / 32, 1.0, 0, 4),
}
_SQUARES = 1 + 4 / (SQUARE[0] * SQUARE[1])  # fp8 with a float32 scale for a square of weights
_MXFP4 = FORMATS["MXFP4"].bits / 8
_PUBLISHED = {
    "mxfp4": WeightFormat(2.0, _MXFP4, 2.0),
    "fp8-squares": WeightFormat(_SQUARES, _SQUARES, 2.0),
    "fp8-mxfp4": WeightFormat(_SQUARES, _MXFP4, 2.0),
}
PUBLISHED = {
    "mxfp4": "experts in mxfp4, the rest in bfloat16",
    "fp8-squares": "layers in fp8 with a scale for each square, embedding and head in bfloat16",
    "fp8-mxfp4": "layers in fp8 with a scale for each square, experts in mxfp4, embedding and head in bfloat16",
}
# What the engine holds of a file in a published format: it decodes squares (docs/weights.md).
HELD = {"mxfp4": "mxfp4", "fp8-squares": "bfloat16", "fp8-mxfp4": "mxfp4"}
NARROW = ("fp8", "int8", "int4", *PUBLISHED)  # the products are those of 16 bits


def weight_format(precision: str, kind: str = "cpu") -> WeightFormat:
    """Of weights in this precision, as this kind of device stores them."""
    if precision in _PUBLISHED:
        return _PUBLISHED[precision]
    if precision not in WEIGHT_BYTES:
        raise ConfigError(f"precision must be one of {', '.join(WEIGHT_BYTES)}; got {precision!r}.")
    each = WEIGHT_BYTES[precision]
    same = WeightFormat(each, each, each)
    return _ON_GPU.get(precision, same) if kind == "cuda" else same


def published_format(config: Mapping[str, Any], where: str = "config.json") -> str | None:
    """The format in which the checkpoint of this config.json has its weights; None: floats, or one that has no cost of
    its own here."""
    fields = Fields(config, where)
    scheme = read_scheme(fields)
    if scheme is None or scheme.method not in ("mxfp4", "fp8"):
        return None
    if scheme.method == "mxfp4":
        return "mxfp4"
    narrow = fields.text("model_type") == "deepseek_v4" and fields.text("expert_dtype", "fp4") == "fp4"
    return "fp8-mxfp4" if narrow else "fp8-squares"
