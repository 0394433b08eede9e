"""Prints the PTX that writing K and V of each narrow format is compiled to, for a GPU that need not be there."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.ops.cuda.kernels.heads import store_head


@triton.jit
def store_kernel(codes, scales, heads, narrow: tl.constexpr):
    index = tl.arange(0, 2)
    store_head(
        codes + index * 64, scales + index, heads + index * 64, index < 2, heads, 0.0, scales, scales, 0,
        64, 64, 0, False, narrow, 1,
    )  # fmt: skip


if __name__ == "__main__":
    for number, element in ((1, "i8"), (3, "fp8e4nv")):
        signature = {"codes": f"*{element}", "scales": "*fp32", "heads": "*bf16", "narrow": "constexpr"}
        source = ASTSource(store_kernel, signature, constexprs={"narrow": number})
        print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
