"""The real default model in float32 writes what transformers writes on the same weights."""

from __future__ import annotations

import pytest
import torch
import transformers

from benchmarks.peers import transformers_llama
from twostroke import LLM, SamplingParams

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at",
    "In 1969, humans",
    "The three primary colours are",
    "Photosynthesis is the process by which",
    "A haiku about autumn:",
    "1, 1, 2, 3, 5, 8,",
    "To bake bread you need",
    "The opposite of hot is",
    "Dear Sir or Madam,",
    "import numpy as np\n",
    "Q: What is 12 times 12?\nA:",
    "The mitochondria is",
    "Shakespeare wrote",
    "My favourite season is",
    "El gato negro",
    "Breaking news:",
    "The meaning of life, according to",
]
NEW_TOKENS = 128


@torch.inference_mode()
def disagreements(
    model: transformers.LlamaForCausalLM, prompt: list[int], answer: list[int]
) -> list[tuple[int, float]]:
    """Positions where transformers' likeliest token after (prompt, answer so far) is not ours, with the distance of its
    two best logits. None of them means: its greedy answer is ours, by induction over the tokens."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    wrong = (logits.argmax(-1) != torch.tensor(answer)).nonzero().flatten().tolist()
    return [(index, float(best[index, 0] - best[index, 1])) for index in wrong]


@pytest.mark.slow
def test_greedy_tokens_equal_transformers(default_model):
    llm = LLM(default_model, dtype="float32")
    ours = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True))
    assert all(len(out.token_ids) == NEW_TOKENS for out in ours)
    model = transformers_llama(default_model)
    ties = 0
    for out in ours:
        wrong = disagreements(model, out.prompt_token_ids, out.token_ids)
        if wrong:
            first, distance = wrong[0]  # what follows has another history
            assert distance < 1e-3, f"differs at token {first} of {llm.tokenizer.decode(out.prompt_token_ids)!r}"
            ties += 1
    assert ties <= 1


def test_the_chat_names_paris(default_model):
    out = LLM(default_model).chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=32, temperature=0)
    )
    assert "Paris" in out.text
    assert out.finish_reason == "stop"
