"""From a plan to device work.

step.py           a plan as the arrays of one step; every runner starts from these
runner.py         the runner of a CPU: forward, logits, choice of tokens
torch_runner.py   the same for a backend that takes tensors
sample.py         from logits to a token
drafting.py       the draft model's part of a step
array_messages.py what the processes of one engine tell each other, arrays included
cuda/             the runner of a GPU
"""
