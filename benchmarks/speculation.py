"""Prompt lookup against no drafts: decode speed on texts that repeat and on texts that do not, and under load.

    python -m benchmarks.speculation

One engine; the setting changes live between answers, so both take turns on the same machine state. "edit": repeat a
given source file; "list": a list with a fixed form; "story" and "chat": nothing to look up. Tokens must be equal. The
oracle rows hold acceptance fixed: a drafter that knows the answer and errs at a given rate, under the same choice of
length.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import save
from twostroke import LLM, SamplingParams
from twostroke.draft.lookup import Lookup
from twostroke.draft.speculate import Guessing, Speculation
from twostroke.types import RequestState
from twostroke.weights.catalog import DEFAULT

SOURCE = Path(__file__).parent / "machine.py"
TEXTS = {
    "edit": f"Here is a file:\n```python\n{SOURCE.read_text()[:2000]}```\nThe same file again:\n```python\n",
    "list": "\n".join(f'{{"id": {i}, "name": "item {i}", "price": 10, "tags": ["new", "sale"]}}' for i in range(12)),
    "story": "Once upon a time there was a",
    "chat": "Explain in a few sentences why the sky is blue and why sunsets are red.",
}
TOKENS = 120


class Oracle(Speculation):
    """The same choice of length; guesses are the true answer with errors."""

    def __init__(self, answer: Sequence[int], errors: float):
        super().__init__()
        self.answer, self.errors, self.random = answer, errors, random.Random(0)

    def propose(self, request: RequestState, most: int) -> Sequence[int]:
        if request.id not in self.of:
            self.of[request.id] = Guessing(self.acceptance)
            self.of[request.id].lookup = Known(self, request.prompt_length)
        return super().propose(request, most)


class Known(Lookup):
    def __init__(self, oracle: Oracle, prompt: int):
        super().__init__()
        self.oracle, self.prompt = oracle, prompt

    def update(self, tokens: Sequence[int]) -> int:
        return 20

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        written = len(tokens) - self.prompt
        right = self.oracle.answer[written : written + most]
        wrong = self.oracle.errors
        return [7 if self.oracle.random.random() < wrong else token for token in right]


def speed(llm: LLM, prompt: Any, streams: int, drafter: Speculation | None) -> tuple[float, list[list[int]], float]:
    """Tokens/s of decode, the tokens, and tokens per step and stream."""
    llm.engine.core.scheduler.drafter = drafter
    before = llm.stats()
    prompts = [prompt] * streams
    outs = llm.generate(prompts, SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True))
    after = llm.stats()
    begin = min(out.timeline.token_times[0] for out in outs)
    end = max(out.timeline.token_times[-1] for out in outs)
    gained = after["accepted_tokens"] - before["accepted_tokens"]
    return streams * TOKENS / (end - begin), [out.token_ids for out in outs], 1 + gained / (streams * TOKENS)


def compare(llm: LLM, prompt: Any, streams: int, drafter: Speculation, rounds: int) -> dict[str, float]:
    without, with_drafts, accepted = [], [], []
    speed(llm, prompt, streams, drafter)  # what is learnt is kept between rounds
    for _ in range(rounds):
        off, tokens, _ = speed(llm, prompt, streams, None)
        on, same, kept = speed(llm, prompt, streams, drafter)
        assert tokens == same, "drafts changed a token"
        without.append(off)
        with_drafts.append(on)
        accepted.append(kept)
    ratios = [on / off for on, off in zip(with_drafts, without, strict=True)]
    return {
        "off": statistics.median(without),
        "on": statistics.median(with_drafts),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "accepted_share": 1 - 1 / statistics.median(accepted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.model, prefix_cache=True)
    result: dict[str, Any] = {"model": args.model, "tokens": TOKENS, "texts": {}, "oracle": {}}
    for name, text in TEXTS.items():
        for streams in (1, 4, 16):
            row = compare(llm, text, streams, Speculation(), args.rounds)
            result["texts"][f"{name} x {streams}"] = row
            print(f"{name} x {streams}: {row['off']:.0f} -> {row['on']:.0f} tokens/s, {row['ratio']:.2f}", flush=True)
    _, answers, _ = speed(llm, TEXTS["story"], 1, None)
    for streams in (1, 4, 16):
        for acceptance in (0.0, 0.3, 0.6, 0.8, 0.95):
            row = compare(llm, TEXTS["story"], streams, Oracle(answers[0], 1 - acceptance), args.rounds)
            result["oracle"][f"{acceptance} x {streams}"] = row
            print(f"acceptance {acceptance} x {streams}: {row['ratio']:.2f}", flush=True)
    save("speculation", "speculation", result)


if __name__ == "__main__":
    main()
