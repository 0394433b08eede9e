"""The cache on both stores: exact and semantic hits, tenants, forged entries, age, eviction, a store that is gone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.answers.servers import Redis
from tests.measured import measured
from twostroke.answers import cache as cache_module
from twostroke.answers import redis as redis_module
from twostroke.answers.bound import JudgedPair
from twostroke.answers.cache import AnswerCache
from twostroke.answers.entry import pack, unpack
from twostroke.answers.lookup import CacheOptions, Computed, Looked, Query
from twostroke.answers.redis import PREFIX, RedisStore
from twostroke.answers.store import AnswerStore, FileStore, IndexedEntry, Rows

SECRET = b"s" * 32
TENANT, OTHER = b"tenant-1", b"tenant-2"
PATIENT = CacheOptions("semantic", error=0.05, deadline=30.0, shadow=0.0)


class Letters:
    """Vectors from the words of a text: texts with the same words have the same vector."""

    def embed(self, texts: list[str]) -> np.ndarray:
        rows = np.zeros((len(texts), 64), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in text.lower().split():
                row[sum(map(ord, word)) % 64] += 1
            row /= max(np.linalg.norm(row), 1e-9)
        return rows


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    server = Redis(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def patient_with_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy: Redis may need longer for a call than a server would wait."""
    monkeypatch.setattr(redis_module, "SOCKET", 30.0)


