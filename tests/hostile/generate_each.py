"""Opens and generates from every model file that is named on stdin, in one process. `python -m
tests.hostile.generate_each` answers each line with one word and a reason: "refused" by our own error at the load,
"generated", "failed" for answers that end with an error, or "broken" for anything else."""

from __future__ import annotations

import resource
import sys

from twostroke import LLM, SamplingParams
from twostroke.errors import TwostrokeError

MEMORY = 16 << 30  # bytes of address space: a file must not make the process ask for more


def outcome(path: str) -> str:
    try:
        llm = LLM(path, threads=1, kv_memory=1 << 24, seed=1)
    except TwostrokeError as error:
        return f"refused {error}"
    except Exception as error:
        return f"broken at the load: {error!r}"
    try:
        words = [one_word(llm, params) for params in PARAMS]
    except Exception as error:
        return f"broken while it generates: {error!r}"
    return max(words, key=["generated", "failed"].index)


PARAMS = (
    SamplingParams(max_tokens=3, temperature=0.0),
    SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, n=2, seed=1, logprobs=3, prompt_logprobs=1),
)


def one_word(llm: LLM, params: SamplingParams) -> str:
    try:
        outputs = llm.generate(["Once upon a time", "dog 0123"], params)
    except TwostrokeError:
        return "failed"
    samples = [sample for output in outputs for sample in output.samples]
    assert all(sample.finish_reason in ("stop", "length", "error") for sample in samples)
    return "failed" if any(sample.error for sample in samples) else "generated"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        print(outcome(line.rstrip("\n")).replace("\n", " ")[:500], flush=True)


if __name__ == "__main__":
    main()
