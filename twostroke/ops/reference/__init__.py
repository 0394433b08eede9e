"""The specification of every op in plain torch, and the backend where no C++ compiler was found.

backend.py    every op, one row at a time, in float64: obvious and slow
cached.py     rotation, the positions a query sees, the keys stored there
latent.py     latent attention
entries.py    compressed attention's products
routing.py    which experts a row uses, and what each counts
kv_codec.py   K and V as the cache stores them: rounding, int8, int4 and fp8 with a scale per token and head
"""
