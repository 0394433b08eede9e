"""The runner of a GPU.

runner.py          launches steps, two in flight; captures shapes that occur again as graphs
capture.py         graphs captured a few layers at a time; draft_chain.py: the passes of a draft model
steps.py           the shape of a step, and its arrays padded to it; batches.py: the same on the device
ranked.py          steps of a model that is divided among several cards; collective.py: what these give each other
buckets.py         the row counts that steps are padded to
shared_prefix.py   streams that hold the same leading blocks
choosing.py        tokens whose logits are not enough; edits.py: what changes them; scores.py: what is reported
staging.py         a step's numbers in one pinned copy
kernel_cache.py    where compiled kernels are kept
variants.py        the variants of attention that steps can meet
request_count.py   how many requests run at once, from measured steps
spare_memory.py    copies of narrow weights in floats, where the KV cache can spare their memory
warm_up.py         compiles kernels before the first request; sizes the KV cache after the largest step
"""
