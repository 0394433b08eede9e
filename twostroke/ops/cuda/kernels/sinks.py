"""A sink: one more logit of a query head, in the softmax's maximum and sum, without a value.

A row's sink is added last, by the program that divides by the sum: after all tiles, or after the splits are merged. So
it counts once, however the keys were divided. Kernels take `sinks_ptr`, (heads,) float32, or None for a layer without
sinks. Triton treats None as a constant: such a kernel is compiled as if there were no sinks at all.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_sinks(sinks_ptr, heads):
    """The sinks of these query heads, as kernels count scores: times log2 e. No kernel writes sinks, so they can be
    loaded before the kernel before has ended."""
    return tl.load(sinks_ptr + heads) * LOG2E


@triton.jit
def add_sinks(best, total, acc, sinks):
    """The sum of weights (M,), and the accumulator (M, …), with each row's sink (M,) added. The multiply-add is written
    out, because the exact kernel must not leave it to the compiler."""
    top = tl.maximum(best, sinks)
    shrink = tl.exp2(best - top)
    return tl.fma(total, shrink, tl.exp2(sinks - top)), acc * shrink[:, None]
