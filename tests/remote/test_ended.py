"""The record of ended requests: bounded, and without anything that tenants could learn of each other."""

from __future__ import annotations

import json
import threading
import time

import pytest

from twostroke.metrics.timeline import Timeline
from twostroke.remote import ended as module
from twostroke.remote.ended import EndedRequests, by_arrival
from twostroke.sampling import SamplingParams
from twostroke.types import Request


def ended(record: EndedRequests, number: int, tokens: list[int], salt: bytes = b"") -> None:
    timeline = Timeline(float(-number), end=1.0, prompt_tokens=len(tokens))
    record.add(Request(number, tuple(tokens), SamplingParams()), timeline, salt, "stop")


def test_the_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    record = EndedRequests()
    for number in range(module.KEPT + 5):
        ended(record, number, [number])
    assert [one.request for one in record.latest()][:1] == [5] and len(record.latest()) == module.KEPT
    monkeypatch.setattr(module, "MAX_SEGMENTS", 100)
    ended(record, 9999, list(range(1000)))
    assert sum(len(one.segments) for one in record.latest()) <= 100


def test_the_way_of_the_blocks_is_kept() -> None:
    record = EndedRequests()
    timeline = Timeline(0.0, 1.0, 5.0, [2.0, 5.0], prompt_tokens=8, transfer=0.25, decode_queue=0.5)
    record.add(Request(1, tuple(range(8)), SamplingParams()), timeline, b"", "stop")
    kept = record.latest()[0].timeline
    assert (kept.transfer, kept.decode_queue, kept.e2e) == (0.25, 0.5, 5.0)


def test_tenants_share_no_contents() -> None:
    record = EndedRequests()
    tokens = list(range(200))
    for number, salt in enumerate((b"a", b"a", b"b")):
        ended(record, number, tokens, salt)
    theirs, again, ours = by_arrival(record.latest())  # by arrival, which runs backwards here
    assert len(theirs.segments) == 1 and len(again.segments) > 3 and again.segments == ours.segments
    assert theirs.segments[0].content not in {segment.content for segment in ours.segments}
    assert json.loads(json.dumps(ours.segments))[0] == list(ours.segments[0])


def test_a_long_request_is_recorded_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    record, threads = EndedRequests(), []
    monkeypatch.setattr(record, "_cut", lambda *_: threads.append(threading.current_thread()) or [])
    ended(record, 1, [1] * module.AT_ONCE)
    ended(record, 2, [1] * (module.AT_ONCE + 1))
    deadline = time.monotonic() + 30
    while len(record.latest()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [one.request for one in record.latest()] == [1, 2]
    assert threads[0] is threading.main_thread() and threads[1] is not threads[0]
