"""Questions that are asked again, one after the other, on an engine in this process: with an answer cache and without.

As in the server, an answer is looked up first. One that is not known is computed and stored.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.answers.cache import AnswerCache
from twostroke.answers.keys import exact_key, tenant_key
from twostroke.answers.lookup import CacheOptions, Computed, Looked, Query
from twostroke.answers.store import FileStore
from twostroke.bench.inprocess import prompts_of
from twostroke.bench.record import IN_PROCESS, RequestRecord, Run, new_run
from twostroke.bench.workload import Load
from twostroke.cost.simulation.trace import Arrival, Contents
from twostroke.sampling import SamplingParams

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM
    from twostroke.engine.output import Output

ENTRIES = 1000


def asked_again(quick: bool) -> Load:
    """A few questions, each asked three times: two thirds of the requests were answered before."""
    contents = Contents()
    texts = [contents.own(120) for _ in range(3 if quick else 6)]
    return Load("questions asked again", [Arrival(0.0, (text,), 32) for _ in range(3) for text in texts], 1)


def run_cached(llm: LLM, load: Load) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(Path(folder) / "answers.db", ENTRIES)
        cache = AnswerCache(CacheOptions(), store, secrets.token_bytes(32))
        try:
            return asyncio.run(run_asked(llm, load, cache))
        finally:
            cache.close()


def run_plain(llm: LLM, load: Load) -> Run:
    return asyncio.run(run_asked(llm, load, None))


async def run_asked(llm: LLM, load: Load, cache: AnswerCache | None) -> Run:
    run, clock = new_run(load, IN_PROCESS, "", ""), llm.engine.core.clock
    began = clock()
    for arrival, tokens in zip(load.arrivals, prompts_of(llm, load), strict=True):
        now = clock() - began
        record = RequestRecord(now, now, prompt=len(tokens), output=arrival.output)
        params = SamplingParams(max_tokens=arrival.output, temperature=0, ignore_eos=True)
        query = None if cache is None else query_of(cache, tokens, params)
        looked = Looked() if cache is None or query is None else await cache.lookup(query)
        if looked.found is not None:
            record.pieces = [clock() - began] * arrival.output
        else:
            (answer,) = llm.generate([tokens], params)
            record.pieces = [moment - began for moment in answer.timeline.token_times]
            if cache is not None and query is not None:
                cache.store_later(query, looked, computed_of(answer, len(tokens)))
        record.end = clock() - began
        run.records.append(record)
    return run


def computed_of(answer: Output, prompt: int) -> Computed:
    return Computed(tuple(answer.token_ids), False, prompt, answer.timeline.e2e, lambda _: answer.text)


def query_of(cache: AnswerCache, tokens: list[int], params: SamplingParams) -> Query:
    exact = exact_key(cache.secret, b"", "", tokens, params, frozenset())
    return Query(tenant_key(cache.secret, b""), exact)
