"""Compiles the exact attention kernels over caches of eight bits for an H200 that need not be there. Prints for each
its name, its instruction and the order of the inputs: the widths of operands of mma.sync (2 is the order in which they
are given, and wgmma knows no other)."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.ops.compile_latent import SHAPE, type_of
from twostroke.ops.cuda.kernels.exact_attention import attend_kernel
from twostroke.ops.cuda.kernels.latent import latent_kernel

LATENT = SHAPE | {"HEADS": 128, "STAGES": 2, "EXACT": True, "EVEN": False}
HEADS = {"KV_HEADS": 8, "HEAD": 64, "WIDE": 64, "WINDOW": 0, "SOFTCAP": False, "BLOCK": 16, "TILE_N": 64,
         "PRECISION": "tf32", "STAGES": 2, "PDL": True, "FUSED": False, "HALF": 32, "sinks_ptr": None}  # fmt: skip
ALONE, TILES = {"PARALLEL": True, "LISTED": 0}, {"PARALLEL": False, "LISTED": 2}
CASES: list[tuple[Any, dict[str, Any], str, int]] = [
    (latent_kernel, LATENT | ALONE | {"TILE_M": 64, "HEADS_T": 64}, "*i8", 8),
    (latent_kernel, LATENT | TILES | {"TILE_M": 32, "HEADS_T": 32}, "*i8", 8),
    (attend_kernel, HEADS | ALONE | {"HEADS": 24, "TILE_M": 16, "FORMAT": 1}, "*i8", 4),
    (attend_kernel, HEADS | ALONE | {"HEADS": 24, "TILE_M": 16, "FORMAT": 3}, "*fp8e4nv", 4),
    (attend_kernel, HEADS | TILES | {"HEADS": 24, "TILE_M": 128, "FORMAT": 1}, "*i8", 8),
]


def argument(name: str, cache: str) -> str:
    if name in ("keys", "values"):
        return cache
    return "*fp32" if name.endswith("_scales") else "fp32" if name == "softcap" else type_of(name)


if __name__ == "__main__":
    for kernel, constants, cache, warps in CASES:
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else argument(name, cache) for name in names}
        given = {(names.index(name),): value for name, value in constants.items() if name in names}
        aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name][0] == "*"}
        source = ASTSource(kernel, signature, constexprs=given, attrs=aligned)
        options = {"num_warps": warps, "enable_fp_fusion": False}
        text = triton.compile(source, GPUTarget("cuda", 90, 32), options).asm
        instruction = "wgmma" if "wgmma.mma_async" in text["ptx"] else "mma.sync"
        print(kernel.__name__, instruction, *sorted(set(re.findall(r"kWidth = (\d+)", text["ttgir"]))))
