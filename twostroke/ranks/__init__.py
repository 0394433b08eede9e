"""Several processes, the ranks, that share the work of each layer of one engine (tensor parallelism).

file       what it does
group      `Ranks`: starts the others, tells them of each step; sums over all of them
rank       one of the others: loads its share, runs the steps that it is told of
cards      the same on GPUs, with a card for each rank
storage    the KV caches of all ranks as one
"""
