"""Programmatic dependent launch: a kernel may start, and load what no kernel writes, before the kernel before it ends.

Every kernel launched in this way waits before it touches anything that another kernel writes: the order is kept.
"""

from __future__ import annotations

import os
import sys
from threading import Thread

import triton
import triton.language as tl
from triton.language.extra import cuda as _cuda
from triton.runtime import JITFunction, driver

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PDL = not INTERPRETED
EARLY = {"launch_pdl": True} if PDL else {}  # the launch option
gdc_wait = _cuda.gdc_wait
gdc_launch_dependents = _cuda.gdc_launch_dependents

__all__ = [
    "EARLY", "FETCH_BYTES", "INTERPRETED", "PDL", "ask_ahead", "gdc_launch_dependents", "gdc_wait", "hash_functions",
    "prefetch_rows", "triton", "wake_driver",
]  # fmt: skip


def wake_driver() -> None:
    """Starts Triton's driver on a thread: Triton compiles its interface to the device in C before its first kernel."""
    Thread(target=lambda: driver.active.utils, daemon=True).start()


_seen: set[str] = set()  # modules of kernels whose functions are hashed


def hash_functions() -> None:
    """Let Triton hash the functions that kernels call, each after those that it calls itself.

    A compiled kernel is found again by a hash of its source and of the functions it calls. Up to Triton 3.6 the
    constants of a function are part of it only if that function was hashed before. Threads that compile kernels side by
    side hash in any order, so that a start did not find some kernels of the last one, and compiled them again."""
    package = __name__.rpartition(".")[0] + "."
    for name, module in list(sys.modules.items()):  # another thread may be importing: `wake_driver` does
        if not name.startswith(package) or name in _seen:
            continue
        _seen.add(name)
        for function in list(vars(module).values()):
            if isinstance(function, JITFunction):
                _hash_called(function)


def _hash_called(function: JITFunction) -> None:
    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if isinstance(called, JITFunction) and called.hash is None:
            _hash_called(called)
            _ = called.cache_key


FETCH_BYTES = tl.constexpr(4096)  # bytes that one prefetch brings into the L2 cache


@triton.jit
def ask_ahead(ptr, mine, turn, count):
    """Prefetch `count` times FETCH_BYTES of the memory at `ptr` into the L2 cache. Programs take turns (`mine` of
    `turn`), so that the beginning arrives first. One thread of the program does it."""
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


@triton.jit
def prefetch_rows(rows, count):
    """Prefetch the first `count` bytes (a multiple of 16) at each of the pointers `rows` into the L2 cache."""
    size = tl.full(rows.shape, count, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [rows, size], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
