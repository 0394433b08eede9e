"""The GPU kernels, in Triton. Each file holds one idea; `ops/cuda/backend.py` chooses the kernel for each case."""
