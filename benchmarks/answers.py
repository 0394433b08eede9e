"""The semantic answer cache on labelled pairs of questions: how many hits, how many of them wrong.

    python -m benchmarks.answers PAIRS.jsonl.gz [HARD.jsonl.gz] [--vectors FILE.npz]

A file has one pair on each line: [question, question, 1 if the same answer serves both]. The first half of the shuffled
pairs is for making the guard's table; only the second half is measured. Its questions are a stream: both questions of
each pair, one after the other, so questions that are in several pairs come again. The cache starts empty and without
evidence; a question that misses is stored. The known questions with the same wording may be shared, as in a server;
the labels judge them: the same text, or a chain of pairs that are labelled as the same, is right; a pair that is
labelled as different is wrong. Known questions without a label for the pair are passed over, as nothing can be said
about them; how many would have been shared is counted beside. Evidence comes as it does in a server: from questions
that were computed although a similar one was known, and from a share of the hits.

Beside it, on the same stream: one fixed similarity without a guard, chosen on this very stream so that its error is as
near to the bound as it can be. On the hard file (the same words in another order) the bound has already learnt. The
swaps are made up: another entity, number, negation or text in the same question; everything is shared that passes the
guard, whatever the bound says.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import save
from benchmarks.swaps import SWAPS
from twostroke.answers import guard
from twostroke.answers.bound import NEAREST, ErrorBound, JudgedPair, upper_limit
from twostroke.answers.cache import NEIGHBOURS
from twostroke.embed.embedder import Embedder

BOUNDS = (0.005, 0.01, 0.02, 0.05)
SHADOW = 0.05
MODEL = "all-minilm-l6-v2"
SWAPPED = 1000  # of each kind
LOOKED_AT = 32  # nearest questions that may turn out to have no label or to be not stored
Pair = tuple[str, str, bool]


class Near(NamedTuple):
    place: int  # of the question in the list of texts
    similarity: float


def read(path: Path) -> list[Pair]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    pairs = [(str(a) or " ", str(b) or " ", bool(same)) for a, b, same in map(json.loads, data.decode().splitlines())]
    random.Random(0).shuffle(pairs)
    return pairs


class Labels:
    """Which questions the pairs say to be the same, by way of other questions too, and which not."""

    def __init__(self, pairs: list[Pair]):
        self._above: dict[str, str] = {}
        for a, b, same in pairs:
            if same:
                self._above[self.group(a)] = self.group(b)
        self._apart = {frozenset((self.group(a), self.group(b))) for a, b, same in pairs if not same}

    def group(self, text: str) -> str:
        while text in self._above and self._above[text] != text:
            text = self._above[text]
        return text

    def judge(self, a: str, b: str) -> bool | None:
        first, second = self.group(a), self.group(b)
        if a != b and frozenset((first, second)) in self._apart:
            return False  # labels that contradict each other count as different
        return True if first == second else None


class Stream:
    """Questions in order, and for each the nearest among those that came before."""

    def __init__(self, embedder: Embedder, pairs: list[Pair], vectors: Path | None):
        self.asked = [text for a, b, _ in pairs for text in (a, b)]
        self.labels = Labels(pairs)
        self.texts = list(dict.fromkeys(self.asked))
        self.place = {text: place for place, text in enumerate(self.texts)}
        self.vectors = kept_vectors(embedder, self.texts, vectors)
        self.near = self._nearest()
        self.by_wording: dict[str, list[int]] = {}
        for place, text in enumerate(self.texts):
            self.by_wording.setdefault(guard.wording(text), []).append(place)

    def _nearest(self, block: int = 512) -> list[list[Near]]:
        """By first place: what came before has a lower one."""
        found: list[list[Near]] = []
        for start in range(0, len(self.texts), block):
            end = min(len(self.texts), start + block)
            scores = self.vectors[start:end] @ self.vectors[:end].T
            for row, place in enumerate(range(start, end)):
                mine = scores[row, :place]
                best = np.argpartition(mine, -LOOKED_AT)[-LOOKED_AT:] if place > LOOKED_AT else np.arange(place)
                near = [Near(int(i), float(mine[i])) for i in best if mine[i] >= NEAREST]
                found.append(sorted(near, key=lambda one: -one.similarity))
        return found

    def alike(self, text: str, stored: set[int]) -> list[Near]:
        """The stored questions with the same wording, the nearest first."""
        mine = self.vectors[self.place[text]]
        places = [place for place in self.by_wording[guard.wording(text)] if place in stored]
        return sorted((Near(i, float(mine @ self.vectors[i])) for i in places), key=lambda one: -one.similarity)

    def candidates(self, text: str, stored: set[int]) -> Iterator[Near]:
        """The nearest stored questions."""
        place = self.place[text]
        if place in stored:
            yield Near(place, 1.0)
        for one in self.near[place]:
            if one.place in stored:
                yield one


def kept_vectors(embedder: Embedder, texts: list[str], path: Path | None) -> np.ndarray:
    if path is not None and path.exists():
        kept = np.load(path)
        if list(kept["texts"]) == texts:
            rows: np.ndarray = kept["rows"]
            return rows
    made = embedded(embedder, texts)
    if path is not None:
        np.savez(path, texts=np.array(texts), rows=made)
    return made


def embedded(embedder: Embedder, texts: list[str]) -> np.ndarray:
    tokens = [embedder.tokenizer.encode(text, cut=True) for text in texts]
    order = sorted(range(len(tokens)), key=lambda place: len(tokens[place].ids))
    rows = np.empty((len(tokens), embedder.width), np.float32)
    rows[order] = embedder.run([tokens[place] for place in order])
    return rows


# ---- the cache ------------------------------------------------------------------------------------------------------


class Tally:
    def __init__(self) -> None:
        self.hits: dict[str, int] = dict.fromkeys(guard.KINDS, 0)
        self.wrong: dict[str, int] = dict.fromkeys(guard.KINDS, 0)
        self.unjudged = 0

    def document(self, asked: int) -> dict[str, Any]:
        kinds = {kind: {"hits": self.hits[kind], "wrong": self.wrong[kind]} for kind in guard.KINDS}
        whole = counted(sum(self.hits.values()), sum(self.wrong.values()), asked)
        return whole | {"kinds": kinds, "unjudged": self.unjudged}


def ask_all(stream: Stream, bound: ErrorBound) -> dict[str, Any]:
    chance, tally, stored = random.Random(1), Tally(), set[int]()
    for text in stream.asked:
        if guard.fit_for_sharing(text) is None and ask(stream, text, stored, bound, chance, tally):
            continue
        stored.add(stream.place[text])
    kinds = {name: kind.estimate().threshold for name, kind in bound.kinds.items()}
    return tally.document(len(stream.asked)) | {"thresholds": kinds}


def ask(stream: Stream, text: str, stored: set[int], bound: ErrorBound, chance: random.Random, tally: Tally) -> bool:
    """Whether a known answer was given."""
    for near in stream.alike(text, stored):
        known, kind = stream.texts[near.place], fitting(text, stream.texts[near.place])
        if kind is None or not bound.allows(known, kind, near.similarity):
            continue
        right = stream.labels.judge(text, known)
        if right is None:
            tally.unjudged += 1
            continue
        tally.hits[kind] += 1
        tally.wrong[kind] += not right
        if chance.random() < SHADOW:
            bound.learn(JudgedPair(known, kind, near.similarity, right))
        return True
    learn(stream, text, stored, bound)
    return False


def learn(stream: Stream, text: str, stored: set[int], bound: ErrorBound) -> None:
    """From the nearest known question that passes the guard."""
    looked = 0
    for near in stream.candidates(text, stored):
        known = stream.texts[near.place]
        kind, right = fitting(text, known), stream.labels.judge(text, known)
        looked += kind is None or right is not None
        if looked > NEIGHBOURS:
            return
        if kind is not None and right is not None:
            return bound.learn(JudgedPair(known, kind, near.similarity, right))


def fitting(asked: str, known: str) -> str | None:
    """The kind of a pair that may be shared."""
    compared = guard.compare(asked, known)
    return compared.kind if compared.refusal is None and guard.fit_for_sharing(known) is None else None


def counted(hits: int, wrong: int, asked: int) -> dict[str, Any]:
    return {
        "asked": asked, "hits": hits, "hit_rate": hits / asked, "wrong": wrong, "false_hit_rate": wrong / max(1, hits),
        "upper_95": upper_limit(wrong, hits, 0.05) if hits else None,
    }  # fmt: skip


# ---- one fixed similarity -------------------------------------------------------------------------------------------


def at_fixed(stream: Stream, threshold: float) -> dict[str, Any]:
    hits = wrong = 0
    stored: set[int] = set()
    for text in stream.asked:
        judged = (
            (near, stream.labels.judge(text, stream.texts[near.place]))
            for near in stream.candidates(text, stored)
            if near.similarity >= threshold
        )
        right = next((right for _, right in judged if right is not None), None)
        if right is None:
            stored.add(stream.place[text])
        else:
            hits += 1
            wrong += not right
    return counted(hits, wrong, len(stream.asked)) | {"threshold": threshold}


def best_fixed(tried: list[dict[str, Any]], most: float) -> dict[str, Any]:
    """The one with the most hits whose error is at most the bound; else the one with the least error."""
    fits = [one for one in tried if one["false_hit_rate"] <= most]
    if fits:
        return max(fits, key=lambda one: one["hits"])
    return min(tried, key=lambda one: one["false_hit_rate"])


# ---- hard pairs and swaps -------------------------------------------------------------------------------------------


def hard_pairs(hard: list[Pair], near: np.ndarray, bound: ErrorBound, threshold: float) -> dict[str, Any]:
    hits = wrong = fixed = fixed_wrong = 0
    for (a, b, same), similarity in zip(hard, near, strict=True):
        fixed += bool(similarity >= threshold)
        fixed_wrong += bool(similarity >= threshold) and not same
        compared = guard.compare(a, b)
        fits = compared.refusal is None and guard.fit_for_sharing(a) is None and guard.fit_for_sharing(b) is None
        if fits and bound.allows(a, compared.kind, float(similarity)):
            hits += 1
            wrong += not same
    return {"cache": counted(hits, wrong, len(hard)), "fixed": counted(fixed, fixed_wrong, len(hard))}


def swapped() -> dict[str, Any]:
    found = {}
    for name, swap in SWAPS.items():
        chance, shared, asked = random.Random(7), 0, 0
        while asked < SWAPPED:
            first, second = swap(chance)
            if first != second:
                asked += 1
                shared += guard.compare(first, second).refusal is None
        found[name] = {"asked": asked, "shared": shared}
    return found


def measure(embedder: Embedder, pairs: list[Pair], hard: list[Pair], vectors: Path | None) -> dict[str, Any]:
    stream = Stream(embedder, pairs, vectors)
    tried = [at_fixed(stream, round(float(at), 3)) for at in np.arange(0.80, 1.0, 0.005)]
    results: dict[str, Any] = {
        "questions": len(stream.asked), "different": len(stream.texts), "swaps": swapped(), "bounds": {},
        "fixed_0.9": at_fixed(stream, 0.9),
    }  # fmt: skip
    if hard:
        both = [embedded(embedder, [pair[i] for pair in hard]) for i in (0, 1)]
        near = (both[0] * both[1]).sum(axis=1)
    for most in BOUNDS:
        bound = ErrorBound(most)
        fixed = best_fixed(tried, most)
        found = {"cache": ask_all(stream, bound), "fixed": fixed}
        if hard:
            found["hard_pairs"] = hard_pairs(hard, near, bound, fixed["threshold"])
        results["bounds"][str(most)] = found
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("hard", type=Path, nargs="?")
    parser.add_argument("--vectors", type=Path, help="where vectors are kept between runs")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    embedder = Embedder.open(MODEL, coded=True)
    pairs = read(given.pairs)
    hard = [] if given.hard is None else read(given.hard)
    figures = measure(embedder, pairs[len(pairs) // 2 :], hard, given.vectors)
    save("answers", "answers PAIRS HARD", {"model": MODEL, "pairs": len(pairs) - len(pairs) // 2} | figures, given.out)


if __name__ == "__main__":
    main()
