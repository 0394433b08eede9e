"""Tiny checkpoints in published formats of few bits, written as their tools write them, with what each weight means."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LARGEST = 448.0


class Written(NamedTuple):
    """One matrix: its tensors by the ends of their names, and its values."""

    parts: dict[str, Tensor]
    meant: Tensor


Writer = Callable[[Tensor], Written]


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """(rows, n) codes -> (rows, n · bits / 32) int32, the first in the lowest bits; order: the code of each place."""
    count = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % count))
    places = padded.reshape(len(codes), -1, count)[..., list(order or range(count))]
    whole = sum(places[..., i] << (bits * i) for i in range(count))
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


class Rounded(NamedTuple):
    codes: Tensor  # (out, in)
    zeros: Tensor  # (out, groups)
    scales: Tensor  # (out, groups)
    groups: Tensor  # (in,)

    @property
    def values(self) -> Tensor:
        zeros, scales = (part[:, self.groups].double() for part in (self.zeros, self.scales))
        return ((self.codes - zeros) * scales).float()


def rounded(weight: Tensor, bits: int, group: int, symmetric: bool, shuffled: bool, dtype: torch.dtype) -> Rounded:
    """shuffled: groups of inputs that do not follow each other, as act-order makes them."""
    inputs, most = weight.shape[1], (1 << bits) - 1
    size = inputs if group == -1 else group
    groups = torch.arange(inputs) // size
    if shuffled:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(7))]
    low, high = (torch.zeros(len(weight), inputs // size) for _ in range(2))
    for index in range(inputs // size):
        low[:, index], high[:, index] = weight[:, groups == index].aminmax(dim=1)
    if symmetric:
        scales = (2 * torch.maximum(-low, high) / most).to(dtype)
        zeros = torch.full_like(low, (most + 1) // 2).int()
    else:
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, most).int()
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, most).int()
    return Rounded(codes, zeros, scales, groups)


def gptq(
    bits: int = 4, group: int = 128, symmetric: bool = True, shuffled: bool = False, second: bool = False
) -> Writer:
    def write(weight: Tensor) -> Written:
        made = rounded(weight, bits, group, symmetric, shuffled, torch.float16)
        zeros = made.zeros.T if second else (made.zeros.T - 1) & ((1 << bits) - 1)
        parts = {
            "qweight": words(made.codes, bits).T,
            "qzeros": words(zeros, bits),
            "scales": made.scales.T,
            "g_idx": made.groups.int(),
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }
        return Written(parts, made.values)

    return write


def awq(group: int = 128) -> Writer:
    def write(weight: Tensor) -> Written:
        made = rounded(weight, 4, group, False, False, torch.float16)
        qweight, qzeros = (words(part.T, 4, AWQ_ORDER) for part in (made.codes, made.zeros))
        return Written({"qweight": qweight, "qzeros": qzeros, "scales": made.scales.T}, made.values)

    return write


def packed(bits: int = 4, group: int = 128, symmetric: bool = True, shuffled: bool = False) -> Writer:
    def write(weight: Tensor) -> Written:
        made = rounded(weight, bits, group, symmetric, shuffled, torch.bfloat16)
        parts = {
            "weight_packed": words(made.codes, bits),
            "weight_scale": made.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(made.zeros.T, bits).T
        if shuffled:
            parts["weight_g_idx"] = made.groups.int()
        return Written(parts, made.values)

    return write


def int8(group: int = -1, symmetric: bool = True) -> Writer:
    def write(weight: Tensor) -> Written:
        made = rounded(weight, 8, group, symmetric, False, torch.bfloat16)
        parts = {"weight": (made.codes - 128).to(torch.int8), "weight_scale": made.scales}
        if not symmetric:
            parts["weight_zero_point"] = (made.zeros - 128).to(torch.int8)
        return Written(parts, made.values)

    return write


def fp8(rows: int, columns: int, scale: str = "weight_scale", static: bool = False, flat: bool = False) -> Writer:
    """A scale for each `rows` by `columns`; 0: all of them. flat: without the dimensions of size 1."""

    def write(weight: Tensor) -> Written:
        tall, wide = rows or weight.shape[0], columns or weight.shape[1]
        scales = torch.empty(-(-weight.shape[0] // tall), -(-weight.shape[1] // wide))
        codes, meant = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = slice(tall * i, tall * (i + 1)), slice(wide * j, wide * (j + 1))
                scales[i, j] = weight[place].abs().max() / LARGEST
                codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
                meant[place] = codes[place].float() * scales[i, j]
        parts = {"weight": codes, scale: scales.squeeze() if flat else scales}
        if static:
            parts["input_scale"] = torch.tensor(0.02)
        return Written(parts, meant)

    return write


def compressed(weights: dict[str, Any], layout: str, activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": layout,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def float_weights(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def int_weights(bits: int, strategy: str, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, "dynamic": False, **more}


def gptq_config(bits: int = 4, group: int = 128, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


def awq_config(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
SQUARES = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "fp8 in squares": (fp8(128, 128, "weight_scale_inv"), SQUARES),
    "fp8, one scale, static": (fp8(0, 0, flat=True, static=True), STATIC),
    "fbgemm fp8": (fp8(1, 0), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt fp8": (fp8(0, 0, flat=True, static=True), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "compressed fp8 by output": (fp8(1, 0), compressed(float_weights("channel"), "float-quantized", DYNAMIC)),
    "compressed fp8, one scale": (
        fp8(0, 0, flat=True, static=True),
        compressed(float_weights("tensor"), "naive-quantized", float_weights("tensor")),
    ),
    "compressed fp8 in squares": (
        fp8(128, 128), compressed(float_weights("block", block_structure=[128, 128]), "float-quantized", DYNAMIC)
    ),
    "compressed int8": (int8(), compressed(int_weights(8, "channel"), "int-quantized", int_weights(8, "token"))),
    "compressed int8 in groups": (int8(64), compressed(int_weights(8, "group", group_size=64), "int-quantized")),
    "compressed int8, zero points": (int8(-1, False), compressed(int_weights(8, "channel", False), "int-quantized")),
    "compressed 4 bits": (packed(), compressed(int_weights(4, "group", group_size=128), "pack-quantized")),
    "compressed 4 bits, zero points": (
        packed(4, 32, False), compressed(int_weights(4, "group", False, group_size=32), "pack-quantized")
    ),
    "compressed 4 bits, act-order": (
        packed(4, 64, shuffled=True),
        compressed(int_weights(4, "group", group_size=64, actorder="group"), "pack-quantized"),
    ),
    "compressed 8 bits in words": (packed(8, -1), compressed(int_weights(8, "channel"), "pack-quantized")),
    "gptq": (gptq(), gptq_config()),
    "gptq, groups of 32, zero points": (gptq(4, 32, False), gptq_config(4, 32, sym=False)),
    "gptq, one group": (gptq(4, -1), gptq_config(4, -1)),
    "gptq, act-order": (gptq(4, 128, shuffled=True), gptq_config(4, 128, desc_act=True, checkpoint_format="gptq")),
    "gptq, act-order, zero points": (gptq(4, 32, False, True), gptq_config(4, 32, desc_act=True, sym=False)),
    "gptq_v2": (gptq(4, 64, False, second=True), gptq_config(4, 64, sym=False, checkpoint_format="gptq_v2")),
    "gptq, 8 bits": (gptq(8, 128), gptq_config(8, 128)),
    "awq, groups of 32": (awq(32), awq_config(32)),
    "awq, groups of 64": (awq(64), awq_config(64)),
    "awq": (awq(128), awq_config(128)),
}  # fmt: skip


def rewrite(folder: Path, kind: str) -> dict[str, Tensor]:
    """Codes every matrix inside the layers of a checkpoint. What they mean, by the names they had."""
    write, config = FORMATS[kind]
    tensors, meant = safetensors.torch.load_file(folder / "model.safetensors"), {}
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2 and ".layers." in name]:
        if name.endswith("mlp.gate.weight"):
            continue
        made = write(tensors.pop(name))
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}{end}": part.contiguous() for end, part in made.parts.items()}
        meant[name] = made.meant
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return meant


def mxfp4(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(experts, inputs, outputs) -> blocks and scales as gpt-oss' files hold them, and the rounded values."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    groups = values.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / 6))
    codes = (groups / 2.0 ** exponents[..., None])[..., None].sub(table).abs().argmin(-1)
    blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    rounded = (table[codes] * 2.0 ** exponents[..., None]).flatten(-2).transpose(1, 2)
    return blocks.contiguous(), (exponents + 127).to(torch.uint8).contiguous(), rounded


def code_experts(folder: Path) -> dict[str, Tensor]:
    """Codes the experts of a gpt-oss checkpoint in MXFP4. What they mean, by the names they had."""
    tensors, meant = safetensors.torch.load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj")]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"], meant[name] = mxfp4(tensors.pop(name))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return meant
