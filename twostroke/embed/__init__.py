"""Texts to vectors and scores: the prefill stroke without decode. It never imports torch.

file         what it does
description  what a checkpoint computes: an encoder, a decoder whose last token is the vector, or a cross-encoder
texts        texts and pairs of texts to token ids
encoder      the BERT family
decoder      a generative architecture (Qwen3-Embedding) whose last hidden state is the vector
embedder     `Embedder`: opens a model; `embed` and `rank`
batcher      a thread that computes what several callers ask for in one batch; API keys take turns

A text's vector has the same bits whatever else is in the batch.
"""
