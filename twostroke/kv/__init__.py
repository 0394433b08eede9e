"""The KV cache: blocks, their names and their memory (docs/kv.md). Torch-free but for storage, staging, host_memory.

layout.py       how the layers' entries are cut into groups and blocks
blocks.py       the pool: which blocks are held, cached or free
tables.py       the block tables of running requests, one for each group; the search for cached prefixes
addresses.py    names of blocks: a keyed hash, chained from block to block
lending.py      blocks for another engine: held after their request has ended, or copied out before
offload.py      evicted blocks that the host keeps, and the copies to be made
raw_access.py   where the pool lies, and checksums of its blocks, for engines that read each other's pools
storage.py      the memory behind the pool, each layer's view of it, blocks as bytes; host_memory.py: slots on the host;
                staging.py: blocks of a GPU copied through pinned memory
"""
