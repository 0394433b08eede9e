"""How fast the answer cache is with 100,000 entries, over HTTP: hits, what a miss costs, memory for each entry.

    python -m benchmarks.answer_speed fill FOLDER [--redis REDIS_SERVER]      # makes the entries: some minutes
    python -m benchmarks.answer_speed measure FOLDER [--redis REDIS_SERVER]   # some minutes for each store

REDIS_SERVER is the program of a Redis 8 with vector sets. The entries are copies of one answer, with other questions
and random vectors in its context, so every search goes over all of them; evidence for all kinds is written beside them.
Measured are exact hits (the same request), semantic hits (other wordings of the question: three that come again and
again, and wordings that are new each time, whose vectors are made), and requests that are computed: those that were
looked up in vain and those that asked not to be looked up take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np

from benchmarks.machine import RESULTS, save
from benchmarks.serving_servers import OURS, running
from twostroke.answers.bound import ErrorBound, JudgedPair
from twostroke.answers.entry import Entry, pack, unpack
from twostroke.answers.evidence import SharedEvidence
from twostroke.answers.guard import KINDS, wording
from twostroke.answers.keys import wording_key
from twostroke.answers.redis import RedisStore
from twostroke.answers.store import AnswerStore, FileStore, IndexedEntry
from twostroke.serve.answer_setup import digest

ENTRIES, WIDTH = 100_000, 384
HITS, PAIRS = 1000, 200  # hits of each kind; pairs of computed requests
KEY = "benchmark key of the answer cache"
REDIS_PORT = 18439
ASKED = "What is the capital of Portugal?"
OTHERS = ("What is capital of Portugal?", "Which is the capital of Portugal?", "what is the capital of portugal")
CONTEXT = "You work for a shop that sells tools, plants and bicycles. " * 12  # a prompt of usual length
STORES = ("embedded", "redis")
FILE = "answers.sqlite"


def body(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": CONTEXT}, {"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": 24, "stop": [" "], "stream": True} | more


@contextmanager
def redis_running(program: str, folder: Path) -> Iterator[str]:
    import redis

    url = f"redis://127.0.0.1:{REDIS_PORT}"
    words = [program, "--port", str(REDIS_PORT), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    process = subprocess.Popen([*words, "--dbfilename", "answers.rdb"], stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis.from_url(url)
        for _ in range(1200):
            try:
                client.ping()
                break
            except redis.RedisError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def served(store: str, folder: Path, url: str | None) -> Iterator[tuple[str, int]]:
    where = ["--answer-cache-url", url] if url else ["--answer-cache-file", str(folder / FILE)]
    words = [sys.executable, "-m", "twostroke", "serve", "--port", "18431", "-s", "prefix_cache=false"]
    words += ["--answer-cache", "semantic", "--answer-cache-error", "0.05", *where]
    words += [] if url else ["--answer-cache-entries", str(2 * ENTRIES)]
    environment = {**os.environ, "TWOSTROKE_ANSWER_CACHE_KEY": KEY}
    with running(OURS, words, environment) as (address, process):
        yield address, process.pid


def opened(folder: Path, url: str | None) -> AnswerStore:
    if url is None:
        return FileStore(folder / FILE, 2 * ENTRIES)
    import redis

    store = RedisStore(url, None)
    store._redis = redis.Redis.from_url(
        url, protocol=2, socket_timeout=None
    )  # without a deadline: nothing waits for it
    return store


# ---- entries --------------------------------------------------------------------------------------------------------


def fill(store_name: str, folder: Path, url: str | None) -> dict[str, Any]:
    with served(store_name, folder, url) as (address, _):
        httpx.post(f"{address}/v1/chat/completions", json=body(ASKED), timeout=120).raise_for_status()
        for _ in range(100):
            if httpx.get(f"{address}/twostroke/answers").json()["stored"]:
                break
            time.sleep(0.1)
    store, secret = opened(folder, url), digest(KEY.encode())
    began, before = time.monotonic(), used(store)
    (known,) = store.entries(1)
    model = unpack(store.get(known.id) or b"", secret)
    assert model is not None and model.context
    copy(store, model, secret)
    believe(store, secret)
    found = {"seconds": time.monotonic() - began, "bytes_each": (used(store) - before) / ENTRIES}
    if isinstance(store, RedisStore):
        store._redis.save()
    store.close()
    return found


def believe(store: AnswerStore, secret: bytes) -> None:
    """Evidence of every kind and similarity."""
    evidence = SharedEvidence(ErrorBound(0.05), store, secret)
    for number in range(600):
        evidence.add(JudgedPair(f"elsewhere-{number}", KINDS[number % len(KINDS)], 0.8 + number / 3000, True))


def copy(store: AnswerStore, model: Entry, secret: bytes) -> None:
    rng = np.random.default_rng(3)
    fields = {name: getattr(model, name) for name in model.__struct_fields__}
    for number in range(ENTRIES):
        vector = rng.standard_normal(WIDTH).astype(np.float32)
        vector /= np.linalg.norm(vector)
        name = f"copy-{number}"
        other = {"id": name, "exact": b"%d" % number, "vector": vector.tobytes(), "question": f"{ASKED[:-1]} {number}?"}
        entry = Entry(**fields | other)
        key = wording_key(secret, entry.context, wording(entry.question))
        row = IndexedEntry(name, entry.tenant, entry.exact, entry.context, entry.created, len(entry.tokens), key)
        if isinstance(store, RedisStore):  # as `put` does, with less care for the graph, which takes its time
            near = store._name(b"near", row.context)
            store._redis.execute_command("VADD", near, "FP32", entry.vector, name, "NOQUANT", "EF", 16)
            row = row._replace(context=b"")
        store.put(row, vector, pack(entry, secret))


def used(store: AnswerStore) -> float:
    """Bytes of memory: of this process, or of Redis."""
    if isinstance(store, RedisStore):
        return float(store._redis.info("memory")["used_memory"])
    return resident(os.getpid())


def resident(process: int) -> float:
    return 4096.0 * int(Path(f"/proc/{process}/statm").read_text().split()[1])


# ---- times ----------------------------------------------------------------------------------------------------------


def connected(address: str) -> HTTPConnection:
    parts = urlsplit(address)
    return HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=120)


def first_byte(connection: HTTPConnection, sent: dict[str, Any]) -> tuple[float, float, str | None]:
    """Seconds to the first byte of the body, seconds to the first text, and the hit."""
    packed, text = json.dumps(sent), 0.0
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", packed, {"content-type": "application/json"})
    answer = connection.getresponse()
    lines = [answer.readline()]
    first = time.perf_counter() - began
    for line in answer:
        lines.append(line)
        if not text and line.startswith(b"data: {"):
            choices = json.loads(line[6:])["choices"]
            if choices and choices[0]["delta"].get("content"):
                text = time.perf_counter() - began
    found = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    return first, text or first, next((one["answer_cache"]["hit"] for one in found if "answer_cache" in one), None)


def spread(seconds: list[float]) -> dict[str, float]:
    p50, p99 = np.quantile(seconds, [0.5, 0.99])
    return {"p50_ms": 1e3 * float(p50), "p99_ms": 1e3 * float(p99), "most_ms": 1e3 * max(seconds)}


def measure(store: str, folder: Path, url: str | None) -> dict[str, Any]:
    """On a copy: hits that are computed as well become evidence, which would change the next measurement."""
    with tempfile.TemporaryDirectory() as copied:
        if url is None:
            shutil.copy(folder / FILE, copied)
        return measure_copy(store, Path(copied), url)


def measure_copy(store: str, folder: Path, url: str | None) -> dict[str, Any]:
    with served(store, folder, url) as (address, process):
        client = connected(address)
        found: dict[str, Any] = {"resident_mb": resident(process) / 1e6}
        if url is not None:
            found["redis_mb"] = used(opened(folder, url)) / 1e6
        for question in (ASKED, *OTHERS):
            first_byte(client, body(question))
        found["exact"] = hits(client, [ASKED], "exact")
        found["semantic"] = hits(client, list(OTHERS), "semantic")
        found["semantic_new"] = hits(client, new_wordings(), "semantic")
        found["miss"] = misses(client)
        state = httpx.get(f"{address}/twostroke/answers", params={"limit": 0}).json()
        found["counters"] = {name: state[name] for name in ("hits", "misses", "late", "failed", "entries")}
    return found


def new_wordings() -> list[str]:
    """The same words, each time written in another way."""
    rng, made = random.Random(4), dict[str, None]()
    while len(made) < HITS:
        words = [rng.choice((word.title(), word.lower())) for word in rng.choice(OTHERS).rstrip("?").split()]
        made[rng.choice((" ", "  ")).join(words) + rng.choice(("", "?", "??", " ?", "!", ".", "...", " ??"))] = None
    return list(made)


def hits(client: HTTPConnection, questions: list[str], tier: str) -> dict[str, Any]:
    seconds, other = [], 0
    for number in range(HITS):
        first, _, hit = first_byte(client, body(questions[number % len(questions)]))
        if hit == tier:
            seconds.append(first)
        else:
            other += 1
    return (spread(seconds) if seconds else {}) | {"hits": len(seconds), "others": other}


def misses(client: HTTPConnection) -> dict[str, Any]:
    """In turns: looked up in vain, and not looked up. Every question is new; all 180 tokens are read."""
    looked: list[float] = []
    bypassed: list[float] = []
    for number in range(PAIRS):
        for times, cache in ((looked, {}), (bypassed, {"cache": {"answer": False}}))[:: 1 if number % 2 else -1]:
            question = f"Which of the {time.time_ns() % 10**9} tools is the best for a large garden?"
            _, text, _ = first_byte(client, body(question, **cache))
            times.append(text)
    ratio = float(np.median(looked) / np.median(bypassed))
    return {"looked_up": spread(looked), "bypassed": spread(bypassed), "times_ttft_p50": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("fill", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--redis", help="the program")
    parser.add_argument("--store", choices=STORES, help="only this one")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    kept = given.folder / "figures.json"
    figures: dict[str, Any] = msgspec.json.decode(kept.read_bytes()) if kept.exists() else {}
    run = fill if given.what == "fill" else measure

    def keep(store: str, url: str | None) -> None:
        figures.setdefault(store, {})[given.what] = run(store, given.folder, url)
        kept.write_bytes(msgspec.json.encode(figures))

    if given.store in (None, "embedded"):
        keep("embedded", None)
    if given.redis and given.store in (None, "redis"):
        with redis_running(given.redis, given.folder) as url:
            keep("redis", url)
    if given.what == "measure":
        save("answer-speed", "answer_speed measure FOLDER", {"entries": ENTRIES, "stores": figures})
        print(RESULTS)


if __name__ == "__main__":
    main()
