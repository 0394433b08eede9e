"""Drafts on real prompts, one stream on this CPU: none, lookup, a draft model, and the engine's own choice among them.

    python -m benchmarks.speculation_texts --humaneval HumanEval.jsonl.gz --chat mt_bench_question.jsonl
    … --model qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b --llama BUILD/bin

Kinds of prompts: "edit" (write a file again with one change), "humaneval" (write a function in full, with its
docstring), "later" (more such functions, when each mode has learnt from the first ones) and "chat" (first turns of
MT-Bench, in the model's chat format). The modes take turns on one engine, prompt
by prompt, and their tokens must be equal. Each mode keeps what it learns from prompt to prompt, as a server does;
earlier answers are forgotten, and each mode reads the prompt anew, the draft model too. With --draft, the cost model
predicts the gain of the draft model at the share of right guesses that was measured: for the best length, and for the
drafts as the engine made them, with the steps between them. Both models are calibrated before the runs and after them:
where the two predictions differ much, the machine was disturbed.
With --llama, llama.cpp answers the same prompts from the same files: llama-lookup with 8 and with no guesses, and
llama-speculative-simple with 4. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import save
from benchmarks.speculation import Engine, Run
from twostroke import LLM
from twostroke.bench.calibrate import calibrate
from twostroke.cost.model.drafts import DraftQuality, DraftSource, best_length, right_for, verify_seconds
from twostroke.cost.model.roofline import Roofline, model_cost
from twostroke.draft.answers import EarlierAnswers
from twostroke.draft.rates import MODEL
from twostroke.draft.speculate import Speculation, make_drafter, never_forced
from twostroke.text.conversation import render_conversation
from twostroke.weights.catalog import DEFAULT, fetch
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.describe import checkpoint_bytes

Prompts = dict[str, list[str]]  # by kind
FILES = {"machine.py": ("save", "store"), "raw_client.py": ("Exchange", "Conversation")}  # name -> what is renamed
SPEED = re.compile(r"decoded\s+\d+ tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s")


def prompts_of(args: argparse.Namespace, llm: LLM) -> Prompts:
    with gzip.open(args.humaneval, "rt") as lines:
        functions = [json.loads(line)["prompt"] for _, line in zip(range(2 * args.count), lines, strict=False)]
    asked = args.chat.read_text().splitlines()
    every = max(1, len(asked) // args.count)
    questions = [json.loads(line)["turns"][0] for line in asked[::every]]
    ask = "Write this function in full, with its docstring.\n```python\n{}```\n\n```python\n"
    return {
        "edit": [edit(name, *names) for name, names in FILES.items()],
        "humaneval": [ask.format(text) for text in functions[: args.count]],
        "later": [ask.format(text) for text in functions[args.count :]],
        "chat": [chat(llm, text) for text in questions[: args.count]],
    }


def chat(llm: LLM, text: str) -> str:
    assert llm.tokenizer.chat is not None
    return render_conversation(llm.tokenizer.chat, [{"role": "user", "content": text}])


def edit(name: str, old: str, new: str) -> str:
    text = (Path(__file__).parent / name).read_text()[:1500]
    return (
        f"Here is a file:\n```python\n{text}```\nThe same file, with `{old}` renamed to `{new}`:\n```python\n"
        f"{text[:40]}"
    )


def run_modes(
    engine: Engine, kinds: dict[str, list[list[int]]], modes: dict[str, Speculation | None]
) -> dict[str, dict[str, list[Run]]]:
    """kind -> mode -> one run for each prompt."""
    found: dict[str, dict[str, list[Run]]] = {}
    for kind, prompts in kinds.items():
        rows = found[kind] = {mode: list[Run]() for mode in modes}
        for prompt in prompts:
            for mode, drafter in modes.items():
                if drafter is not None:
                    drafter.earlier = EarlierAnswers()
                rows[mode].append(engine.run([prompt], drafter))
            assert all(runs[-1].tokens == rows["off"][-1].tokens for runs in rows.values()), "drafts changed a token"
        for mode, runs in rows.items():
            speeds = " ".join(f"{run.speed:.1f}" for run in runs)
            print(f"{kind:10} {mode:7} {gain(runs, rows['off']):5.2f}  tokens/s: {speeds}", flush=True)
    return found


def gain(runs: list[Run], off: list[Run]) -> float:
    """The time of all answers without drafts over that with them."""
    return sum(1 / run.speed for run in off) / sum(1 / run.speed for run in runs)


def summary(rows: dict[str, list[Run]]) -> dict[str, Any]:
    return {
        mode: {
            "gain": gain(runs, rows["off"]),
            "tokens_per_s": [run.speed for run in runs],
            "least": min(run.speed / off.speed for run, off in zip(runs, rows["off"], strict=True)),
            "guesses_in_a_draft": statistics.fmean(run.drafted for run in runs),
            "accepted": sum(run.accepted for run in runs),
            "drafts": sum(run.drafts for run in runs),
        }
        for mode, runs in rows.items()
    }


def roofline_of(model: str) -> Roofline:
    llm = LLM(model, max_model_len=2048)
    stored = checkpoint_bytes(open_checkpoint(fetch(model)), "cpu")
    found = calibrate(llm, model, stored)
    line = Roofline(model_cost(llm.arch, "float32", stored), llm.settings.layout, found.rates)
    llm.close()
    return line


def predict(
    lines: list[Roofline], prompts: list[list[int]], modes: dict[str, list[Run]], written: int, learnt: float
) -> dict[str, float]:
    """The gain of the best length at the measured share of right guesses, and the measured gain. lines: of the target
    and of the draft model. The accepted tokens of each draft give the chance of one guess. learnt: the chance that the
    engine assumes, for runs in which nothing was drafted because it did not pay."""
    target, draft = lines
    runs, context = modes["draft"], round(statistics.fmean(map(len, prompts))) + written // 2
    drafts, right = sum(run.drafts for run in runs), learnt
    drafted, accepted = sum(run.drafted * run.drafts for run in runs), sum(run.accepted for run in runs)
    if drafts:
        right = right_for(accepted / drafts, round(drafted / drafts))
    best = best_length(target, DraftQuality((DraftSource(1.0, right),), 2, draft), 1, context)
    step = target.decode_seconds(1, context)
    plain = len(runs) * (written - 1) - drafts - accepted  # steps
    verified = verify_seconds(target, 1, context, round(drafted / max(1, drafts)))
    spent = plain * step + drafts * verified + drafted * draft.decode_seconds(1, context)
    as_drafted = len(runs) * (written - 1) * step / spent
    predicted, measured = step / best.tpot, gain(runs, modes["off"])
    print(f"the draft model's gain: predicted {predicted:.2f}, as drafted {as_drafted:.2f}, measured {measured:.2f}")
    return {
        "right": right, "length": best.length, "predicted": predicted, "as_drafted": as_drafted, "measured": measured
    }  # fmt: skip


def llama_speeds(args: argparse.Namespace, prompts: Prompts) -> dict[str, dict[str, list[float]]]:
    """kind -> program -> tokens per second of each prompt."""
    target = ["-m", str(fetch(args.model)), "-t", "2", "-n", str(args.tokens), "--temp", "0", "-c", "2048"]
    programs = {
        "off": [args.llama / "llama-lookup", *target, "--spec-draft-n-max", "0"],
        "lookup": [args.llama / "llama-lookup", *target, "--spec-draft-n-max", "8"],
    }
    if args.draft:
        drafts = ["-md", str(fetch(args.draft)), "--spec-type", "draft-simple", "--spec-draft-n-max", "4"]
        programs["draft"] = [args.llama / "llama-speculative-simple", *target, *drafts]
    found: dict[str, dict[str, list[float]]] = {}
    for kind, texts in prompts.items():
        rows = found[kind] = {name: list[float]() for name in programs}
        for text in texts:
            for name, command in programs.items():
                rows[name].append(one_speed([str(part) for part in command], text))
        for name, speeds in rows.items():
            print(f"{kind:10} llama.cpp {name:7} {' '.join(f'{speed:.1f}' for speed in speeds)}", flush=True)
    return found


def one_speed(command: list[str], text: str) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        done = subprocess.run([*command, "-f", file.name], capture_output=True, text=True, errors="replace")
    matches = SPEED.findall(done.stdout + done.stderr)
    if not matches:
        raise SystemExit(f"{command[0]} printed no speed: {done.stderr[-500:]}")
    return float(matches[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--humaneval", type=Path, required=True)
    parser.add_argument("--chat", type=Path, required=True, help="MT-Bench's questions")
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--draft", help="a draft model of the same vocabulary")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--count", type=int, default=6, help="of functions, and of questions")
    parser.add_argument("--tokens", type=int, default=120, help="of each answer")
    parser.add_argument("--json", type=Path, help="instead of a file under results/")
    args = parser.parse_args()

    pair = (args.model, args.draft) if args.draft else ()
    before = [roofline_of(name) for name in pair]
    drafting = {"draft_model": args.draft} if args.draft else {}
    llm = LLM(args.model, max_model_len=2048, prefix_cache=False, **drafting)
    core, texts = llm.engine.core, prompts_of(args, llm)
    names = ("lookup", "draft", "auto") if args.draft else ("auto",)
    modes: dict[str, Speculation | None] = {"off": None}
    modes |= {name: make_drafter(name, "cpu", never_forced, core.scheduler.draft_share) for name in names}
    tokens = {kind: [llm.tokenizer.encode(text) for text in each] for kind, each in texts.items()}
    runs = run_modes(Engine(core, args.tokens), tokens, modes)
    llm.close()
    found: dict[str, Any] = {"model": args.model, "draft": args.draft, "tokens": args.tokens}
    found["texts"] = {kind: summary(rows) for kind, rows in runs.items()}
    drafter = modes.get("draft")
    if drafter is not None:
        learnt = drafter.acceptance.rate(MODEL)
        lines = {"before": before, "after": [roofline_of(name) for name in pair]}
        found["predicted"] = {
            kind: {when: predict(line, tokens[kind], runs[kind], args.tokens, learnt) for when, line in lines.items()}
            for kind in ("humaneval", "later")
        }
    if args.llama:
        found["llama.cpp"] = llama_speeds(args, texts)
    save(f"speculation-texts-{args.model}", "speculation_texts", found, args.json)


if __name__ == "__main__":
    main()
