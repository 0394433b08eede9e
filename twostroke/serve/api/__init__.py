"""One file for each API: the payloads that it reads, its routes, and the documents that it answers with.

`chat`, `completions`, `responses`, `anthropic` generate · `tokenize`, `models`, `health` (with metrics) · `admin`
settings, steps, requests · `workers` of a deployment · `answers` the answer cache · `diagnosis` the verdict on this
server · `embeddings`, `rerank` vectors and scores
"""
