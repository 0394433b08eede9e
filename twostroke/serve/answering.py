"""The answer cache in the way of a request: which requests it may answer, and answers that are replayed as streams.

A hit is made of the stored tokens by the same code that makes text of the engine's tokens, so it has the same pieces,
the same stop strings and the same tool calls. Requests that are equal and determined and that come at the same time are
computed once: the later ones are filled from the stream of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from twostroke.answers import guard
from twostroke.answers.cache import AnswerCache
from twostroke.answers.keys import context_key, exact_key, tenant_key
from twostroke.answers.lookup import Computed, KnownAnswer, Looked, Query
from twostroke.engine.answer import Answer, StreamEvent
from twostroke.remote.admission import BusyError
from twostroke.remote.client import EngineError
from twostroke.remote.stream import Stream
from twostroke.sampling import SamplingParams
from twostroke.serve.sampling import AnswerCacheOptions
from twostroke.serve.shadow import Shadows
from twostroke.serve.transport.http import Exchange
from twostroke.types import Event, FinishReason

if TYPE_CHECKING:
    from twostroke.serve.service import GenerationInput, Service

WARM = 0.5  # temperature up to which answers without a seed are shared by meaning
NO_STORE = (b"no-store", b"no-cache")


class Question(NamedTuple):
    """The last message of a conversation, and everything before it."""

    text: str
    before: Any
    tools: bool  # the request has some
    begun: Query | None = None  # the lookup by meaning, which goes on


def question_of(messages: Sequence[Mapping[str, Any]], before: Any, tools: bool) -> Question | None:
    """None where the last message is not a user's text."""
    content = messages[-1].get("content")
    plain = messages[-1].get("role") == "user" and isinstance(content, str) and set(messages[-1]) == {"role", "content"}
    return Question(content, before, tools) if plain and isinstance(content, str) else None


def comparable(question: Question, params: SamplingParams, allowed: frozenset[str] = frozenset()) -> bool:
    """Whether a question may be compared by meaning. params: with the server's defaults."""
    warm = params.temperature > WARM and params.seed is None
    if (warm and "temperature" not in allowed) or (question.tools and "tools" not in allowed):
        return False
    return guard.fit_for_sharing(question.text, allowed) is None


def context_of(
    question: Question, visible: frozenset[int], secret: bytes, salt: bytes, model: str, params: SamplingParams
) -> bytes:
    return context_key(secret, salt, model, (question.before, sorted(visible)), params)


def bypasses(exchange: Exchange, cache: AnswerCacheOptions | None) -> bool:
    """Whether a request asks not to be answered from the cache."""
    directives = exchange.headers.get(b"cache-control", b"").lower()
    return (cache is not None and not cache.answer) or any(word in directives for word in NO_STORE)


def several(params: SamplingParams) -> bool:
    """More than one answer's text is asked for: other samples, or log-probabilities."""
    return params.n != 1 or params.logprobs is not None or params.prompt_logprobs is not None


class Planned(NamedTuple):
    query: Query
    looked: Looked


class ReplayOwner:
    """The owner of a stream that no engine fills."""

    def __init__(self, leader: Stream | None = None):
        self.leader = leader
        self.tap: Any = None

    def wake_later(self, stream: Stream) -> None:
        stream.wake()

    def abort(self, request_ids: list[int]) -> None:
        """Called when the stream's reader has gone, or when the stream has ended."""
        leader, self.leader = self.leader, None
        if leader is not None:
            if self.tap in leader.taps:
                leader.taps.remove(self.tap)
            leader.release()

    def end(self, stream: Stream, error: str) -> None:
        self.abort([])


