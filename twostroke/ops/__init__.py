"""Device mathematics: arrays in, arrays out. Imports nothing else of this package.

interface.py   what a backend must offer, and the shapes of its arguments
compressed.py  compressed attention apart from its products; compressed_interface.py: its arguments
streams.py     several residual streams; joined.py: arrays side by side
reference/     the specification in plain torch
cpu/           C++ kernels for x86 and ARM (docs/cpu.md)
cuda/          Triton kernels and cuBLAS (docs/gpu-kernels.md)
formats.py     weights in memory: floats, and ggml's blocks of few bits
arrays.py      from NumPy to a backend's arrays
select.py      the backend for a device
"""
