"""Checks that an answer has exactly one end, in every API: it is whole, or it has one error as its last event."""

from __future__ import annotations

import json
from collections import Counter

from tests.serve.server import events

# 500 is missing: no request may be answered with it.
CLEAN = frozenset({200, 400, 401, 403, 404, 405, 408, 413, 415, 421, 429, 431, 503})
ENDS = {
    "/v1/messages": {"message_stop", "error"},
    "/v1/responses": {"response.completed", "response.incomplete", "response.failed"},
}


def check_end(path: str, body: dict, status: int, text: str) -> str:
    """The kind of the end: "whole", the code of an error event, or the status of a refusal. AssertionError if there is
    not exactly one end."""
    assert status in CLEAN, f"{path}: {status} {text[:300]}"
    if status != 200:
        document = json.loads(text)
        assert document["error"]["message"], text[:300]
        return str(status)
    if not body.get("stream"):
        check_whole(path, body, json.loads(text))
        return "whole"
    if path in ENDS:
        return check_typed(path, text)
    return check_choices(body, events(text))


def check_whole(path: str, body: dict, document: dict) -> None:
    if path == "/v1/messages":
        assert document["stop_reason"], document
    elif path == "/v1/responses":
        assert document["status"] in ("completed", "incomplete"), document
    else:
        finished = [choice["index"] for choice in document["choices"] if choice["finish_reason"]]
        assert sorted(finished) == list(range(body.get("n", 1))), document


def check_typed(path: str, text: str) -> str:
    documents = [json.loads(line) for line in events(text) if line != "[DONE]"]
    ends = [index for index, document in enumerate(documents) if document["type"] in ENDS[path]]
    assert ends == [len(documents) - 1], f"{path}: ends at {ends} of {len(documents)} events"
    last = documents[-1]
    if last["type"] == "error":
        return str(last["error"].get("type"))
    if last["type"] == "response.failed":
        return str(last["response"]["error"]["code"])
    return "whole"


def check_choices(body: dict, lines: list[str]) -> str:
    """Events of the two APIs that have choices."""
    assert lines and lines[-1] == "[DONE]" and lines.count("[DONE]") == 1, f"the stream ends with {lines[-2:]}"
    documents = [json.loads(line) for line in lines[:-1]]
    finished = Counter(c["index"] for d in documents for c in d.get("choices", ()) if c["finish_reason"])
    assert not finished or max(finished.values()) == 1, f"a choice ended twice: {finished}"
    errors = [index for index, document in enumerate(documents) if "error" in document]
    if errors:
        assert errors == [len(documents) - 1], f"errors at {errors} of {len(documents)} events"
        return str(documents[-1]["error"]["code"])
    assert sorted(finished) == list(range(body.get("n", 1))), f"ends of {sorted(finished)}, n = {body.get('n', 1)}"
    return "whole"
