"""Which backend serves which device. Only the chosen one is imported: all but the native one import torch."""

from __future__ import annotations

import logging

from twostroke.ops.cpu import library
from twostroke.ops.interface import Ops

log = logging.getLogger(__name__)
_DTYPES = ("float32", "float16", "bfloat16")


def make_ops(device: str, dtype: str | None, threads: int, quantize: str | None = None, exact: bool = False) -> Ops:
    """The backend for `device`, weights kept in `dtype` (None: as the backend does best), on `threads` CPU threads.

    quantize: what a GPU packs weights into. A CPU is handed weights that are quantized already.
    exact: a GPU adds in one order for any number of rows. A CPU does so anyway.
    """
    if device == "cuda":
        return _cuda_ops(dtype or "bfloat16", quantize, exact, keep=dtype is None and quantize is None)
    if device != "cpu":
        raise ValueError(f"The device {device!r} is not known here; use 'cpu' or 'cuda'.")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"The dtype {dtype!r} is not known; use one of {', '.join(_DTYPES)}.")
    if threads < 1:
        raise ValueError(f"The number of threads must be at least 1, not {threads}.")
    if library.available():
        from twostroke.ops.cpu.backend import NativeCpuOps

        return NativeCpuOps(threads, weights=dtype or "native")
    from twostroke.ops.reference.backend import ReferenceOps

    log.warning("the native CPU library is not built, so the slow reference runs: python -m twostroke.ops.cpu.build")
    return ReferenceOps()


def _cuda_ops(dtype: str, quantize: str | None, exact: bool, keep: bool) -> Ops:
    """keep: codes that a file holds, where no precision was asked for."""
    import torch

    from twostroke.ops.cuda.backend import CudaOps  # Triton is not installed everywhere
    from twostroke.ops.cuda.kernels.launch import wake_driver

    if quantize not in (None, "fp8", "int8", "int4"):
        raise ValueError(f"A GPU keeps weights in fp8, int8 or int4, not in {quantize!r}.")
    if torch.cuda.is_available():
        wake_driver()
    if not exact:
        return CudaOps(getattr(torch, dtype), quantize=quantize, keep=keep)
    from twostroke.ops.cuda.exact import ExactCudaOps

    return ExactCudaOps(getattr(torch, dtype), quantize=quantize, keep=keep)
