"""The semantic answer cache on labelled pairs of questions: how many hits, how many of them wrong.

    python -m benchmarks.answers PAIRS.jsonl.gz [HARD.jsonl.gz] [--limit N]

A file has one pair on each line: [question, question, 1 if the same answer serves both]. The pairs are a stream: the
first question of a pair is asked and its answer stored, then the second is asked. A hit is right if the pair's label
says so. Evidence comes as it does in a server: from pairs that were computed although a similar question was known, and
from a share of the hits. Beside it: one fixed threshold on the same vectors, without a guard, chosen on the same data
so that its error is as near to the bound as it can be. On the hard file (the same words in another order) the bound has
already learnt.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import save
from twostroke.answers import guard
from twostroke.answers.bound import NEAREST, ErrorBound, upper_limit
from twostroke.embed.embedder import Embedder

BOUNDS = (0.005, 0.01, 0.02, 0.05)
SHADOW = 0.05
MODEL = "all-minilm-l6-v2"
Pair = tuple[str, str, bool]


def read(path: Path, limit: int) -> list[Pair]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    pairs = [(str(a), str(b), bool(same)) for a, b, same in map(json.loads, data.decode().splitlines())]
    random.Random(0).shuffle(pairs)
    return pairs[:limit]


def similarities(embedder: Embedder, pairs: list[Pair]) -> np.ndarray:
    texts = [text for a, b, _ in pairs for text in (a, b)]
    tokens = [embedder.tokenizer.encode(text or " ", cut=True) for text in texts]
    order = sorted(range(len(tokens)), key=lambda place: len(tokens[place].ids))
    rows = np.empty((len(tokens), embedder.width), np.float32)
    rows[order] = embedder.run([tokens[place] for place in order])
    return (rows[::2] * rows[1::2]).sum(axis=1)


def stream(pairs: list[Pair], near: np.ndarray, shareable: list[bool], bound: ErrorBound) -> dict[str, Any]:
    chance = random.Random(1)
    hits = wrong = 0
    for number, ((_, _, same), similarity, fits) in enumerate(zip(pairs, near, shareable, strict=True)):
        if not fits or similarity < NEAREST:
            continue
        if bound.allows(str(number), float(similarity)):
            hits += 1
            wrong += not same
            if chance.random() > SHADOW:
                continue
        bound.learn(str(number), float(similarity), same)
    return counted(hits, wrong, len(pairs)) | {"threshold": bound.estimate().threshold}


def counted(hits: int, wrong: int, asked: int) -> dict[str, Any]:
    return {
        "asked": asked, "hits": hits, "hit_rate": hits / asked, "wrong": wrong, "false_hit_rate": wrong / max(1, hits),
        "upper_95": upper_limit(wrong, hits, 0.05) if hits else None,
    }  # fmt: skip


def fixed(pairs: list[Pair], near: np.ndarray, most: float) -> dict[str, Any]:
    """The lowest threshold whose error on this very data is at most the bound; else the one with the least error."""
    same = np.array([pair[2] for pair in pairs])
    tried = []
    for threshold in np.arange(0.70, 1.0, 0.005):
        hits = near >= threshold
        count, wrong = int(hits.sum()), int((hits & ~same).sum())
        if count:
            tried.append(
                (
                    wrong / count > most,
                    wrong / count if wrong / count > most else -count,
                    float(threshold),
                    count,
                    wrong,
                )
            )
    _, _, threshold, count, wrong = min(tried)
    return counted(count, wrong, len(pairs)) | {"threshold": threshold}


def measure(pairs: list[Pair], near: np.ndarray, hard: tuple[list[Pair], np.ndarray] | None) -> dict[str, Any]:
    shareable = [guard.fit_for_sharing(a) is None and guard.refusal(b, a) is None for a, b, _ in pairs]
    passed = [pair for pair, fits in zip(pairs, shareable, strict=True) if fits]
    results: dict[str, Any] = {
        "guard": {"passed": len(passed), "of_them_wrong": sum(not same for _, _, same in passed)}, "bounds": {},
    }  # fmt: skip
    for most in BOUNDS:
        bound = ErrorBound(most)
        found = {"learnt": stream(pairs, near, shareable, bound), "fixed_threshold": fixed(pairs, near, most)}
        if hard is not None:
            fit = [guard.fit_for_sharing(a) is None and guard.refusal(b, a) is None for a, b, _ in hard[0]]
            found["hard_pairs"] = stream(hard[0], hard[1], fit, bound)
            at = found["fixed_threshold"]["threshold"]
            served = [pair for pair, similarity in zip(*hard, strict=True) if similarity >= at]
            found["hard_pairs_fixed"] = counted(len(served), sum(not pair[2] for pair in served), len(hard[0]))
        results["bounds"][str(most)] = found
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("hard", type=Path, nargs="?")
    parser.add_argument("--limit", type=int, default=1 << 30)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    embedder = Embedder.open(MODEL)
    pairs = read(given.pairs, given.limit)
    hard = None
    if given.hard is not None:
        difficult = read(given.hard, 1 << 30)
        hard = difficult, similarities(embedder, difficult)
    figures = measure(pairs, similarities(embedder, pairs), hard)
    save(
        "answers",
        f"answers PAIRS HARD --limit {len(pairs)}",
        {"model": MODEL, "pairs": len(pairs)} | figures,
        given.out,
    )


if __name__ == "__main__":
    main()
