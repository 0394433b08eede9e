"""Drafts against no drafts: decode speed by streams, context and share of right guesses, and on real texts.

    python -m benchmarks.speculation           # this CPU, the default model
    python -m benchmarks.speculation --cuda    # a GPU, random weights in the shape of an 8B model

The grid holds the share of right guesses fixed: an oracle knows the answer and errs at a given rate, under the engine's
own choice of length. The tokens must be equal. On a CPU off and on have an engine each, and these take turns step by
step: whatever else the machine does then slows both. On a GPU they take turns on one engine, answer by answer. The
head's weights there are such that every token has one successor by far: rounding decides nothing, and a draft model of
another shape with the same successors, a share of them exchanged, is right at that rate.
Steps of fewer streams are captured first: with drafts some streams end before others. A cell whose ratio is below 0.99
gets twice as many rounds more; the median is over all of them.
"texts" are prompts with something to look up ("edit", "list") and without ("story", "chat"); earlier answers are
forgotten before each. The last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import save
from twostroke import LLM, SamplingParams
from twostroke.draft.answers import EarlierAnswers
from twostroke.draft.lookup import Lookup
from twostroke.draft.speculate import STREAMS, Guessing, Proposal, Speculation, make_drafter, never_forced
from twostroke.engine.core import Core
from twostroke.types import Request, RequestState
from twostroke.weights.catalog import DEFAULT

SOURCE = Path(__file__).parent / "machine.py"
TEXTS = {
    "edit": f"Here is a file:\n```python\n{SOURCE.read_text()[:2000]}```\nThe same file again:\n```python\n",
    "list": "\n".join(f'{{"id": {i}, "name": "item {i}", "price": 10, "tags": ["new", "sale"]}}' for i in range(12)),
    "story": "Once upon a time there was a",
    "chat": "Explain in a few sentences why the sky is blue and why sunsets are red.",
}
CLOSE = 0.99  # a ratio below this is measured again
SHORT = 6  # tokens
WRONG = 7  # a token that the oracle puts where it errs


class Oracle(Speculation):
    """The same choice of length; guesses are the true answer with errors."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], errors: float, most_streams: int):
        super().__init__(text_streams=most_streams, most_streams=most_streams)
        self.answers, self.errors, self.random = answers, errors, random.Random(0)

    def _known(self, request: RequestState) -> Guessing:
        if request.id not in self.of:
            answer = self.answers[tuple(request.tokens[: request.prompt_length])]
            self.of[request.id] = Guessing(self.acceptance, Known(self, request.prompt_length, answer))
        return self.of[request.id]


class Fixed(Oracle):
    """Always so many guesses, all wrong."""

    def __init__(self, count: int):
        super().__init__({}, 1.0, 32)
        self.count = count
        self.guessing = Guessing(self.acceptance, Wrong())

    def begin(self, streams: Sequence[RequestState]) -> bool:
        self.streams = len(streams)
        self.texts = {request.id: Proposal(3, self.count, 0.0, 0.0) for request in streams} if self.count else {}
        return True

    def _known(self, request: RequestState) -> Guessing:
        return self.guessing


class Wrong(Lookup):
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        return [WRONG] * most


class Known(Lookup):
    def __init__(self, oracle: Oracle, prompt: int, answer: Sequence[int]):
        super().__init__()
        self.oracle, self.prompt, self.answer = oracle, prompt, answer
        self.length = 20  # as after a long match

    def update(self, tokens: Sequence[int]) -> int:
        return self.length

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        written = len(tokens) - self.prompt
        right = self.answer[written : written + most]
        return [WRONG if self.oracle.random.random() < self.oracle.errors else token for token in right]


class Run(NamedTuple):
    speed: float  # tokens per second of decode, all streams
    tokens: list[list[int]]
    drafted: float  # guesses in a draft
    drafts: int
    accepted: int  # guesses that were right


Begun = tuple[list[RequestState], tuple[int, int, int]]
Cores = tuple[Core, Core]  # without drafts; with them


def ratio(both: list[tuple[Run, Run]]) -> float:
    """Of the speeds of a round."""
    return statistics.geometric_mean(on.speed / off.speed for off, on in both)


