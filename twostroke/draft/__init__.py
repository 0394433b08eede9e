"""Speculative decoding: guesses of what a request writes next, and how many of them a step verifies. Torch-free.

lookup.py     the guess: what followed the same tokens earlier in the prompt or the answer (or: what a grammar forces,
              grammar/forced.py)
answers.py    earlier answers of a tenant, for the same guess
by_model.py   when a draft model writes guesses, and how many
rates.py      learnt from past steps: how often guesses are right, how long steps with more rows take
replay.py     lookup replayed over answers that were written without it: counts for a diagnosis
speculate.py  the choice: as many guesses as raise the expected tokens per second
"""
