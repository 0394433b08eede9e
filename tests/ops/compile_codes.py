"""Compiles the products with experts of four bits for an H200 that need not be there. Prints for each kernel its name,
tensor-core instructions with weights in registers, scalings of two weights, stores to shared memory, and exchanges
between lanes."""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.ops.cuda.kernels.few_codes import down_codes_kernel, gate_codes_kernel
from twostroke.ops.cuda.kernels.grouped_codes import grouped_down_codes_kernel, grouped_gate_codes_kernel

POINTERS = {"x_ptr": "*bf16", "inner_ptr": "*bf16", "codes_ptr": "*i32", "places_ptr": "*i64", "scales_ptr": "*i32",
            "scale_places_ptr": "*i64", "bias_ptr": "*fp32", "ids_ptr": "*i32", "weights_ptr": "*fp32",
            "out_ptr": "*bf16", "counts_ptr": "*i32", "order_ptr": "*i32"}  # fmt: skip
SHAPE = {"K": 2880, "WIDTH": 2880, "N": 2880, "EXPERTS": 32, "EXPERTS_2": 32, "CHOSEN": 4, "PAIRS": 4, "ACTIVATION": 4,
         "ADD": True, "FORMAT": 4, "W": 4, "BLOCK_M": 64, "STAGES": 3, "PRECISION": "tf32",
         "PDL": True, "FAST": True}  # fmt: skip


def compiled(kernel: triton.JITFunction) -> str:
    names, shape = kernel.arg_names, SHAPE | {"TURNS": 1 if kernel is gate_codes_kernel else 2}
    signature = {name: POINTERS.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): shape[name] for name in names if name in shape}
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in POINTERS}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]


if __name__ == "__main__":
    for kernel in (gate_codes_kernel, down_codes_kernel, grouped_gate_codes_kernel, grouped_down_codes_kernel):
        ptx = compiled(kernel)
        products = re.findall(r"mma\.sync\.aligned\.m16n8k16|wgmma\.mma_async\S* \{[^}]*\}, \{", ptx)
        print(kernel.__name__, len(products), ptx.count("mul.rn.bf16x2"), ptx.count("st.shared"), ptx.count("shfl"))
