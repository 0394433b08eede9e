"""Files of models: found, checked, and packed for a backend.

catalog.py       models with a short name; sources.py: their downloads; lock.py, verified.py: one at a time, checked
checkpoint.py    from what a user types to an opened checkpoint
gguf.py          GGUF files; safetensors.py: safetensors folders; files.py: mapped files and bounded JSON
describe.py      architecture and bytes of a checkpoint, without its weights; fingerprint.py: which weights they are
generation.py    how a model samples where a caller says nothing about it
load.py          from a checkpoint to a model on a device; quantize.py: int8 and int4 from wider weights
latent.py        the matrices of latent attention; compressed.py: those of compressed attention
published.py     formats of few bits in safetensors; grids.py, fp8.py, mxfp4.py: their codes; scales.py: their scales
"""
