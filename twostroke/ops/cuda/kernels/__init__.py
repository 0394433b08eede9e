"""The GPU kernels, in Triton. Each file holds one idea; `ops/cuda.py` decides which kernel serves which case."""
