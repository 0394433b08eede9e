"""Which backend serves which device."""

from __future__ import annotations

import torch

from twostroke.ops.cpu import TorchCpuOps
from twostroke.ops.interface import Ops
from twostroke.ops.native import library
from twostroke.ops.native_cpu import NativeCpuOps

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def make_ops(device: str, dtype: str | None, threads: int, quantize: str | None = None, exact: bool = False) -> Ops:
    """The backend for `device`, weights kept in `dtype` (None: as the backend does best), on `threads` CPU threads.

    quantize: what a GPU packs weights into. A CPU is handed weights that are quantized already.
    exact: a GPU adds in one order for any number of rows. A CPU does so anyway.
    """
    if device == "cuda":
        from twostroke.ops.cuda import CudaOps  # Triton is not installed everywhere

        if quantize not in (None, "fp8", "int8", "int4"):
            raise ValueError(f"A GPU keeps weights in fp8, int8 or int4, not in {quantize!r}.")
        if exact:
            from twostroke.ops.cuda_exact import ExactCudaOps

            if quantize is not None:
                raise ValueError(f"Products with {quantize} weights are not exact on a GPU: drop quantize or exact.")
            return ExactCudaOps(_DTYPES[dtype or "bfloat16"])
        return CudaOps(_DTYPES[dtype or "bfloat16"], quantize=quantize)
    if device != "cpu":
        raise ValueError(f"The device {device!r} is not known here; use 'cpu' or 'cuda'.")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"The dtype {dtype!r} is not known; use one of {', '.join(_DTYPES)}.")
    if threads < 1:
        raise ValueError(f"The number of threads must be at least 1, not {threads}.")
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if library.available():
        return NativeCpuOps(threads, weights=dtype or "native")
    return TorchCpuOps(_DTYPES[dtype or "float32"])
