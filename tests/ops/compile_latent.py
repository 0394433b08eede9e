"""Compiles the kernels of latent attention in DeepSeek-V2-Lite's sizes, over a cache of int8, for an H200 that need not
be there. Prints for each its name and bytes of shared memory."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.ops.cuda.kernels.latent import latent_kernel
from twostroke.ops.cuda.kernels.latent_decode import few_heads_kernel
from twostroke.ops.cuda.kernels.latent_ends import enter_kernel, latent_store_kernel, leave_kernel

FLOATS = ("part_ptr", "part_max_ptr", "part_sum_ptr", "norm_ptr", "cos_ptr", "sin_ptr", "scales", "sums_ptr")
BRAIN = ("q_ptr", "kv_ptr", "query_ptr", "w_ptr", "out_ptr")
SHAPE = {"HEADS": 16, "HEADS_2": 16, "PLAIN": 128, "PLAIN_2": 128, "LATENT": 512, "LATENT_2": 512, "ROPE": 64,
         "ROPE_2": 64, "HALF": 32, "HALF_2": 32, "CUT": 64, "BLOCK": 16, "BLOCK_N": 64, "TILE_N": 32,
         "PRECISION": "tf32", "PDL": True, "HEADS_T": 16}  # fmt: skip
CASES: list[tuple[Any, dict[str, Any], int]] = [
    (few_heads_kernel, {"STAGES": 3, "LISTED": False}, 4),
    (latent_kernel, {"TILE_M": 64, "STAGES": 2, "PARALLEL": False, "EXACT": False, "LISTED": 2, "EVEN": False}, 8),
    (latent_kernel, {"TILE_M": 32, "STAGES": 2, "PARALLEL": False, "EXACT": True, "LISTED": 2, "EVEN": False}, 8),
    (latent_store_kernel, {"STREAMS": False}, 4),
    (enter_kernel, {}, 4),
    (leave_kernel, {"VALUE": 128, "VALUE_2": 128, "MOST": 128, "SLICE": 64, "SLICES": 8}, 8),
]


def type_of(name: str) -> str:
    if name in FLOATS:
        return "*fp32"
    if name in BRAIN:
        return "*bf16"
    if name == "keys":
        return "*i8"
    if name.endswith("_ptr"):
        return "*i32"
    return "fp32" if name in ("factor", "eps") else "i32"


if __name__ == "__main__":
    for kernel, more, warps in CASES:
        names, constants = kernel.arg_names, SHAPE | more
        signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
        given = {(names.index(name),): value for name, value in constants.items() if name in names}
        aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name][0] == "*"}
        source = ASTSource(kernel, signature, constexprs=given, attrs=aligned)
        options = {"num_warps": warps, "enable_fp_fusion": kernel is few_heads_kernel}
        print(kernel.__name__, triton.compile(source, GPUTarget("cuda", 90, 32), options).metadata.shared)