class Answering:
    def __init__(self, cache: AnswerCache, service: Service):
        self.cache = cache
        self.service = service
        self._leaders: dict[bytes, Stream] = {}  # by exact key
        self.shadows = Shadows(service.clock, lambda: service.engine.in_flight > 0)

    # ---- which requests --------------------------------------------------------------------------------------------

    def query(self, exchange: Exchange, given: GenerationInput) -> Query | None:
        """None: this request is not answered from the cache, nor stored."""
        self.shadows.request()
        params, cache = given.params, given.cache
        if bypasses(exchange, cache):
            self.cache.counters.bypassed += 1
            return None
        if len(given.prompts) != 1 or several(params) or given.explain:
            return None
        service, salt, secret = self.service, exchange.caller.salt, self.cache.secret
        effective = params.with_defaults(service.engine.intake.defaults)
        question = given.question
        query = question.begun if question is not None else None
        if query is None:
            query = self._semantic(exchange, question, effective, given.format.visible, cache)
        if effective.temperature == 0 or params.seed is not None:
            query.exact = exact_key(
                secret, salt, service.fingerprint, given.prompts[0], effective, given.format.visible
            )
        return query if query.exact or query.context else None

    def begin(
        self, exchange: Exchange, question: Question, params: SamplingParams, visible: frozenset[int],
        cache: AnswerCacheOptions | None,
    ) -> Question:  # fmt: skip
        """Begins to look for the question, before its prompt is made."""
        if bypasses(exchange, cache) or several(params):
            return question
        effective = params.with_defaults(self.service.engine.intake.defaults)
        query = self._semantic(exchange, question, effective, visible, cache)
        self.cache.begin(query)
        return question._replace(begun=query)

    def _semantic(
        self, exchange: Exchange, question: Question | None, params: SamplingParams, visible: frozenset[int],
        cache: AnswerCacheOptions | None,
    ) -> Query:  # fmt: skip
        """The query for a question, without a context where the question is not compared by meaning. params: with the
        server's defaults."""
        salt, secret, options = exchange.caller.salt, self.cache.secret, self.cache.options
        query = Query(tenant_key(secret, salt), max_age=None if cache is None else cache.max_age)
        if options.tier == "semantic" and question is not None and comparable(question, params, options.allow):
            query.question = question.text
            query.context = context_of(question, visible, secret, salt, self.service.fingerprint, params)
        return query

    async def look(self, query: Query) -> Planned:
        return Planned(query, await self.cache.lookup(query))

    async def look_again(self, looked: Looked, stream: Stream) -> None:
        """Wait for a late lookup while the engine has the request. What is found before the answer begins is used."""
        if looked.late is None:
            return
        begun = asyncio.get_running_loop().create_future()

        def tap(_: int, event: StreamEvent) -> None:
            if not begun.done():
                begun.set_result(None)

        stream.taps.append(tap)
        try:
            await self.cache.overtake(looked, begun)
        except BaseException:
            stream.close()
            raise
        finally:
            stream.taps.remove(tap)

    # ---- answers that are known ------------------------------------------------------------------------------------

    def known(
        self, exchange: Exchange, given: GenerationInput, planned: Planned
    ) -> tuple[Stream, dict[str, Any] | None]:
        """The stream of a hit, and what its answer says about the cache."""
        found = planned.looked.found
        assert found is not None
        if planned.looked.shadow:
            self.check_in_shadow(exchange, given, planned)
        return self.replay(exchange, given, found), described(found, False)

    def replay(self, exchange: Exchange, given: GenerationInput, found: KnownAnswer) -> Stream:
        """A stream that has all of its pieces."""
        stream, answer = self._stream(exchange, given, ReplayOwner())
        entry, now = found.entry, self.service.clock()
        answer.sample.timeline.scheduled = now
        last = len(entry.tokens) - 1
        for place, token in enumerate(entry.tokens):
            ends = place == last and not entry.by_string
            piece = answer.push(Event(answer.request.id, (token,), FinishReason.STOP if ends else None), now)
            stream.put(0, piece)
            if answer.finished:
                break
        if not answer.finished:  # a stop string that is not found again: it cannot be, as the parameters are the same
            stream.put(0, answer.push(Event(answer.request.id, (), FinishReason.STOP), now))
        return stream

    def _stream(self, exchange: Exchange, given: GenerationInput, owner: ReplayOwner) -> tuple[Stream, Answer]:
        engine, salt = self.service.engine, exchange.caller.salt
        (request,) = engine.intake.make(given.prompts[0], given.params, exchange.arrival, salt, exchange.caller.number)
        stream = Stream(owner, given.prompts, given.params, exchange.arrival, salt)
        answer = Answer(request, engine.tokenizer, given.format.visible)
        stream.answers.append(answer)
        return stream, answer

    def join(self, exchange: Exchange, given: GenerationInput, query: Query) -> Stream | None:
        """A stream filled from one that computes the same answer now; None: there is none."""
        leader = self._leaders.get(query.exact) if query.exact else None
        if leader is None or leader.ending:
            return None
        owner = ReplayOwner(leader)
        stream, answer = self._stream(exchange, given, owner)
        leader.holders += 1
        answer.sample.timeline.scheduled = self.service.clock()

        def tap(_: int, event: StreamEvent) -> None:
            if answer.finished:
                return
            reason = None if event.finish_reason is None else FinishReason(event.finish_reason)
            if reason is FinishReason.STOP and ended_by_string(leader.answers[0]):
                reason = None  # this stream finds the stop string itself
            pushed = Event(answer.request.id, event.token_ids, reason, error=event.error)
            stream.put(0, answer.push(pushed, self.service.clock()))

        owner.tap = tap
        written = tuple(leader.answers[0].sample.token_ids)
        if written:
            tap(0, StreamEvent("", written))
        leader.taps.append(tap)
        self.cache.counters.hits["coalesced"] += 1
        return stream

    # ---- answers that are computed ---------------------------------------------------------------------------------

    def watch(self, planned: Planned, stream: Stream) -> None:
        """Stores the answer when it has ended well, and lets equal requests join it until then."""
        query, looked = planned
        if query.exact:
            self._leaders[query.exact] = stream

        def tap(_: int, event: StreamEvent) -> None:
            if event.finish_reason is None:
                return
            if self._leaders.get(query.exact) is stream:
                del self._leaders[query.exact]
            answer = stream.answers[0]
            sample = answer.sample
            if event.finish_reason != FinishReason.STOP or event.error is not None:
                return  # an answer that was cut off, failed or was given up is not kept
            computed = Computed(
                tuple(sample.token_ids), ended_by_string(answer), sample.timeline.prompt_tokens, sample.timeline.e2e,
                lambda ids: self.service.tokenizer.decode(ids, at_start=False),
            )  # fmt: skip
            self.cache.store_later(query, looked, computed)

        stream.taps.append(tap)

    def check_in_shadow(self, exchange: Exchange, given: GenerationInput, planned: Planned) -> None:
        """Computes an answer that was also given from the cache, to learn whether that was right: when it is quiet."""

        def submit() -> Stream | None:
            try:
                stream = self.service.engine.submit(
                    given.prompts, given.params, exchange.caller.salt, self.service.clock(), given.format.visible,
                    exchange.caller.number,
                )  # fmt: skip
            except (BusyError, EngineError):
                return None
            self.watch(planned, stream)
            return stream

        self.shadows.add(submit)


def ended_by_string(answer: Answer) -> bool:
    tokens = answer.sample.token_ids
    return answer.stops is not None and not (tokens and tokens[-1] in answer.request.stop_ids)


def described(found: KnownAnswer | None, joined: bool) -> dict[str, Any]:
    """What an answer says about the cache."""
    if joined:
        return {"hit": "coalesced"}
    if found is None:
        return {"hit": None}
    return {
        "hit": found.tier, "id": found.hit, "similarity": found.similarity, "age_s": found.age,
        "saved_s": found.entry.seconds,
    }  # fmt: skip
