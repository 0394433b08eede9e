"""Programmatic dependent launch: a kernel may start, and ask for what depends on nobody, before the one ahead ends.

Every kernel launched so waits before it touches anything another kernel writes, so the chain stays ordered.
"""

from __future__ import annotations

import os
from threading import Thread

import triton
import triton.language as tl
from triton.language.extra import cuda as _cuda
from triton.runtime import driver

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PDL = not INTERPRETED
EARLY = {"launch_pdl": True} if PDL else {}  # the launch option
gdc_wait = _cuda.gdc_wait
gdc_launch_dependents = _cuda.gdc_launch_dependents

__all__ = [
    "EARLY", "FETCH_BYTES", "INTERPRETED", "PDL", "ask_ahead", "gdc_launch_dependents", "gdc_wait", "triton", "wake_driver",
]  # fmt: skip


def wake_driver() -> None:
    """In the background: before its first kernel Triton has a C compiler make what it talks to the device with."""
    Thread(target=lambda: driver.active.utils, daemon=True).start()


FETCH_BYTES = tl.constexpr(4096)  # bytes that the second-level cache is asked for at a time


@triton.jit
def ask_ahead(ptr, mine, turn, count):
    """Ask the second-level cache for `count` pieces of what begins at ptr, in turns with the other programs, so that
    what all of them want first comes first. One thread does."""
    at = ptr.to(tl.pointer_type(tl.int8), bitcast=True) + mine * FETCH_BYTES
    for _ in tl.range(count, num_stages=1):
        tl.inline_asm_elementwise(
            """{ .reg .pred %one; .reg .u32 %thread;
            mov.u32 %thread, %tid.x; setp.eq.u32 %one, %thread, 0;
            @%one cp.async.bulk.prefetch.L2.global [$1], 4096;
            mov.u32 $0, 0; }""",
            "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        at += turn * FETCH_BYTES
