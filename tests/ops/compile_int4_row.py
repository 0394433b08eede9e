"""Prints how the product of one row with int4 codes is compiled, for a GPU that need not be there: a line for each of
two matrices, with the tensor cores' instruction and the bytes of shared memory."""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.ops.cuda.kernels.one_row_int4 import form_for, int4_row_kernel

TYPES = dict.fromkeys(("x_ptr", "norm_ptr", "out_ptr"), "*bf16") | dict.fromkeys(("w_ptr", "next_ptr"), "*u8")
TYPES |= {
    "scales_ptr": "*i32",
    "bias_ptr": "*i32",
    "sums_ptr": "*fp32",
    "count_ptr": "*i32",
    "eps": "fp32",
    "ask": "i32",
}
CASES = ((28672, 4096, 1, 2, False), (4096, 14336, 0, 0, True))  # outputs, inputs, before, gate, whether it is added

if __name__ == "__main__":
    for n, k, before, gate, add in CASES:
        segments = k // 128
        form = form_for(segments, gate > 0)
        constants = {
            "N": n, "K": k, "K_2": triton.next_power_of_2(k), "BEFORE": before, "BIAS": False, "ADD": add,
            "GATE": gate, "W": form.warps, "ROUNDS": form.rounds,
            "SPLITS": triton.cdiv(segments, form.warps * form.rounds), "ASK": True, "PDL": True, "FAST": True,
        }  # fmt: skip
        names = [name for name in int4_row_kernel.arg_names if name in TYPES]
        signature = {name: TYPES[name] for name in names} | dict.fromkeys(constants, "constexpr")
        pointers = [number for number, name in enumerate(names) if name.endswith("_ptr")]
        divisible = {(number,): [["tt.divisibility", 16]] for number in pointers}
        source = ASTSource(int4_row_kernel, signature, constexprs=constants, attrs=divisible)
        done = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": form.warps, "num_stages": 1}
        )
        shapes = sorted(set(re.findall(r"mma\.sync\S*", done.asm["ptx"])))
        print(*shapes, done.metadata.shared)
