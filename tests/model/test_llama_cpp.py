"""The other models of the catalog answer as llama.cpp does on the same file."""

from __future__ import annotations

import json
import urllib.request

import pytest

from twostroke import LLM, SamplingParams
from twostroke.weights.catalog import fetch

PROMPTS = {
    "qwen2.5-coder-0.5b": ["Once upon a time", "def fibonacci(n):\n", "The capital of France is", "SELECT name FROM"],
    "gemma3-270m": ["Once upon a time", "The capital of France is", "Water boils at", "1, 2, 3, 4,"],
}
NEW_TOKENS = 24
CLOSE = 0.35  # both engines round activations to 8 bits, each in its own way: nats by which a choice may differ


def llama_cpp_greedy(path, prompts: list[list[int]]) -> list[list[int]]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 512
    params.warmup = False
    server = xllamacpp.Server(params)
    answers = []
    for prompt in prompts:
        wanted = {
            "prompt": prompt,
            "n_predict": NEW_TOKENS,
            "temperature": 0,
            "return_tokens": True,
            "ignore_eos": True,
            "samplers": ["temperature"],
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(wanted).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            answers.append(json.load(answer)["tokens"])
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_answers_as_llama_cpp(name):
    path = fetch(name)
    llm = LLM(path, max_model_len=512, kv_dtype="float16")  # the format of llama.cpp's cache
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=5)
    ours = llm.generate(PROMPTS[name], params)
    theirs = llama_cpp_greedy(path, [out.prompt_token_ids for out in ours])
    for out, want in zip(ours, theirs, strict=True):
        assert len(want) == NEW_TOKENS
        for score, token in zip(out.logprobs, want, strict=True):
            if score.token_id == token:
                continue
            if score.token_id in llm.tokenizer.eos_ids:
                break  # told to go on, llama.cpp writes its next best instead of an end token
            near = dict(score.top).get(token)
            assert near is not None and score.logprob - near < CLOSE, (out.text, want)
            break  # a near tie fell the other way; what follows has another history
    if name.startswith("qwen"):
        assert ours[0].prompt_token_ids == [12522, 5193, 264, 882]
