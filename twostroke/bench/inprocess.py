"""Loads on an engine in this process: no network, no tokenizer, the engine's own timeline of every request."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from twostroke.bench import prompts
from twostroke.bench.client import OnRecord
from twostroke.bench.record import IN_PROCESS, RequestRecord, Run, new_run
from twostroke.bench.workload import Load
from twostroke.cost.simulation.trace import Arrival, Contents
from twostroke.draft.replay import replay
from twostroke.errors import InputError
from twostroke.sampling import SamplingParams
from twostroke.types import RequestState

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM


def measure(llm: LLM, load: Load, model: str, machine: str = "", progress: OnRecord | None = None) -> Run:
    run = new_run(load, IN_PROCESS, model, machine)
    run.settings = settings_document(llm)
    core, clock = llm.engine.core, llm.engine.core.clock
    waiting = deque(zip(load.arrivals, prompts_of(llm, load), strict=True))
    ended: list[tuple[RequestRecord, RequestState]] = []
    live: dict[int, tuple[RequestRecord, RequestState]] = {}
    records: list[RequestRecord] = []
    began = clock()
    while waiting or live:
        now = clock() - began
        while waiting and is_due(load, waiting[0][0], now, len(live)):
            arrival, tokens = waiting.popleft()
            due = arrival.at if load.closed is None else now
            record = RequestRecord(due, now, prompt=len(tokens), parts=[list(part) for part in arrival.parts])
            records.append(record)
            request = submit(llm, arrival, tokens, began + due, record, load.temperature)
            if request is not None:
                live[request.id] = (record, request)
        if not live:
            if waiting:
                time.sleep(max(0.0, min(0.05, waiting[0][0].at - (clock() - began))))
            continue
        for event in core.step():
            if event.finish_reason is not None:
                record, request = live.pop(event.request_id)
                finish(record, request, began, event.error)
                ended.append((record, request))
                if progress is not None:
                    progress(record)
    for record, request in ended:
        tokens, length = request.tokens, request.prompt_length
        record.lookup = list(replay(tokens[:length], tokens[length:]))
    run.records = sorted(records, key=lambda record: record.arrival)
    return run


def prompts_of(llm: LLM, load: Load) -> list[list[int]]:
    if load.texts:
        return [llm.engine.intake.tokenize(text) for text in load.texts]
    return [prompts.token_ids(arrival, llm.arch.vocab) for arrival in load.arrivals]


def warm_up(llm: LLM) -> None:
    measure(llm, Load("warm up", [Arrival(0.0, (Contents(1 << 35).own(64),), 4)], 1), "")


def is_due(load: Load, arrival: Arrival, now: float, live: int) -> bool:
    return arrival.at <= now if load.closed is None else live < load.closed


def submit(
    llm: LLM, arrival: Arrival, tokens: list[int], at: float, record: RequestRecord, temperature: float = 0.0
) -> RequestState | None:
    params = SamplingParams(max_tokens=arrival.output, temperature=temperature, seed=len(tokens), ignore_eos=True)
    try:
        request = llm.engine.intake.requests(tokens, params, at)[0]
    except InputError as error:
        record.error = str(error)
        return None
    return llm.engine.core.submit(request)


def finish(record: RequestRecord, request: RequestState, began: float, error: str | None) -> None:
    timeline = request.timeline
    record.pieces = [moment - began for moment in timeline.token_times]
    record.end = (timeline.end or began) - began
    record.cached, record.output, record.error = timeline.cached_tokens, timeline.output_tokens, error
    record.timings = {
        "queue_s": timeline.queue,
        "prefill_s": timeline.prefill,
        "decode_s": timeline.decode,
        "ttft_s": timeline.ttft,
        "preemptions": timeline.preemptions,
        "recomputed_tokens": timeline.recomputed_tokens,
    }


def settings_document(llm: LLM) -> dict[str, Any]:
    """The engine's settings as plain values, for a diagnosis."""
    settings = llm.settings
    names = [item.name for item in fields(settings) if item.name not in ("layout", "reasons")]
    return {name: getattr(settings, name) for name in names}
