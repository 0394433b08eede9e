"""Prints how the exact product with codes is compiled, for a GPU that need not be there: a line for each tile."""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.ops.cuda.kernels.exact_narrow import narrow_kernel, tile_for
from twostroke.ops.cuda.kernels.narrow_tiles import FP8, INT4, INT8

TYPES = dict.fromkeys(("x_ptr", "out_ptr"), "*bf16") | dict.fromkeys(("tokens", "n_rows", "out_stride"), "i32")
CASES = ((FP8, 1, 4096), (INT8, 33, 28672), (INT4, 17, 4096))  # format, rows, outputs

if __name__ == "__main__":
    for fmt, rows, n in CASES:
        wide = 2048 if fmt == INT4 else 4096
        tile = tile_for(rows, n, wide, fmt)
        constants = {
            "WIDE": wide, "FORMAT": fmt, "ADD": True, "BLOCK_T": tile.rows, "W": tile.warps, "SLICES": tile.slices,
            "STAGES": tile.stages, "PRECISION": "tf32", "PDL": True, "FAST": True,
        }  # fmt: skip
        types = TYPES | {"codes_ptr": "*u8", "scales_ptr": "*i32" if fmt == INT4 else "*fp32"}
        names = [name for name in narrow_kernel.arg_names if name in types]
        signature = {name: types[name] for name in names} | dict.fromkeys(constants, "constexpr")
        divisible = {(number,): [["tt.divisibility", 16]] for number, name in enumerate(names) if name != "tokens"}
        source = ASTSource(narrow_kernel, signature, constexprs=constants, attrs=divisible)
        asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps}).asm
        shapes = sorted(set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.\w+", asm["ptx"])))
        print(*shapes, "kWidth", *sorted(set(re.findall(r"kWidth = (\d+)", asm["ttgir"]))))
