"""Compiles the kernels of DeepSeek V4 in its published sizes for an H200 that need not be there. Prints for each its
name, bytes of shared memory, and products of the tensor cores."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.ops.cuda.kernels.entries import compress_kernel, heads_kernel, keys_kernel, states_kernel
from twostroke.ops.cuda.kernels.experts import route_kernel
from twostroke.ops.cuda.kernels.few_rows import router_kernel
from twostroke.ops.cuda.kernels.listed import listed_kernel, scores_kernel
from twostroke.ops.cuda.kernels.streams import collapse_kernel, expand_kernel, products_kernel

FLOATS = ("norm_ptr", "cos_ptr", "sin_ptr", "biases_ptr", "state_ptr", "sinks_ptr", "base_ptr", "scale_ptr",
          "sums_ptr", "squares_ptr", "logits_ptr", "correction_ptr")  # fmt: skip
WHOLE = ("positions_ptr", "requests_ptr", "contexts_ptr", "tables_ptr", "raw_tables_ptr", "state_tables_ptr",
         "chosen_ptr", "table_ptr", "tokens_ptr", "ids_ptr", "done_ptr")  # fmt: skip
ROUTER = {"EXPERTS": 256, "GROUPS": 1, "G": 1, "S": 256, "KEPT": 1, "BEST": 1, "CHOSEN": 6, "CHOSEN_2": 8, "SCORES": 2,
          "NORMALISED": True, "BIASED": False, "CORRECTED": False, "PDL": True}  # fmt: skip
HEAD = {"PAIRS": 256, "PAIRS_2": 256, "HALF": 32}
STREAMS = {"HIDDEN": 4096, "N": 4, "BLOCK": 1024}
MIXED = STREAMS | {"N_2": 4, "PARTS": 16, "ROUNDS": 20}
LISTED = {"HEADS": 64, "DIM": 512, "DIM_2": 512, "WINDOW": 128, "RAW_SIZE": 16, "TILE_M": 32, "TILE_N": 32, "STAGES": 2,
          "PRECISION": "tf32"}  # fmt: skip
COMPRESS = HEAD | {"STATE_SIZE": 16, "BLOCK_T": 8}
Case = tuple[Any, dict[str, Any], int]
CASES: list[Case] = [
    (heads_kernel, HEAD | {"COUNT": 64, "BACK": False, "BLOCK_H": 8}, 4),
    (heads_kernel, HEAD | {"COUNT": 64, "BACK": True, "BLOCK_H": 8, "norm_ptr": None}, 4),
    (keys_kernel, HEAD | {"SIZE": 16}, 4),
    (states_kernel, {"SIZE": 16, "RATIO": 4, "WIDTH": 2560, "BLOCK": 1024}, 4),
    (compress_kernel, COMPRESS | {"OFFSET": 0, "SIZE": 8, "RATIO": 4, "BEFORE": 4}, 8),
    (compress_kernel, COMPRESS | {"OFFSET": 0, "SIZE": 1, "RATIO": 128, "BEFORE": 0}, 8),
    (listed_kernel, LISTED | {"SIZE": 16, "RATIO": 0, "chosen_ptr": None}, 8),
    (listed_kernel, LISTED | {"SIZE": 1, "RATIO": 128, "chosen_ptr": None}, 8),
    (listed_kernel, LISTED | {"SIZE": 8, "RATIO": 4}, 8),
    (scores_kernel, {"HEADS": 64, "HEADS_2": 64, "DIM": 128, "DIM_2": 128, "RATIO": 4, "SIZE": 8, "LIMIT": 512,
                     "TILE": 64, "PRECISION": "tf32"}, 4),
    (products_kernel, {"K": 16384, "OUTPUTS": 24, "OUTPUTS_2": 32, "PARTS": 16, "PART": 1024, "ROWS": 4,
                       "BLOCK": 64}, 4),
    (collapse_kernel, MIXED | {"LAST": False}, 4),
    (collapse_kernel, MIXED | {"LAST": True}, 4),
    (expand_kernel, STREAMS, 4),
    (route_kernel, ROUTER | {"PARTS": 0, "PARTS_2": 1}, 4),
    (route_kernel, ROUTER | {"table_ptr": None, "tokens_ptr": None, "CORRECTED": True, "PARTS": 2, "PARTS_2": 2}, 4),
    (router_kernel, ROUTER | {"K": 4096, "K_2": 4096, "PARTS": 0, "PARTS_2": 1, "BLOCK_E": 1}, 8),
]  # fmt: skip


def type_of(kernel: triton.JITFunction, name: str) -> str:
    if name in FLOATS or (name == "weights_ptr" and kernel is not scores_kernel):
        return "*fp32"
    if kernel in (products_kernel, collapse_kernel, expand_kernel) and name in ("x_ptr", "w_ptr", "out_ptr"):
        return "*fp32"
    if kernel is scores_kernel and name == "out_ptr":
        return "*i64"
    if name in WHOLE:
        return "*i32"
    if name.endswith("_ptr"):
        return "*bf16"
    return "fp32" if name in ("eps", "norm_eps", "factor", "scale") else "i32"


def compiled(kernel: triton.JITFunction, constants: dict[str, Any], warps: int) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(kernel, name) for name in names}
    given = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name][0] == "*"}
    source = ASTSource(kernel, signature, constexprs=given, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


if __name__ == "__main__":
    for kernel, constants, warps in CASES:
        found = compiled(kernel, constants, warps)
        products = re.findall(r"mma\.sync|wgmma\.mma_async", found.asm["ptx"])
        print(kernel.__name__, found.metadata.shared, len(products))
