"""What a checkpoint's description says, before any weight is read. Torch-free: servers and planners use it."""

from __future__ import annotations

import re
from typing import NamedTuple

from twostroke.model.arch import Arch
from twostroke.model.families import arch_from_config
from twostroke.model.families_gguf import arch_from_gguf
from twostroke.ops.formats import FLOATS, INTEGERS, Stored, dequantize, integers, kept_format, stored_bytes
from twostroke.weights.checkpoint import Checkpoint
from twostroke.weights.published import Coded, assembled

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_EXPERT = re.compile(r"\.experts\.\d|_exps\.")


def load_arch(checkpoint: Checkpoint) -> Arch:
    """The checkpoint's architecture; reads its description and at most a few small tensors."""
    where = checkpoint.path.name
    if checkpoint.kind == "safetensors":
        return arch_from_config(checkpoint.config, f"{where}/config.json")
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}

    def values(name: str) -> list[float]:
        tensor = checkpoint.tensors[name]
        found = integers(tensor) if tensor.format in INTEGERS else dequantize(tensor)
        return [float(value) for value in found.reshape(-1)]

    return arch_from_gguf(checkpoint.config, shapes, values, f"{where} metadata")


def whole_tensors(checkpoint: Checkpoint) -> dict[str, Stored | Coded]:
    """The checkpoint's tensors, those that make up one matrix in a published format put together."""
    return assembled(checkpoint.tensors, checkpoint.scheme, checkpoint.path.name)


class KeptWeights(NamedTuple):
    """The weights of a checkpoint as a kind of device keeps them."""

    bytes: int
    widened: int  # matrices of few bits that become 16-bit floats


def kept_weights(checkpoint: Checkpoint, device: str, decoded: str | None = None) -> KeptWeights:
    """decoded: the float type that codes of few bits become, where one is asked for."""
    total = widened = 0
    for name, tensor in whole_tensors(checkpoint).items():
        by_output = isinstance(tensor, Coded) and tensor.by_output
        kept, shape = kept_format(tensor.format, device, by_output, _EXPERT.search(name) is not None), tensor.shape
        if decoded is not None and tensor.format not in FLOATS and tensor.format not in INTEGERS:
            kept, shape = _DTYPES[decoded], decoded_shape(name, tensor)
        total += stored_bytes(kept, shape)
        widened += kept == "BF16" and tensor.format not in FLOATS
    return KeptWeights(total, widened)


def decoded_shape(name: str, tensor: Stored | Coded) -> tuple[int, ...]:
    """Bytes of a safetensors file hold two codes of MXFP4 each, or a scale, which floats need no more."""
    if tensor.format != "U8":
        return tensor.shape
    return (0,) if name.endswith("_scales") else (*tensor.shape[:-1], 2 * tensor.shape[-1])


def checkpoint_bytes(checkpoint: Checkpoint, device: str = "cpu") -> int:
    return kept_weights(checkpoint, device).bytes
