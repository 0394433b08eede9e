"""The GPU backend: cuBLAS for large products, Triton kernels for the rest.

backend.py    the ops, and which kernel serves which shape
exact.py      the same with one order of additions for any number of rows (exact=True)
kernels/      the Triton kernels, one idea a file
"""