@pytest.fixture(params=["file", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnswerStore]:
    if request.param == "file":
        made: AnswerStore = FileStore(tmp_path / "answers.sqlite", 100)
    else:
        server = request.getfixturevalue("redis_server")
        made = RedisStore(server.url, None)
        made._redis.flushall()  # type: ignore[attr-defined]
    yield made
    made.close()


def cache_on(store: AnswerStore, options: CacheOptions = PATIENT) -> AnswerCache:
    return AnswerCache(options, store, SECRET, Letters())


def look(cache: AnswerCache, query: Query) -> Looked:
    return asyncio.run(cache.lookup(query))


def keep(cache: AnswerCache, query: Query, tokens: tuple[int, ...] = (7, 8, 2), looked: Looked | None = None) -> None:
    computed = Computed(tokens, False, 5, 0.25, lambda ids: " ".join(map(str, ids)))
    cache.store_later(query, looked or Looked(), computed)
    for thread in (cache._embedding, cache._thread):
        thread.submit(lambda: None).result()


def convinced(cache: AnswerCache) -> AnswerCache:
    for kind in cache.bound.kinds:
        for _ in range(400):
            cache.bound.learn(JudgedPair("elsewhere", kind, 0.8, True))
    return cache


def pairs(cache: AnswerCache) -> tuple[int, int]:
    """Evidence of all kinds, and how much of it was wrong."""
    found = [kind.estimate() for kind in cache.bound.kinds.values()]
    return sum(one.pairs for one in found), sum(one.wrong for one in found)


def test_an_equal_request_is_found(store: AnswerStore) -> None:
    cache = cache_on(store)
    query = Query(TENANT, exact=b"key")
    assert look(cache, query).found is None
    keep(cache, query)
    found = look(cache, query).found
    assert found is not None and found.tier == "exact" and found.entry.tokens == (7, 8, 2)
    assert found.entry.seconds == 0.25 and 0 <= found.age < 60
    assert look(cache, Query(TENANT, exact=b"other")).found is None
    assert cache.counters.hits["exact"] == 1 and cache.counters.misses == 2 and cache.counters.tokens_saved == 3


def test_a_question_is_shared_only_with_evidence(store: AnswerStore) -> None:
    cache = cache_on(store)
    asked = Query(TENANT, context=b"context", question="How do I repair a bicycle?")
    keep(cache, asked)
    similar = Query(TENANT, context=b"context", question="How do I repair the bicycle?")
    assert look(cache, similar).found is None  # no evidence yet
    convinced(cache)
    assert look(cache, asked).found is not None and look(cache, similar).found is not None
    assert look(cache, Query(TENANT, context=b"another", question=asked.question)).found is None
    swapped = Query(TENANT, context=b"context", question="How do I repair a tricycle?")
    before = pairs(cache)
    assert look(cache, swapped).found is None  # the guard refused it
    keep(cache, swapped)
    assert any(one["decision"].startswith("guard") for one in cache.borderline) and pairs(cache) == before


def test_a_vector_is_made_before_the_answer_only_if_it_may_be_shared(store: AnswerStore) -> None:
    class Counted(Letters):
        made = 0

        def embed(self, texts: list[str]) -> np.ndarray:
            self.made += len(texts)
            return super().embed(texts)

    texts = Counted()
    cache = AnswerCache(PATIENT, store, SECRET, texts)
    asked, similar, other = (
        Query(TENANT, context=b"context", question=f"How do I {text}?")
        for text in ("repair a bicycle", "repair the bicycle", "sell a bicycle")
    )
    keep(cache, asked)
    texts.made = 0
    assert look(cache, similar).found is None and texts.made == 0  # no evidence: it cannot be shared
    convinced(cache)
    assert look(cache, other).found is None and texts.made == 0
    assert look(cache, asked).found is not None and texts.made == 0  # the stored vector is that of the same text
    found = look(cache, similar).found
    assert found is not None and found.similarity < 1 and texts.made == 1


def test_what_was_computed_is_evidence(store: AnswerStore) -> None:
    cache = cache_on(store)
    asked = Query(TENANT, context=b"context", question="How do I repair a bicycle?")
    keep(cache, asked)
    for tokens, right in (((7, 8, 2), True), ((9, 9, 2), False)):
        before = pairs(cache)
        keep(cache, asked, tokens, look(cache, asked))
        assert pairs(cache) == (before[0] + 1, before[1] + (not right))


def test_nothing_crosses_tenants(store: AnswerStore) -> None:
    cache = cache_on(store)
    keep(cache, Query(TENANT, exact=b"key", context=b"context", question="what is a cat"))
    convinced(cache)
    assert look(cache, Query(OTHER, exact=b"key")).found is None  # even where the keys were the same
    assert look(cache, Query(OTHER, context=b"context", question="what is a cat")).found is None
    assert cache.counters.refused >= 2
    assert look(cache, Query(TENANT, context=b"context", question="what is a cat")).found is not None


def test_a_user_that_may_not_sort_finds_wordings_too(redis_server: Redis) -> None:
    import redis

    owner = redis.Redis.from_url(redis_server.url)
    owner.acl_setuser(
        "limited", enabled=True, passwords=["+secret"], keys=["twostroke:*"], categories=["+@all", "-@dangerous"]
    )
    store = RedisStore(redis_server.url.replace("//", "//limited:secret@"), None)
    known = IndexedEntry("one", TENANT, b"", b"", 1.0, 0, b"wording")
    store.put(known, None, b"sealed")
    assert store.alike(b"wording") == [b"sealed"] and store.alike(b"other") == []
    assert store.count() >= 1 and not store._sorts, "a refused command is no absence"
    owner.acl_deluser("limited")


def test_forged_and_damaged_entries_are_never_served(redis_server: Redis) -> None:
    store = RedisStore(redis_server.url, None)
    client = store._redis
    client.flushall()
    cache = cache_on(store)
    query = Query(TENANT, exact=b"key")
    keep(cache, query)
    (name,) = client.keys(PREFIX + b"entry:*")
    good = client.get(name)
    entry = unpack(good, SECRET)
    assert entry is not None
    forged = pack(entry, b"another key of someone else.....")
    flipped = good[:40] + bytes([good[40] ^ 1]) + good[41:]
    other_request = pack(
        type(entry)(**{**{f: getattr(entry, f) for f in entry.__struct_fields__}, "exact": b"x"}), SECRET
    )
    for bad in (forged, flipped, good[:50], b"", b"x" * 1000, other_request):
        client.set(name, bad)
        assert look(cache, query).found is None, bad[:20]
    client.set(name, good)
    assert look(cache, query).found is not None
    store.close()


@measured
def test_redis_that_dies_is_a_miss_and_is_used_again(tmp_path: Path) -> None:
    server = Redis(tmp_path).start()
    try:
        check_a_loss_of(server)
    finally:
        server.stop()


def check_a_loss_of(server: Redis) -> None:
    store = RedisStore(server.url, None)
    cache = AnswerCache(PATIENT, store, SECRET)
    query = Query(TENANT, exact=b"key")
    keep(cache, query)
    assert look(cache, query).found is not None
    server.stop()
    cache.options = CacheOptions("exact", deadline=0.1)  # while Redis runs, a busy machine may need longer
    for _ in range(20):
        began = time.monotonic()
        assert look(cache, query).found is None
        assert time.monotonic() - began < 2.0  # the deadline, on a machine that may be busy
    assert cache.counters.failed + cache.counters.late >= 20
    server.start()
    cache.options = PATIENT
    deadline = time.monotonic() + 30
    while look(cache, query).found is None:
        assert time.monotonic() < deadline, "Redis is not used again"
        time.sleep(0.1)
    cache.close()


class Afar(FileStore):
    """As Redis: only a lookup tells what it holds."""

    def holds(self, key: bytes) -> None: ...


def test_a_slow_store_does_not_delay_a_miss(tmp_path: Path) -> None:
    """A lookup that the store does not answer ends all the same."""
    answered = threading.Event()

    class Slow(Afar):
        def exact(self, key: bytes) -> bytes | None:
            assert answered.wait(60)
            return None

    cache = AnswerCache(CacheOptions("exact", deadline=0.005), Slow(None, 10), SECRET)

    async def scene() -> Looked:
        try:
            return await asyncio.wait_for(cache.lookup(Query(TENANT, exact=b"key")), 30)
        finally:
            answered.set()

    assert asyncio.run(scene()).found is None
    assert cache.counters.late == 1 and cache.counters.misses == 0


def test_a_busy_machine_finds_what_the_embedded_store_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup beyond its deadline, behind another's work on the store's thread, is waited for: the answer is there."""
    monkeypatch.setattr(cache_module, "HELD", 60.0)  # this machine may be busier still

    class Busy(FileStore):
        asked = 0

        def exact(self, key: bytes) -> bytes | None:
            Busy.asked += 1
            time.sleep(0.02)
            return super().exact(key)

        def put(self, known: IndexedEntry, vector: np.ndarray | None, sealed: bytes) -> None:
            time.sleep(0.02)
            super().put(known, vector, sealed)

    cache = AnswerCache(CacheOptions("exact", deadline=0.005), Busy(None, 10), SECRET)
    query, other = Query(TENANT, exact=b"key"), Query(TENANT, exact=b"other")
    assert look(cache, query).found is None and look(cache, other).found is None
    assert Busy.asked == 0 and cache.counters.misses == 2, "what is not there is not looked for"
    cache.store_later(query, Looked(), Computed((7, 2), False, 5, 0.25, str))
    for _ in range(3):  # the first while the answer is being stored
        assert look(cache, query).found is not None
    assert Busy.asked == 3 and cache.counters.hits["exact"] == 3 and cache.counters.late == 0
    cache.close()
    closed = Query(TENANT, exact=b"late")
    cache.store_later(closed, Looked(), Computed((7, 2), False, 5, 0.25, str))
    assert look(cache, closed).found is None


def test_age(store: AnswerStore) -> None:
    cache = cache_on(store)
    query = Query(TENANT, exact=b"key")
    keep(cache, query)
    time.sleep(0.05)
    assert look(cache, Query(TENANT, exact=b"key", max_age=0.01)).found is None
    assert look(cache, Query(TENANT, exact=b"key", max_age=60)).found is not None


@pytest.mark.parametrize("text", ["I'm sorry, but I can't help with that.", "  "])
def test_refusals_and_empty_answers_are_not_stored(text: str) -> None:
    cache = AnswerCache(PATIENT, FileStore(None, 10), SECRET)
    cache.store_later(Query(TENANT, exact=b"key"), Looked(), Computed((1,), False, 1, 1.0, lambda ids: text))
    assert look(cache, Query(TENANT, exact=b"key")).found is None and cache.counters.stored == 0


def test_a_wrong_answer_is_forgotten_and_learnt_from(store: AnswerStore) -> None:
    cache = convinced(cache_on(store))
    query = Query(TENANT, context=b"context", question="what is a cat")
    keep(cache, query)
    found = look(cache, query).found
    assert found is not None and found.tier == "semantic"
    assert cache.wrong(found.hit) and not cache.wrong(found.hit) and not cache.wrong("nothing")
    assert look(cache, query).found is None
    assert pairs(cache)[1] == 1


def test_forgetting(store: AnswerStore) -> None:
    cache = cache_on(store)
    for name, tenant in (("cat", TENANT), ("dog", TENANT), ("cat", OTHER)):
        keep(cache, Query(tenant, exact=name.encode() + tenant, context=b"c", question=f"what is a {name}"))
    assert len(cache.listed(10)) == 3 and len(cache.listed(1)) == 1 and cache.listed(0) == []
    assert cache.forget(older_than=3600) == 0
    assert cache.forget(question="CAT", tenant=TENANT) == 1
    assert cache.forget(tenant=OTHER) == 1
    assert [one["question"] for one in cache.listed(10)] == ["what is a dog"]
    assert cache.forget() == 1 and cache.statistics()["entries"] == 0


def test_a_file_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    cache = cache_on(FileStore(path, 10))
    query = Query(TENANT, exact=b"key", context=b"c", question="what is a cat")
    keep(cache, query)
    for _ in range(150):
        cache.evidence.add(JudgedPair("elsewhere", "same words", 1.0, True))
    cache.close()
    assert path.stat().st_mode & 0o077 == 0
    again = cache_on(FileStore(path, 10))
    assert look(again, Query(TENANT, exact=b"key")).found is not None
    assert look(again, Query(TENANT, context=b"c", question="what is a cat")).found is not None  # the evidence too


def test_a_file_of_another_version_loses_its_answers(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    store = FileStore(path, 10)
    store.put(IndexedEntry("old", TENANT, b"key", b"", 1.0, 10), None, b"x")
    store.add_evidence(b"kept")
    store._data.execute("PRAGMA user_version=1")
    store.close()
    again = FileStore(path, 10)
    assert again.count() == 0 and [value for _, value in again.evidence("", 9)] == [b"kept"]


def test_hits_are_counted_in_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    store = FileStore(path, 10)
    store.put(IndexedEntry("one", TENANT, b"key", b"", 1.0, 10), None, b"x")
    for _ in range(300):
        store.hit("one")
    store.close()
    assert FileStore(path, 10)._hits == {"one": 300}


def test_the_least_valuable_go_first() -> None:
    store = FileStore(None, 50)
    for number in range(50):
        store.put(IndexedEntry(str(number), TENANT, b"%d" % number, b"", float(number), 10), None, b"x")
    for number in (0, 1, 2):
        store.hit(str(number))
    store.put(IndexedEntry("new", TENANT, b"new", b"", 99.0, 10), None, b"x")
    assert store.count() == 50 and store.get("0") and store.get("2") and store.get("3") is None


def test_servers_share_their_evidence(store: AnswerStore) -> None:
    first, second = cache_on(store), cache_on(store)
    for number in range(150):
        first.evidence.add(JudgedPair(str(number), "same words", 1.0, True))
    assert not second.bound.allows("x", "same words", 1.0)
    second.evidence.read()
    assert second.bound.allows("x", "same words", 1.0) and first.bound.estimate() == second.bound.estimate()
    first.evidence.read()
    assert first.bound.estimate().pairs == 150  # its own records count once
    (_, record), *_ = store.evidence("", 1)
    for forged in (record, record[:-1] + b"x", b""):  # a copy counts once, a forged one never
        store.add_evidence(forged)
    second.evidence.read()
    assert second.bound.estimate().pairs == 150


def test_a_late_lookup_counts_until_the_answer_begins() -> None:
    asked_for = threading.Semaphore(0)

    class Slow(Afar):
        def exact(self, key: bytes) -> bytes | None:
            assert asked_for.acquire(timeout=60)
            return super().exact(key)

    cache = AnswerCache(CacheOptions("exact", deadline=0.005), Slow(None, 10), SECRET)
    query = Query(TENANT, exact=b"key")
    keep(cache, query)

    async def scene(begins: bool) -> Looked:
        looked = await cache.lookup(query)
        assert looked.found is None and looked.late is not None
        asked_for.release()
        begun = asyncio.get_running_loop().create_future()
        if begins:
            begun.set_result(None)
        await cache.overtake(looked, begun)
        return looked

    assert asyncio.run(scene(False)).found is not None and asyncio.run(scene(True)).found is None
    assert cache.counters.late == 2 and cache.counters.hits["exact"] == 1 and cache.counters.misses == 1


def test_many_vectors_are_found_by_their_sketches() -> None:
    chance = np.random.default_rng(1)
    rows, vectors = Rows(384), chance.standard_normal((6000, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for number, vector in enumerate(vectors):
        rows.add(str(number), vector)
    for number in range(0, 500):
        rows.remove(str(number))
    for number in (777, 4100, 5999):
        asked = vectors[number] + 0.01 * chance.standard_normal(384).astype(np.float32)
        asked /= np.linalg.norm(asked)
        found = rows.nearest(asked, 8)
        assert found[0].id == str(number) and found[0].similarity == pytest.approx(float(vectors[number] @ asked))
        assert len(found) == 8 and [one.similarity for one in found] == sorted(o.similarity for o in found)[::-1]
    assert "3" not in {one.id for one in rows.nearest(vectors[3], 8)}
