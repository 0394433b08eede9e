"""The core's step: a frozen request goes in, events that name it by its id come out."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import count

import pytest

from twostroke import LLM, SamplingParams
from twostroke.engine.answer import Answer
from twostroke.engine.core import Core
from twostroke.record import replace
from twostroke.types import Event, FinishReason, Request, RequestState

PROMPT = tuple(range(3, 43))


@pytest.fixture(scope="module")
def llm(llama_folder) -> LLM:
    return LLM(llama_folder, max_model_len=192, threads=1, seed=1, max_batch_tokens=16)


def run(core: Core, request: Request) -> tuple[RequestState, list[Event]]:
    state, events = core.submit(request), []
    while not core.idle:
        events += core.step()
    return state, events


def test_a_request_is_never_changed(llm: LLM) -> None:
    request = llm.engine.intake.make(list(PROMPT), SamplingParams(max_tokens=5), 1.0)[0]
    before = replace(request)
    state, events = run(llm.engine.core, request)
    assert request == before and hash(request.tokens) == hash(PROMPT)
    assert state.tokens == [*PROMPT, *(token for event in events for token in event.token_ids)]
    with pytest.raises(FrozenInstanceError):
        request.limit = 7  # type: ignore[misc]


def test_facts_come_when_they_changed_and_fill_the_same_timeline(llm: LLM) -> None:
    core = llm.engine.core
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    request = llm.engine.intake.make(list(PROMPT), params, core.clock(), salt=b"not cached")[0]
    answer = Answer(request, llm.tokenizer)
    state, events = core.submit(request), []
    while not core.idle:
        for event in core.step():
            events.append(event)
            answer.push(event, core.collected)
    assert [event.facts is not None for event in events] == [True, *[False] * 7, True]
    assert all(event.request_id == request.id for event in events)
    assert answer.sample.timeline == state.timeline and state.timeline.chunks == 3


def test_the_samples_of_a_prompt_have_ids_in_a_row(llm: LLM) -> None:
    first, second = (llm.engine.intake.make(list(PROMPT), SamplingParams(n=3), 0.0) for _ in range(2))
    assert [request.id - first[0].id for request in (*first, *second)] == list(range(6))
    assert [request.sample for request in first] == [0, 1, 2]
    assert len({request.seed for request in first}) == 1 and first[0].seed != second[0].seed


def test_an_abort_is_by_id_and_happens_once(llm: LLM) -> None:
    core = llm.engine.core
    running, waiting = (llm.engine.intake.make(list(PROMPT), SamplingParams(max_tokens=5), 0.0)[0] for _ in range(2))
    core.submit(running)
    core.step()
    core.submit(waiting)
    for request in (running, waiting):
        event = core.abort(request.id)
        assert event is not None and event.finish_reason is FinishReason.ABORT and event.facts is not None
        assert core.abort(request.id) is None
    while not core.idle:
        core.step()
    assert core.abort(10**9) is None


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "seed": 5},
        {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 12, "seed": 6},
    ],
    ids=["greedy", "sampled", "penalties"],
)
def test_a_request_that_another_engine_began_goes_on_with_the_same_tokens(llm: LLM, params: dict) -> None:
    """`written` tokens belong to the answer: positions, penalties and limits count as if one engine had written all."""
    whole = llm.engine.intake.make(list(PROMPT), SamplingParams(max_tokens=20, **params), 0.0)[0]
    core = llm.engine.core
    complete, _ = run(core, whole)
    for number, written in zip(count(500), (1, 7, complete.output_length - 1)):
        begun = tuple(complete.tokens[: len(PROMPT) + written])
        state, events = run(core, replace(whole, id=number, tokens=begun, written=written, salt=b"%d" % number))
        assert state.tokens == complete.tokens and state.finish_reason is complete.finish_reason
        assert sum(len(event.token_ids) for event in events) == complete.output_length - written
        assert state.timeline.prompt_tokens == len(PROMPT)
