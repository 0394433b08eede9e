"""llama.cpp's greedy tokens and their logarithms of probabilities, from a process of its own: it may abort, and it logs
a lot.

python -m tests.model.llama_logprobs MODEL.gguf < prompts.json > answers.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

TOP = 20  # of the next token's candidates, the best


def llama_logprobs(model: Path, prompts: list[list[int]], count: int) -> list[list[tuple[int, dict[int, float]]]]:
    """For each prompt `count` tokens, each with the best candidates in its place. Floats are not rounded: cache and
    weights have 32 bits where the file has."""
    asked = json.dumps({"prompts": prompts, "count": count})
    command = [sys.executable, "-m", "tests.model.llama_logprobs", str(model)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return [[(token, {int(t): p for t, p in top}) for token, top in answer] for answer in found]


def _main() -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 512, 1, 1
    params.warmup, params.fit_params, params.port, params.verbosity = False, False, 0, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    asked = json.load(sys.stdin)

    def answer(prompt: list[int]) -> list[Any]:
        wanted = {
            "prompt": prompt,
            "n_predict": asked["count"],
            "temperature": 0,
            "n_probs": TOP,
            "ignore_eos": True,
            "samplers": ["temperature"],
            "cache_prompt": False,
        }
        body = json.dumps(wanted).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/completion", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            places = json.load(reply)["completion_probabilities"]
        return [[one["id"], [[top["id"], top["logprob"]] for top in one["top_logprobs"]]] for one in places]

    print(json.dumps([answer(prompt) for prompt in asked["prompts"]]), flush=True)


if __name__ == "__main__":
    _main()
