"""`AnswerCache`: looks up, stores, and learns from what was computed. The store is used on one thread and the embedder
on another: the event loop never waits for them, and a quick lookup does not wait for a vector. A lookup has a deadline;
after it the request is computed, and the lookup still counts if it ends before the first token. The embedded store
knows at once which requests it holds: it is not asked for others, and a lookup of those has more time.

A lookup asks for the same request, and for questions with the same wording: all that the guard lets through. The latter
can begin before the prompt is made. Only if one of them may be shared, the question's vector is made. What else is near
is sought when the answer was computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeGuard

import numpy as np

from twostroke.answers import guard
from twostroke.answers.bound import NEAREST, ErrorBound, ErrorEstimate, JudgedPair
from twostroke.answers.entry import Entry, pack, unpack
from twostroke.answers.evidence import SharedEvidence
from twostroke.answers.keys import wording_key
from twostroke.answers.lookup import (
    Alike,
    Allowed,
    CacheCounters,
    CacheOptions,
    Computed,
    KnownAnswer,
    Looked,
    Query,
    Similar,
    Texts,
    Tier,
)  # fmt: skip
from twostroke.answers.pending import Pending
from twostroke.answers.redis import RedisStore
from twostroke.answers.store import AnswerStore, IndexedEntry, StoreError
from twostroke.answers.texts import is_refusal, same_answer
from twostroke.answers.vectors import Vectors, cosine

log = logging.getLogger(__name__)
SERVED = 4096  # hits that can still be called wrong
BORDERLINE = 50  # decisions that are shown
NEIGHBOURS = 8  # of a question that the guard looks at
HELD = 0.1  # seconds that a request waits at most for an answer that is there: less than computing it takes
SLOW_VECTOR = 0.03  # seconds that a request waits for a vector at most
HIGHEST = 1.001  # similarity, with room for rounding
EXACT = "exact"  # in the place of a kind: what is learnt from it says nothing about similarity


class AnswerCache:
    def __init__(self, options: CacheOptions, store: AnswerStore, secret: bytes, texts: Texts | None = None):
        self.options, self.store, self.secret = options, store, secret
        self.vectors = None if texts is None else Vectors(texts)
        self.bound = ErrorBound(options.error)
        self.counters = CacheCounters()
        self.borderline: deque[dict[str, Any]] = deque(maxlen=BORDERLINE)
        self.evidence = SharedEvidence(self.bound, store, secret)
        self._served: OrderedDict[str, JudgedPair] = OrderedDict()  # by hit: what is learnt if it was wrong
        self._pending = Pending()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._embedding = ThreadPoolExecutor(1, thread_name_prefix="answers-embed")
        self._complained = 0.0
        with contextlib.suppress(StoreError):
            self.evidence.read()

    # ---- looking up ------------------------------------------------------------------------------------------------

    async def lookup(self, query: Query) -> Looked:
        """Within the deadline. A lookup that needs longer is `late`: the request goes on, and may ask again."""
        if self.evidence.due:
            self._thread.submit(self._read_evidence)
        if not query.context and self._is_held(query) is False:
            self._count(looked := Looked())
            return looked
        future = asyncio.ensure_future(self._look(query))
        try:
            looked = await asyncio.wait_for(asyncio.shield(future), self._patience(query))
        except TimeoutError:
            self.counters.late += 1
            self._complain("a lookup took longer than its deadline")
            return Looked(late=future)
        self._count(looked)
        return looked

    def _patience(self, query: Query) -> float:
        """Seconds: longer where the answer is there, and where a vector is needed and takes its time, as a vector made
        beside a running engine would slow both down."""
        if self._is_held(query):
            return max(HELD, self.options.deadline)
        if not query.context or self.vectors is None:
            return self.options.deadline
        return self.options.deadline + min(5 * self.vectors.pace, SLOW_VECTOR)

    def _is_held(self, query: Query) -> bool | None:
        """Whether the answer to the same request is there, or about to be; None: the store must be asked."""
        if not query.exact:
            return None
        return self._pending.get(query.exact) is not None or self.store.holds(query.exact)

    async def overtake(self, looked: Looked, begun: asyncio.Future[None]) -> None:
        """Fills in what a late lookup finds, unless the computed answer has begun before."""
        assert looked.late is not None
        both: set[asyncio.Future[Any]] = {looked.late, begun}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            found = looked.late.result()
            looked.found, looked.near, looked.shadow = found.found, found.near, found.shadow
            looked.vector = found.vector
        self._count(looked)

    def _count(self, looked: Looked) -> None:
        found = looked.found
        if found is None:
            self.counters.misses += 1
            return
        self.counters.hits[found.tier] += 1
        self.counters.tokens_saved += len(found.entry.tokens)
        self.counters.seconds_saved += found.entry.seconds

    async def _look(self, query: Query) -> Looked:
        looked, run = Looked(), asyncio.get_running_loop().run_in_executor
        if query.exact and self._is_held(query) is not False:
            pending = self._pending.get(query.exact)
            if pending is not None:
                await asyncio.wrap_future(pending)
            await run(self._thread, self._look_exact, query, looked)
        if looked.found is None:
            self.begin(query)
            begun, query.begun = query.begun, None  # a query that is asked again is looked up again
            if begun is not None:
                self._share(query, looked, await asyncio.wrap_future(begun))
        return looked

    def begin(self, query: Query) -> None:
        """Begins the lookup by meaning, unless it was begun. The request's exact key need not be known."""
        if query.begun is None and query.context and self.vectors is not None:
            begun: Future[Alike] = Future()
            query.begun = begun
            begun.set_running_or_notify_cancel()
            self._next(begun, self._thread, self._begin, query, begun)

    def _begin(self, query: Query, begun: Future[Alike]) -> None:
        """Runs on the store's thread. The embedder needs no event loop: that may be busy with the prompt."""
        allowed = self._look_alike(query)
        vector = self._known_vector(query, allowed)
        if allowed and vector is None:
            self._next(begun, self._embedding, self._finish, query, allowed, begun)
        else:
            begun.set_result(Alike(allowed, vector))

    def _finish(self, query: Query, allowed: list[Allowed], begun: Future[Alike]) -> None:
        begun.set_result(Alike(allowed, self._vector(query.question)))

    def _next(self, begun: Future[Alike], thread: ThreadPoolExecutor, do: Callable[..., None], *given: Any) -> None:
        def ended(done: Future[None]) -> None:
            if (done.cancelled() or done.exception() is not None) and not begun.done():
                begun.set_result(Alike([], None))

        try:
            thread.submit(do, *given).add_done_callback(ended)
        except RuntimeError:  # the cache was closed
            begun.set_result(Alike([], None))

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        """The cache may fail; the request goes on."""
        try:
            yield
        except StoreError as error:
            self.counters.failed += 1
            self._complain(str(error))
        except Exception:
            self.counters.failed += 1
            log.exception("the answer cache failed")

    def _vector(self, text: str) -> np.ndarray | None:
        assert self.vectors is not None
        with self._safely():
            known = self.vectors.get(text)
            return self.vectors.make(text) if known is None else known
        return None

    def _look_exact(self, query: Query, looked: Looked) -> None:
        with self._safely():
            entry = self._open(self.store.exact(query.exact), query)
            if entry is not None and entry.exact == query.exact:
                looked.found = self._hit(entry, "exact")

    def _look_alike(self, query: Query) -> list[Allowed]:
        """Known questions that differ in what the guard allows, of kinds that have enough evidence."""
        with self._safely():
            found = [self._open(sealed, query) for sealed in self.store.alike(self._wording(query))]
            compared = [(one, guard.compare(query.question, one.question)) for one in found if self._fits(one, query)]
            return [
                Allowed(entry, kind)
                for entry, (refused, kind) in compared
                if refused is None and self.bound.allows(entry.id, kind, HIGHEST)
            ]
        return []

    def _wording(self, query: Query) -> bytes:
        return wording_key(self.secret, query.context, guard.wording(query.question)) if query.context else b""

    def _known_vector(self, query: Query, allowed: list[Allowed]) -> np.ndarray | None:
        """The same question has the same vector."""
        same = (one.entry.vector for one in allowed if one.entry.question == query.question and one.entry.vector)
        stored = next(same, None)
        if stored is not None:
            return np.frombuffer(stored, np.float32)
        return None if self.vectors is None else self.vectors.get(query.question)

    def _share(self, query: Query, looked: Looked, alike: Alike) -> None:
        """The nearest of the known answers that are near enough."""
        looked.vector = vector = alike.vector
        if vector is None:
            return
        similar = [Similar(entry, kind, cosine(vector, entry.vector)) for entry, kind in alike.allowed]
        shared = [one for one in similar if self.bound.allows(one.entry.id, one.kind, one.similarity)]
        if not shared:
            return
        near = max(shared, key=lambda one: one.similarity)
        looked.found = self._hit(near.entry, "semantic", near)
        looked.shadow = random.random() < self.options.shadow
        looked.near = near if looked.shadow else None
        self._note(query, near.entry, near.similarity, "shared", looked.found.hit)

    def _read_evidence(self) -> None:
        with contextlib.suppress(StoreError):
            self.evidence.read()

    def _fits(self, entry: Entry | None, query: Query) -> TypeGuard[Entry]:
        return entry is not None and entry.context == query.context

    def _open(self, sealed: bytes | None, query: Query) -> Entry | None:
        """An entry that is authentic, of this tenant, and fresh."""
        if sealed is None:
            return None
        entry = unpack(sealed, self.secret)
        if entry is None or entry.tenant != query.tenant:
            self.counters.refused += 1
            return None
        age = time.time() - entry.created
        limits = [limit for limit in (self.options.ttl, query.max_age) if limit is not None]
        return None if limits and age > min(limits) else entry

    def _hit(self, entry: Entry, tier: Tier, similar: Similar | None = None) -> KnownAnswer:
        hit = f"ans_{secrets.token_hex(10)}"
        self._served[hit] = JudgedPair(entry.id, EXACT, 1.0, False) if similar is None else similar.evidence(False)
        while len(self._served) > SERVED:
            self._served.popitem(last=False)
        with contextlib.suppress(RuntimeError):  # the cache was closed
            self._thread.submit(self._count_hit, entry.id)
        similarity = 1.0 if similar is None else similar.similarity
        return KnownAnswer(entry, tier, similarity, hit, max(0.0, time.time() - entry.created))

    def _count_hit(self, entry: str) -> None:
        with contextlib.suppress(StoreError):
            self.store.hit(entry)

    def _note(self, query: Query, entry: Entry, similarity: float, decision: str, hit: str | None = None) -> None:
        self.borderline.append(
            {
                "entry": entry.id, "hit": hit, "asked": query.question[:200], "known": entry.question[:200],
                "similarity": round(similarity, 4), "decision": decision, "at": time.time(),
            }
        )  # fmt: skip

    # ---- storing and learning --------------------------------------------------------------------------------------

    def store_later(self, query: Query, looked: Looked, computed: Computed) -> None:
        self._pending.begin(query.exact)
        try:
            self._embedding.submit(self._judge, query, looked, computed)
        except RuntimeError:  # the cache was closed
            self._pending.end(query.exact)

    def _judge(self, query: Query, looked: Looked, computed: Computed) -> None:
        """What needs the embedder; the rest is the store's."""
        handed = False
        with self._safely():
            text = computed.decode(computed.tokens)
            if looked.vector is None and query.context and self.vectors is not None:
                looked.vector = self._vector(query.question)
            if looked.near is None and looked.vector is not None and not looked.shadow:
                with contextlib.suppress(RuntimeError):  # the cache was closed
                    looked.near = self._thread.submit(self._neighbour, query, looked.vector).result()
            evidence = None
            if looked.near is not None:
                evidence = looked.near.evidence(
                    same_answer(text, computed.decode(looked.near.entry.tokens), self.vectors)
                )
            keep = not looked.shadow and bool(text.strip()) and not is_refusal(text)
            with contextlib.suppress(RuntimeError):
                self._thread.submit(self._store, query, looked.vector, computed if keep else None, evidence)
                handed = True
        if not handed:
            self._pending.end(query.exact)

    def _neighbour(self, query: Query, vector: np.ndarray) -> Similar | None:
        """The nearest known question that passes the guard: what a computed answer is compared with. Those nearer that
        the guard refuses are shown to the operator."""
        with self._safely():
            for near in self.store.nearest(query.context, vector, NEIGHBOURS):
                entry = self._entry_of(near.id, query)
                similarity = -1.0 if entry is None else cosine(vector, entry.vector)  # the store's own is not trusted
                if entry is None or similarity < NEAREST or (query.exact and entry.exact == query.exact):
                    continue
                refused, kind = guard.compare(query.question, entry.question)
                self._note(query, entry, similarity, f"guard: {refused}" if refused else "computed as well")
                if refused is None:
                    return Similar(entry, kind, similarity)
        return None

    def _entry_of(self, name: str, query: Query) -> Entry | None:
        sealed = self.store.get(name)
        if sealed is None and isinstance(self.store, RedisStore):
            self.store.drop(query.context, name)
        entry = self._open(sealed, query)
        return entry if self._fits(entry, query) and entry.id == name else None

    def _store(
        self, query: Query, vector: np.ndarray | None, computed: Computed | None, evidence: JudgedPair | None
    ) -> None:
        """computed: None if the answer is not kept."""
        with self._safely():
            if evidence is not None:
                self.evidence.add(evidence)
            if computed is not None:
                self._put(query, vector, computed)
        self._pending.end(query.exact)

    def _put(self, query: Query, vector: np.ndarray | None, computed: Computed) -> None:
        entry = Entry(
            secrets.token_hex(12), query.tenant, query.exact, query.context, query.question, computed.tokens,
            computed.by_string, computed.prompt_tokens, time.time(), computed.seconds,
            b"" if vector is None else vector.astype(np.float32).tobytes(),
        )  # fmt: skip
        wording = b"" if vector is None else self._wording(query)
        row = IndexedEntry(
            entry.id, entry.tenant, entry.exact, entry.context, entry.created, len(entry.tokens), wording
        )
        self.store.put(row, vector, pack(entry, self.secret))
        self.counters.stored += 1

    def wrong(self, hit: str) -> bool:
        """A person says that the answer of this hit, or of this entry, was wrong: it is forgotten, and learnt from."""
        known = self._served.pop(hit, None)
        if known is None and self._exists(hit):
            known = JudgedPair(hit, EXACT, 1.0, False)
        if known is not None:
            self._thread.submit(self._forget_wrong, known).result(5.0)
        return known is not None

    def _exists(self, entry: str) -> bool:
        try:
            return bool(self._thread.submit(self.store.get, entry).result(5.0))
        except StoreError:
            return False

    def _forget_wrong(self, known: JudgedPair) -> None:
        with contextlib.suppress(StoreError):
            self.evidence.add(known)
            self._drop([known.entry])

    # ---- the operator ----------------------------------------------------------------------------------------------

    def listed(self, limit: int) -> list[dict[str, Any]]:
        """The latest entries. Questions are shown; answers are not."""
        return self._thread.submit(self._listed, limit).result(30.0)

    def _listed(self, limit: int) -> list[dict[str, Any]]:
        found = []
        for known in self.store.entries(limit):
            entry = unpack(self.store.get(known.id) or b"", self.secret)
            if entry is not None:
                found.append(
                    {
                        "id": entry.id, "question": entry.question[:200], "tenant": entry.tenant.hex(),
                        "created": entry.created, "output_tokens": len(entry.tokens),
                        "tiers": [name for name, key in (("exact", entry.exact), ("semantic", entry.context)) if key],
                    }
                )  # fmt: skip
        return found

    def forget(self, question: str | None = None, older_than: float | None = None, tenant: bytes | None = None) -> int:
        """Entries with this text in their question, older than so many seconds, or of this tenant; all conditions hold.
        Without any: all entries."""
        return self._thread.submit(self._forget, question, older_than, tenant).result(60.0)

    def _forget(self, question: str | None, older_than: float | None, tenant: bytes | None) -> int:
        now, gone = time.time(), []
        for known in self.store.entries(1 << 30):
            entry = unpack(self.store.get(known.id) or b"", self.secret)
            fits = entry is not None and (
                (question is None or question.lower() in entry.question.lower())
                and (older_than is None or now - entry.created > older_than)
                and (tenant is None or entry.tenant == tenant)
            )
            if fits or entry is None:
                gone.append(known.id)
        return self._drop(gone)

    def _drop(self, entries: list[str]) -> int:
        """Drop these entries, and the texts of questions whose vectors are kept."""
        if self.vectors is not None:
            self.vectors.forget()
        return self.store.forget(entries)

    def statistics(self) -> dict[str, Any]:
        """Counts, and the estimated share of wrong answers with the upper end of its 95 % interval."""
        counters, estimate = self.counters, self.estimate()
        try:
            entries: int | None = self._thread.submit(self.store.count).result(1.0)
        except (StoreError, TimeoutError):
            entries = None
        return {
            "tier": self.options.tier, "entries": entries, "hits": dict(counters.hits), "misses": counters.misses,
            "bypassed": counters.bypassed, "late": counters.late, "failed": counters.failed,
            "stored": counters.stored, "refused_entries": counters.refused, "tokens_saved": counters.tokens_saved,
            "seconds_saved": counters.seconds_saved, "error_bound": self.options.error,
            "error": {
                "threshold": estimate.threshold, "pairs": estimate.pairs, "wrong": estimate.wrong,
                "rate": estimate.rate, "upper": estimate.upper,
            },
            "kinds": {name: kind.estimate()._asdict() for name, kind in self.bound.kinds.items()},
        }  # fmt: skip

    def estimate(self) -> ErrorEstimate:
        return self.bound.estimate()

    def _complain(self, why: str) -> None:
        """One line a minute."""
        if time.monotonic() - self._complained > 60:
            self._complained = time.monotonic()
            log.warning("the answer cache is passed over: %s", why)

    def close(self) -> None:
        self._embedding.shutdown(wait=True, cancel_futures=True)
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.store.close()
