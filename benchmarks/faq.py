"""A load like that on a page of frequent questions, with the answer cache off, exact and semantic, and its prediction.

    python -m benchmarks.faq [off] [exact] [semantic]     # about two minutes each; JSON and a plot under results/

Topics follow Zipf's law, and each question has one of four wordings; requests come at random times, the same for every
tier. Answers are one sentence of the default model at temperature 0. The server without a cache records its traffic
(--record-questions), and `diagnose` predicts from that what the exact and the semantic tier would do. Its TTFT is the
server's, so it is compared with what the server timed, not with what this client saw. The semantic tier shares nothing
without evidence, and this model answers two wordings so differently that it gets none by itself. So it is given
evidence, as if people had judged the pairs; the shadow checks go on and may withdraw it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.machine import RESULTS, save
from benchmarks.serving_servers import OURS, running
from twostroke.answers.bound import ErrorBound, JudgedPair
from twostroke.answers.evidence import SharedEvidence
from twostroke.answers.guard import KINDS
from twostroke.answers.store import FileStore
from twostroke.bench.client import Target
from twostroke.bench.remote import Admin, diagnose_recorded
from twostroke.cost.simulation.served import Targets
from twostroke.serve.answer_setup import KEY_VARIABLE, digest

DATA = Path(__file__).parent / "data" / "faq.txt"
TIERS = ("off", "exact", "semantic")
REQUESTS, RATE, SKEW = 270, 6.0, 1.1
ERROR = 0.05
TARGETS = {"ttft": 0.25, "tpot": 0.02}  # seconds, of goodput
SYSTEM = "You answer the questions of customers and visitors in one short sentence."
LEVERS = {"exact": "answer-cache", "semantic": "semantic-cache"}
KEY, BELIEVED = "benchmark key of the answer cache", 1000


@dataclass
class Answer:
    sent: float
    first: float
    end: float
    tokens: int
    hit: str | None
    server_ttft: float  # as the server timed it, without this client

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        return (self.end - self.first) / max(1, self.tokens - 1)


def topics() -> list[list[str]]:
    return [line.split("|") for line in DATA.read_text().splitlines()]


def asked(count: int) -> list[tuple[float, str]]:
    """Seconds and questions."""
    rng, known = random.Random(5), topics()
    random.Random(2).shuffle(known)
    weights = [1 / (place + 1) ** SKEW for place in range(len(known))]
    at, made = 0.0, []
    for _ in range(count):
        made.append((at, rng.choice(rng.choices(known, weights)[0])))
        at += rng.expovariate(RATE)
    return made


async def ask(client: httpx.AsyncClient, question: str) -> Answer:
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}], "stream": True,
        "temperature": 0, "max_tokens": 48, "stop": [".", "\n"], "stream_options": {"include_usage": True},
    }  # fmt: skip
    sent, first, last = time.perf_counter(), 0.0, {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            document = json.loads(line[6:])
            last |= document
            choices = document["choices"]
            if not first and choices and choices[0]["delta"].get("content"):
                first = time.perf_counter()
    end = time.perf_counter()
    hit = last.get("answer_cache", {}).get("hit")
    return Answer(sent, first or end, end, last["usage"]["completion_tokens"], hit, last["timings"]["ttft_s"])


async def replay(url: str, load: list[tuple[float, str]]) -> list[Answer]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one(at: float, question: str) -> Answer:
            await asyncio.sleep(at)
            return await ask(client, question)

        return list(await asyncio.gather(*(one(*row) for row in load)))


def believe(file: Path) -> None:
    """Evidence of every kind and similarity, as if people had judged many pairs of wordings."""
    store = FileStore(file, 1000)
    evidence = SharedEvidence(ErrorBound(ERROR), store, digest(KEY.encode()))
    for kind in KINDS:
        for number in range(BELIEVED):
            evidence.add(JudgedPair(f"elsewhere-{number}", kind, 0.8 + 0.2 * number / BELIEVED, True))
    store.close()


@contextmanager
def served(tier: str, folder: str) -> Iterator[str]:
    words = [sys.executable, "-m", "twostroke", "serve", "--port", "18431", "-s", "max_model_len=1024"]
    words += ["--record-questions"] if tier == "off" else ["--answer-cache", tier, "--answer-cache-file"]
    words += [] if tier == "off" else [f"{folder}/{tier}.sqlite", "--answer-cache-error", str(ERROR)]
    if tier == "semantic":
        believe(Path(folder) / f"{tier}.sqlite")
    with running(OURS, words, {**os.environ, KEY_VARIABLE: KEY}) as (url, _):
        yield url


def summary(answers: list[Answer]) -> dict[str, Any]:
    ttft, tpot = (np.array([getattr(one, name) for one in answers]) for name in ("ttft", "tpot"))
    span = max(one.end for one in answers) - min(one.sent for one in answers)
    good = sum(one.ttft <= TARGETS["ttft"] and one.tpot <= TARGETS["tpot"] for one in answers)
    hits = {name: sum(one.hit == name for one in answers) for name in ("exact", "semantic", "coalesced")}
    return {
        "requests": len(answers), "seconds": span, "hits": hits, "hit_rate": sum(hits.values()) / len(answers),
        "ttft_mean": float(ttft.mean()), "ttft_p50": float(np.median(ttft)), "ttft_p95": float(np.quantile(ttft, 0.95)),
        "server_ttft_mean": float(np.mean([one.server_ttft for one in answers])),
        "tpot_mean": float(tpot.mean()), "tpot_p50": float(np.median(tpot)),
        "tokens": sum(one.tokens for one in answers), "tokens_saved": sum(one.tokens for one in answers if one.hit),
        "goodput": good / span,
    }  # fmt: skip


def predicted(url: str) -> dict[str, Any]:
    """What `diagnose` says of both tiers, from what the server recorded."""
    found = diagnose_recorded(Admin(Target(url)), Targets())
    effects = {effect.lever.name: effect for effect in found.effects}
    rejected = {one.lever.name: one.reason for one in found.rejected}
    made: dict[str, Any] = {"sentence": found.sentence}
    for tier, lever in LEVERS.items():
        if lever not in effects:
            made[tier] = {"rejected": rejected.get(lever)}
            continue
        after = effects[lever].predicted.summary
        known = len(effects[lever].after.known)
        made[tier] = {
            "hit_rate": known / after.requests, "server_ttft_mean": after.ttft.mean, "ttft_p95": after.ttft.p95,
            "tpot_mean": after.tpot.mean, "tokens_saved": effects[lever].after.saved,
        }  # fmt: skip
    return made


def measure(tier: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, served(tier, folder) as url:
        asyncio.run(replay(url, [(0.0, "Is anyone there?")]))
        found: dict[str, Any] = {}
        answers = asyncio.run(replay(url, asked(REQUESTS)))
        found |= {"summary": summary(answers), "answers": [asdict(one) for one in answers]}
        if tier == "off":
            found["predicted"] = predicted(url)
        else:
            found["cache"] = httpx.get(f"{url}/twostroke/answers?limit=0").json()["kinds"]
        return found


def compared(runs: dict[str, Any]) -> dict[str, Any]:
    """Predicted over measured."""
    guesses = runs.get("off", {}).get("predicted", {})
    found: dict[str, Any] = {}
    for tier in LEVERS:
        if tier in runs and "tpot_mean" in guesses.get(tier, {}):
            real = runs[tier]["summary"]
            found[tier] = {
                name: guesses[tier][name] / real[name]
                for name in ("hit_rate", "server_ttft_mean", "tpot_mean", "tokens_saved")
                if real[name]
            }
    return found


def plot(runs: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4))
    for tier, run in runs.items():
        times = np.sort([one["first"] - one["sent"] for one in run["answers"]])
        axes[0].step(times, np.arange(1, len(times) + 1) / len(times), where="post", label=tier)
    axes[0].set(xscale="log", xlabel="TTFT, s", ylabel="share of requests", title="time to the first token")
    axes[0].legend()
    names, figures = list(runs), [run["summary"] for run in runs.values()]
    axes[1].bar(names, [1e3 * one["tpot_mean"] for one in figures])
    axes[1].set(title="time per token, mean, ms")
    axes[2].bar(names, [one["tokens_saved"] / one["tokens"] for one in figures])
    axes[2].set(title="tokens saved, share", ylim=(0, 1))
    axes[3].bar(names, [one["goodput"] for one in figures])
    axes[3].set(title="goodput, requests/s")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tiers", nargs="*", help="off, exact, semantic: others are taken from --kept")
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "twostroke-faq.json")
    given = parser.parse_args()
    runs: dict[str, Any] = json.loads(given.kept.read_text()) if given.kept.exists() else {}
    for tier in given.tiers or TIERS:
        runs[tier] = measure(tier)
        given.kept.write_text(json.dumps(runs))
    runs = {tier: runs[tier] for tier in TIERS if tier in runs}
    figures = {tier: {name: value for name, value in run.items() if name != "answers"} for tier, run in runs.items()}
    load = {"requests": REQUESTS, "rate": RATE, "skew": SKEW, "topics": len(topics()), "error": ERROR}
    path = save("faq", "faq", {"load": load, "tiers": figures, "predicted_over_measured": compared(runs)})
    plot(runs, RESULTS / path.with_suffix(".png").name)


if __name__ == "__main__":
    main()
