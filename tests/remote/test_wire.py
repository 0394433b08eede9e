"""Messages as bytes: everything arrives as it was sent, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.remote.engines import SETTINGS
from twostroke.config import make_config, resolve
from twostroke.hardware import Hardware
from twostroke.kv.addresses import Name
from twostroke.metrics.counts import Counts
from twostroke.metrics.steplog import BlockCounts, LoggedWork, Step
from twostroke.metrics.timeline import Facts
from twostroke.record import replace
from twostroke.remote import messages, wire
from twostroke.remote.messages import Change, Changed, Hello, Orders, Ready, Recall, Report, Steps, runs_of
from twostroke.remote.wire import MAX_MESSAGE, Reader, WireError, encode, from_engine, to_engine
from twostroke.sampling import Grammar, SamplingParams
from twostroke.types import Event, FinishReason, Request, TokenLogprobs
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.describe import load_arch

ids = st.integers(0, 2**31 - 1)
request_ids = st.integers(0, 2**53 - 1)
scores = st.builds(
    TokenLogprobs, ids, st.floats(allow_nan=False), st.lists(st.tuples(ids, st.floats(allow_nan=False))).map(tuple)
)
facts = st.builds(Facts, *[st.none() | st.floats(0, 1e9)] * 2, *[ids] * 6, *[st.floats(0, 1e9)] * 2)
events = st.builds(
    Event, request_ids, st.lists(ids).map(tuple), st.none() | st.sampled_from(FinishReason),
    st.lists(scores).map(tuple), st.none() | st.dictionaries(ids, scores, max_size=3), st.none() | st.text(min_size=1),
    st.none() | facts,
)  # fmt: skip
params = st.builds(
    SamplingParams, max_tokens=st.none() | st.integers(1, 2**31), temperature=st.floats(0, 100), n=st.integers(1, 128),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1), stop=st.lists(st.text(min_size=1, max_size=9), max_size=3),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=3), logprobs=st.none() | st.integers(0, 128),
    grammar=st.none() | st.just(Grammar("regex", "a+")),
)  # fmt: skip
requests = st.builds(
    Request, request_ids, st.lists(ids).map(tuple), params, st.integers(-(2**63), 2**64 - 1), st.floats(0, 1e9), ids,
    st.frozensets(ids), st.binary(max_size=40), ids, ids,
)  # fmt: skip


def through(reader: Reader[Any], data: bytes, cuts: list[int]) -> list[Any]:
    """The messages of these bytes, however they are cut."""
    found, last = [], 0
    for cut in [*sorted(c % (len(data) + 1) for c in cuts), len(data)]:
        found += reader.feed(data[last:cut])
        last = cut
    return found


def shape(value: Any) -> Any:
    """The types in a value: a tuple that comes back as a list is not the same."""
    if isinstance(value, tuple | list):
        return type(value), [shape(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return type(value), [shape(getattr(value, name)) for name in value.__struct_fields__]
    if is_dataclass(value):
        return type(value), [shape(getattr(value, item.name)) for item in fields(value)]
    return type(value)


def same(reader: Reader[Any], *sent: Any) -> bool:
    found = through(reader, b"".join(map(encode, sent)), [7])
    return found == list(sent) and shape(found) == shape(list(sent))


@settings(deadline=None, max_examples=60)
@given(st.lists(events, max_size=4), st.lists(st.integers(0, 2**16), max_size=5))
def test_reports_arrive_as_they_were_sent(news: list[Event], cuts: list[int]) -> None:
    report = Report(12.5, tuple(news), Counts(*range(len(Counts._fields) - 1), accepted_at=(3, 2, 0)), 3.5)
    assert through(from_engine(), encode(report) * 2, cuts) == [report, report]
    assert same(from_engine(), report)


def test_a_message_that_is_cut_short_is_a_wire_error() -> None:
    report = Report(12.5, (Event(1, (2,)), Event(3, (4,), FinishReason.STOP)), Counts(), 3.5)
    body = encode(report)[4:]
    reader = from_engine()
    assert reader.decode(body) == report
    for length in range(len(body)):
        with pytest.raises(WireError):
            reader.decode(body[:length])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(requests, st.integers(1, 128)), max_size=3), st.lists(request_ids).map(tuple))
def test_orders_arrive_as_they_were_sent(runs: list[tuple[Request, int]], aborts: tuple[int, ...]) -> None:
    assert same(to_engine(), Orders(tuple(runs), aborts))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(requests, st.integers(1, 5)), max_size=4))
def test_the_samples_of_a_prompt_are_sent_once(asked: list[tuple[Request, int]]) -> None:
    flat = [sibling for first, count in asked for sibling in first.siblings(count)]
    runs = runs_of(flat)
    assert [sibling for first, count in runs for sibling in first.siblings(count)] == flat
    assert len(runs) <= len(asked)
    strangers = [replace(flat[0], tokens=(*flat[0].tokens,)), flat[0]] if flat else []
    assert len(runs_of(strangers)) == len(strangers)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60))
def test_nonsense_is_a_wire_error(data: bytes) -> None:
    for reader in (from_engine(), to_engine()):
        with pytest.raises(WireError):
            list(reader.feed(struct.pack("<I", len(data)) + data))


def mutations(value: Any) -> Iterator[Any]:
    """The same plain data with one value in it replaced by another of a wrong type."""
    yield from ("nonsense", {"a": 1}, [[]])
    if isinstance(value, list):
        for index, item in enumerate(value):
            for wrong in mutations(item):
                yield [*value[:index], wrong, *value[index + 1 :]]


def test_a_wrong_type_anywhere_is_a_wire_error() -> None:
    scored = TokenLogprobs(1, -0.5, ((2, -1.0),))
    event = Event(1, (2,), FinishReason.STOP, (scored,), {3: scored}, None, Facts(1.0, 2.0, 3, 4, 5, 6, 7, 8))
    report = Report(1.0, (event,), Counts(), 2.0)
    whole = msgspec.msgpack.decode(encode(report)[4:], strict=False)
    reader, accepted = from_engine(), []
    assert reader.decode(msgspec.msgpack.encode(whole)) == report
    for wrong in [*mutations(whole), [*whole, 1], whole[:-1]]:
        with contextlib.suppress(WireError):
            accepted.append(reader.decode(msgspec.msgpack.encode(wrong)))
    assert accepted == [
        msgspec.structs.replace(report, events=(event._replace(error="nonsense"),))
    ]  # a string is right


@pytest.mark.parametrize("given_params", [{"temperature": -1.0}, {"stop": [""]}, {"grammar": {"kind": "x"}}, 7])
def test_bad_params_are_a_wire_error(given_params: object) -> None:
    request = msgspec.to_builtins(Request(1, (2,), SamplingParams()))
    body = msgspec.msgpack.encode(["orders", [[request | {"params": given_params}, 1]], []])
    with pytest.raises(WireError):
        to_engine().decode(body)


def test_each_side_takes_only_what_is_meant_for_it() -> None:
    for reader, message in ((from_engine(), Hello("m", {}, 20)), (to_engine(), messages.Beat(1, True))):
        with pytest.raises(WireError):
            list(reader.feed(encode(message)))


def test_a_length_over_the_limit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WireError, match="over the limit"):
        list(from_engine().feed(struct.pack("<I", MAX_MESSAGE + 1)))
    monkeypatch.setattr(wire, "MAX_MESSAGE", 10)
    with pytest.raises(WireError, match="over the limit"):
        encode(Hello("a model with a long name", {}, 20))


def test_settings_arrive_as_they_were_sent(llama_folder: Path) -> None:
    arch = load_arch(open_checkpoint(llama_folder))
    resolved = resolve(make_config(**SETTINGS), arch, Hardware("cpu", 2, 1 << 30), 1000)
    assert same(from_engine(), Ready(resolved, {"load": 1.0}, 0.5, (48, 0.01), "a machine", 12.5))
    assert same(from_engine(), Changed(7, resolved, ""), Changed(8, None, "no"))


@settings(deadline=None, max_examples=30)
@given(requests, st.lists(st.tuples(ids, st.binary(min_size=16, max_size=16)).map(lambda one: Name(*one))).map(tuple))
def test_messages_about_blocks_arrive_as_they_were_sent(request: Request, names: tuple[Name, ...]) -> None:
    payload = messages.BlockPayload("/proc/1/fd/2", 100, (0, 2), 2**32 - 1)
    assert same(to_engine(), messages.Expect(1, request, 64), messages.Export(2, 3, names, "/proc/1/fd/2"))
    assert same(to_engine(), messages.Arrive(4, 5, payload), messages.Arrive(4, 5, None), messages.TakeBack((6, 7)))
    assert same(from_engine(), messages.Expected(1, names), messages.Expected(1, None), messages.Exported(2, (0,), 9))
    assert same(from_engine(), *(messages.Arrived(3, complete) for complete in (True, False, None)))


def test_questions_and_steps_arrive_as_they_were_sent() -> None:
    assert same(to_engine(), Change(1, {"max_gap": 0.5, "policy": "fcfs"}), Recall(2, 3, 4))
    step = Step(9, 1.5, 0.01, (LoggedWork(1, 0, 16, "read"), LoggedWork(2, 40, 1)), 2, BlockCounts(5, 4, 3, 2, 1), 2, 1)
    assert same(from_engine(), Steps(3, (step, step._replace(works=()))))
    with pytest.raises(WireError):
        from_engine().decode(msgspec.msgpack.encode(["steps", 3, [[9, 1.5, 0.01, [[1, 2, 3, 4, 5]], 2, [1], 0, 0]]]))