class OwnTime:
    """A clock that stands still while another engine's step runs."""

    def __init__(self) -> None:
        self.before, self.began = 0.0, 0.0  # seconds that have run; when it began to run, 0: it stands still

    def __call__(self) -> float:
        return self.before + (time.perf_counter() - self.began if self.began else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.began = time.perf_counter()
        yield
        self.before, self.began = self(), 0.0


class Engine:
    """Requests of one core, without text. beside: another core with the same weights, for the runs without drafts."""

    def __init__(self, core: Core, count: int, beside: Core | None = None):
        self.core, self.beside, self.count, self.ids = core, beside, count, 0

    def run(self, prompts: Sequence[Sequence[int]], drafter: Speculation | None) -> Run:
        begun = self._begin(self.core, prompts, drafter)
        while not self.core.idle:
            self.core.step()
        return self._ended(self.core, *begun)

    def _in_turns(self, prompts: Sequence[Sequence[int]], drafter: Speculation, cores: Cores) -> tuple[Run, Run]:
        """A step of the first core without drafts, then one of the second with them. Each core's time is that of its
        own steps."""
        clocks = [OwnTime(), OwnTime()]
        for core, clock in zip(cores, clocks, strict=True):
            core.clock, core.collected = clock, 0.0
        begun = [self._begin(core, prompts, one) for core, one in zip(cores, (None, drafter), strict=True)]
        while not all(core.idle for core in cores):
            for core, clock in zip(cores, clocks, strict=True):
                with clock.running():
                    core.step()
        off, on = (self._ended(core, *one) for core, one in zip(cores, begun, strict=True))
        for core in cores:
            core.clock, core.collected = time.perf_counter, 0.0
        return off, on

    def _begin(self, core: Core, prompts: Sequence[Sequence[int]], drafter: Speculation | None) -> Begun:
        core.scheduler.drafter = drafter
        counters = core.scheduler.counters
        before = (counters.drafts, counters.drafted_tokens, counters.accepted_tokens)
        return [self._submit(core, prompt) for prompt in prompts], before

    def _ended(self, core: Core, states: list[RequestState], before: tuple[int, int, int]) -> Run:
        counters = core.scheduler.counters
        begin = max(state.timeline.token_times[0] for state in states)
        end = max(state.timeline.token_times[-1] for state in states)
        written = sum(sum(moment > begin for moment in state.timeline.token_times) for state in states)
        drafts, drafted = counters.drafts - before[0], counters.drafted_tokens - before[1]
        tokens = [state.tokens[state.prompt_length :] for state in states]
        accepted = counters.accepted_tokens - before[2]
        return Run(written / (end - begin), tokens, drafted / max(1, drafts), drafts, accepted)

    def _submit(self, core: Core, prompt: Sequence[int]) -> RequestState:
        params = SamplingParams(max_tokens=self.count, temperature=0.0, ignore_eos=True)
        self.ids += 1
        limit = len(prompt) + self.count
        return core.submit(Request(self.ids, tuple(prompt), params, 0, core.clock(), limit))

    def compare(
        self, prompts: Sequence[Sequence[int]], drafter: Speculation, rounds: int, again: bool
    ) -> dict[str, float]:
        """again: the drafter has seen such streams before, and keeps what it has learnt."""
        if again:
            self._pair(prompts, drafter)
        pairs = [self._pair(prompts, drafter) for _ in range(rounds)]
        if again and statistics.median(map(ratio, pairs)) < CLOSE:
            pairs += [self._pair(prompts, drafter) for _ in range(2 * rounds)]
        ratios = list(map(ratio, pairs))
        return {
            "off": statistics.median(off.speed for both in pairs for off, _ in both),
            "on": statistics.median(on.speed for both in pairs for _, on in both),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "guesses_in_a_draft": statistics.fmean(on.drafted for both in pairs for _, on in both),
            "drafts_of_all_steps": statistics.fmean(on.drafts for both in pairs for _, on in both)
            / (len(prompts) * self.count),
            "rounds": len(pairs),
        }

    def _pair(self, prompts: Sequence[Sequence[int]], drafter: Speculation) -> list[tuple[Run, Run]]:
        """Without drafts and with them. Two cores change places: one may have its memory in a better place."""
        drafter.earlier = EarlierAnswers()  # the same question does not come again
        if self.beside is None:
            both = [(self.run(prompts, None), self.run(prompts, drafter))]
        else:
            first = self._in_turns(prompts, drafter, (self.beside, self.core))
            drafter.earlier = EarlierAnswers()
            both = [first, self._in_turns(prompts, drafter, (self.core, self.beside))]
        assert all(off.tokens == on.tokens for off, on in both), "drafts changed a token"
        return both

    def run_fewer(self, prompts: Sequence[Sequence[int]]) -> None:
        """Short answers of 1, 2, 4, … streams."""
        usual, self.count = self.count, SHORT
        for fewer in range(len(prompts).bit_length()):
            self.run(prompts[: 1 << fewer], None)
        self.count = usual


def grid(engine: Engine, vocab: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    found = {}
    for context in args.contexts:
        for streams in args.streams:
            prompts = random_prompts(streams, context, vocab)
            engine.run_fewer(prompts)
            tokens = engine.run(prompts, None).tokens
            answers = {tuple(prompt): answer for prompt, answer in zip(prompts, tokens, strict=True)}
            for acceptance in args.acceptances:
                drafter = Oracle(answers, 1 - acceptance, args.most or STREAMS["cuda" if args.cuda else "cpu"])
                row = engine.compare(prompts, drafter, args.rounds, again=True)
                found[f"{streams} x {context}, {acceptance:.0%} right"] = row
                print(f"{streams:3d} streams x {context:5d} tokens, {acceptance:4.0%} right: {row['ratio']:.2f} "
                      f"(least {row['least']:.2f}), k {row['guesses_in_a_draft']:.1f}", flush=True)  # fmt: skip
    return found


def texts(llm: LLM, engine: Engine, rounds: int) -> dict[str, dict[str, float]]:
    found = {}
    for name, text in TEXTS.items():
        row = found[name] = engine.compare([llm.tokenizer.encode(text)], Speculation(), rounds, again=False)
        print(f"{name}: {row['off']:.0f} -> {row['on']:.0f} tokens/s, {row['ratio']:.2f}", flush=True)
    return found


def on_a_gpu(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.gpu_rig import make_rig  # torch and Triton only where they are wanted
    from benchmarks.random_weights import LLAMA_1B, LLAMA_8B
    from benchmarks.successors import give_successors

    drafts = LLAMA_1B if args.draft else None
    rig = make_rig(LLAMA_8B, exact=args.exact, draft_arch=drafts, max_model_len=16_384)
    give_successors(rig.model, 0.0)
    engine, found = Engine(rig.core, args.tokens), dict[str, Any]()
    found["model"] = f"8B shape, random weights{', exact' if args.exact else ''}"
    if rig.draft is not None:
        share = LLAMA_1B.used_weights / LLAMA_8B.used_weights
        found["draft"] = draft_rows(engine, rig, share, args, give_successors)
    else:
        found["steps"] = step_times(engine, LLAMA_8B.vocab, args)
        found["grid"] = grid(engine, LLAMA_8B.vocab, args)
    return found


def step_times(engine: Engine, vocab: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds on the device of a step with 0, 4 and 16 guesses for each stream, and the time from step to step."""
    found = {}
    for context in args.contexts:
        for streams in (1, 16):
            prompts = random_prompts(streams, context, vocab)
            for count in (0, 4, 16):
                for _ in range(2):
                    engine.run(prompts, Fixed(count))
                steps = [step for step in engine.core.steplog or () if step.tokens == streams * (1 + count)][-40:]
                apart = [after.launched - step.launched for step, after in pairwise(steps)]
                row = found[f"{streams} x {context}, {count} guesses"] = {
                    "device_ms": statistics.median(step.seconds for step in steps) * 1e3,
                    "apart_ms": statistics.median(apart) * 1e3,
                }
                print(f"{streams:3d} streams x {context:5d} tokens, {count:2d} guesses: {row['device_ms']:.2f} ms, "
                      f"{row['apart_ms']:.2f} from step to step", flush=True)  # fmt: skip
    return found


def draft_rows(engine: Engine, rig: Any, share: float, args: argparse.Namespace, give: Any) -> dict[str, Any]:
    """With a draft model that is right at these rates."""
    found = {}
    for acceptance in args.acceptances:
        give(rig.draft, 1 - acceptance)
        for streams in args.streams:
            prompts = random_prompts(streams, args.contexts[0], rig.arch.vocab)
            drafter = make_drafter("draft", "cuda", never_forced, share)
            assert drafter is not None
            row = found[f"{streams}, {acceptance:.0%} right"] = engine.compare(
                prompts, drafter, args.rounds, again=True
            )
            print(f"draft model, {streams:3d} streams, {acceptance:4.0%} right: {row['ratio']:.2f} (least "
                  f"{row['least']:.2f}), k {row['guesses_in_a_draft']:.1f}", flush=True)  # fmt: skip
    return found


def random_prompts(streams: int, context: int, vocab: int) -> list[list[int]]:
    return [[random.Random(i * 1000 + n).randrange(10, vocab) for n in range(context)] for i in range(streams)]


def on_a_cpu(args: argparse.Namespace) -> dict[str, Any]:
    llm, other = LLM(args.model), LLM(args.model)
    engine = Engine(llm.engine.core, args.tokens, other.engine.core)
    found: dict[str, Any] = {"model": args.model, "texts": texts(llm, engine, args.rounds)}
    if args.acceptances:
        found["grid"] = grid(engine, llm.tokenizer.vocab_size, args)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="on a GPU, with random weights")
    parser.add_argument("--exact", action="store_true", help="on a GPU: one order of additions")
    parser.add_argument("--draft", action="store_true", help="on a GPU: a draft model in the shape of a 1B model")
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=120, help="of each answer")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 2048])
    parser.add_argument("--acceptances", type=float, nargs="*", default=[0.0, 0.3, 0.6, 0.8, 0.95])
    parser.add_argument("--most", type=int, help="streams up to which is drafted, instead of the engine's own limit")
    parser.add_argument("--json", type=Path, help="instead of a file under results/")
    args = parser.parse_args()
    found = on_a_gpu(args) if args.cuda else on_a_cpu(args)
    name = "speculation-h200" if args.cuda else "speculation"
    save(name, "speculation", {"tokens": args.tokens, "rounds": args.rounds, **found}, args.json)


if __name__ == "__main__":
    main()
