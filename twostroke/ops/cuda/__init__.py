"""The GPU backend: cuBLAS for large products, Triton kernels for the rest.

backend.py    the ops, and which kernel serves which shape
cuts.py       how a step's requests are divided among the attention kernels; singles.py: those with one new token
weights.py    weights as the kernels take them; kept.py: those that keep a file's codes; copies.py: in floats;
              sending.py: to the device
compressed.py compressed attention, kernel by kernel; streams.py: several residual streams
exact.py      the same with one order of additions for any number of rows (exact=True)
kernels/      the Triton kernels, one idea for each file
    rows             norm, gate, embedding, argmax: one row at a time
    gemv             one row times a matrix of floats; split_rows: a few rows, where outputs are few
    one_row, one_row_int4     one row times a matrix of few bits; narrow_tiles: its operands
    decoded          some rows times a matrix of few bits
    quantized        weights in fp8, int8 and int4: packing, and products of many rows
    experts          which experts a row takes; few_rows: a few rows through theirs
    grouping, grouped         rows in the order of their experts, and multiplied in that order
    four_bits        weights of experts in MXFP4 and int4; few_codes, grouped_codes: products with them
    latent           latent attention in the absorbed form; latent_decode: of one token
    latent_ends      what stands before latent attention and after it
    entries, listed  what compressed attention writes, and attention over lists of entries
    streams          several residual streams: what is read of them, and added
    exact_matmul     products with one order of additions; those of a few rows
    exact_narrow     the same with weights of few bits
    rope, heads      norm and rotate q and k, write K and V; what one head needs for it
    prefill, dense   attention of many new tokens: our tiles, and the vendor's kernel for long runs
    decode           attention of one new token over a cache of floats; cascade: over a shared prefix, read once
    even_decode      the same for tens of requests, cut into parts of equal work
    draft_decode     attention of the few tokens of a verified draft
    tall_decode      the same over int8 and fp8; tall_tiles: its operands
    exact_attention  attention with one order of additions
    sinks            one more logit of each query head, added after all keys
    sample, filters  from logits to tokens; edits: masks and penalties before it; scores: log probabilities
    launch           kernels that start before the one before them ends
"""
