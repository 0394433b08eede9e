"""Whether drafts change tokens: the share of prompts whose greedy answers differ with and without drafts, beside the
share between two batch sizes without drafts.

    python -m benchmarks.speculation_same --humaneval HumanEval.jsonl.gz                  # this CPU: 0 % and 0 %
    python -m benchmarks.speculation_same --humaneval HumanEval.jsonl.gz --device cuda    # a GPU, also with --exact

Without `exact=True` a GPU adds in an order that depends on the number of rows, with drafts and without, so near ties
may fall otherwise. Drafts should change no more answers than another batch size does. Prompts ask for a function in
full, with its docstring, so that there is much to look up. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from benchmarks.machine import save
from twostroke import LLM, SamplingParams
from twostroke.weights.catalog import DEFAULT

MANY = 8  # streams
ASK = "Write this function in full, with its docstring.\n```python\n{}```\n\n```python\n"
Answers = list[list[int]]  # tokens of each prompt's


class Asked:
    """The same prompts in batches of one size, with drafts or without."""

    def __init__(self, llm: LLM, prompts: list[str], tokens: int):
        self.llm, self.prompts, self.tokens = llm, prompts, tokens

    def answers(self, batch: int, speculate: bool) -> Answers:
        params = SamplingParams(max_tokens=self.tokens, temperature=0.0, ignore_eos=True, speculate=speculate)
        found: Answers = []
        for start in range(0, len(self.prompts), batch):
            found += [output.token_ids for output in self.llm.generate(self.prompts[start : start + batch], params)]
        return found


def share(these: Answers, those: Answers) -> float:
    return sum(one != other for one, other in zip(these, those, strict=True)) / len(these)


def shares(asked: Asked) -> dict[str, float]:
    one, many = (asked.answers(batch, speculate=False) for batch in (1, MANY))
    return {
        f"1 stream against {MANY}, no drafts": share(one, many),
        "1 stream, drafts against none": share(one, asked.answers(1, speculate=True)),
        f"{MANY} streams, drafts against none": share(many, asked.answers(MANY, speculate=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--humaneval", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--exact", action="store_true", help="on a GPU: one order of additions")
    parser.add_argument("--count", type=int, default=64, help="of prompts")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--json", type=Path, help="instead of a file under results/")
    args = parser.parse_args()
    with gzip.open(args.humaneval, "rt") as lines:
        prompts = [ASK.format(json.loads(line)["prompt"]) for _, line in zip(range(args.count), lines, strict=False)]
    settings: dict[str, Any] = {"device": args.device, "prefix_cache": False, "speculate": "lookup"}
    if args.exact:
        settings["exact"] = True
    with LLM(args.model, **settings) as llm:
        found = shares(Asked(llm, prompts, args.tokens))
        drafts = llm.stats()["drafts"]
    for name, value in found.items():
        print(f"{name}: {value:.1%} of {len(prompts)} prompts differ", flush=True)
    found |= {"prompts": len(prompts), "tokens": args.tokens, "drafts": drafts, "exact": args.exact}
    name = "speculation-same-h200" if args.device == "cuda" else "speculation-same"
    save(name, "speculation_same", found, args.json)


if __name__ == "__main__":
    main()
