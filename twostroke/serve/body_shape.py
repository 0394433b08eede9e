"""Limits on the shape of a large JSON body, checked before it is parsed.

A body of 4 MiB can hold two million numbers or 300,000 fields. Parsers build an object for each of them while they hold
the interpreter lock. So the brackets and commas of a large body are counted first, in slices that take a millisecond
each, and a body with too many of them is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twostroke.serve.transport.errors import ApiError, bad_request

MAX_ELEMENTS = 1 << 17  # of all lists and objects together
MAX_OBJECTS = 1 << 14
MAX_FIELDS = 1 << 11  # of one object
MAX_DEPTH = 64
SLICE = 1 << 18  # bytes
COMMA, OPEN, CLOSE = ord(","), ord("{"), ord("}")
TO_BRACE = 0x20  # makes [ and ] the same bytes as { and }; a comma stays one


def check_shape(body: bytes) -> None:
    """A body with too many elements, fields or levels is a 400. What is no JSON may pass: the parser says so."""
    marks = punctuation(body)
    opens = marks | TO_BRACE == OPEN
    depth = np.cumsum(opens.astype(np.int8) - (marks | TO_BRACE == CLOSE), dtype=np.int32)
    if len(depth) and depth.max() > MAX_DEPTH:
        raise too_much(f"is nested deeper than {MAX_DEPTH} levels")
    if np.count_nonzero(marks == OPEN) > MAX_OBJECTS:
        raise too_much(f"has more than {MAX_OBJECTS} objects")
    fields = most_fields(marks, opens, depth)
    if fields > MAX_FIELDS:
        raise too_much(f"has an object with {fields} fields, of which at most {MAX_FIELDS} are read")


def check_text(text: str) -> None:
    """The same for JSON inside a string of the body."""
    if text.count(",") > MAX_FIELDS:
        check_shape(text.encode("utf-8", "surrogatepass"))


def punctuation(body: bytes) -> np.ndarray:
    """The brackets, braces and commas of a JSON text that are outside of its strings, in their order."""
    found: list[np.ndarray] = []
    count, inside = 0, 0
    for plain in slices(body):
        part = np.frombuffer(plain, np.uint8)
        quotes = np.cumsum(part == ord('"'), dtype=np.uint8) + np.uint8(inside)  # an odd number so far: inside a string
        as_brace = part | TO_BRACE
        marks = part[((as_brace == OPEN) | (as_brace == CLOSE) | (part == COMMA)) & (quotes & 1 == 0)]
        inside = int(quotes[-1]) & 1
        count += len(marks) - int(np.count_nonzero(marks | TO_BRACE == CLOSE))
        if count > MAX_ELEMENTS:
            raise too_much(f"has more than {MAX_ELEMENTS} elements in its lists and objects")
        found.append(marks)
    return np.concatenate(found) if found else np.empty(0, np.uint8)


def slices(body: bytes) -> Iterator[bytes]:
    """The body in parts. Escapes are blanked out, so that every quote left begins or ends a string."""
    start = 0
    while start < len(body):
        part = body[start : start + SLICE]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # the escape's second character is in the next slice
            part = body[start : start + SLICE + 1]
        start += len(part)
        yield part.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in part else part


def most_fields(marks: np.ndarray, opens: np.ndarray, depth: np.ndarray) -> int:
    """The commas of the object that has most of them, and one.

    A comma belongs to the last bracket before it that opened the same depth. Sorted by depth, with the order inside a
    depth kept, every opening bracket is followed by its own commas.
    """
    kept = opens | (marks == COMMA)
    order = np.argsort(depth[kept].astype(np.int16), kind="stable")
    ordered = marks[kept][order]
    places = np.flatnonzero(ordered != COMMA)
    commas = np.diff(places, append=len(ordered)) - 1
    objects = commas[ordered[places] == OPEN]
    return int(objects.max()) + 1 if len(objects) else 0


def too_much(what: str) -> ApiError:
    return bad_request(f"The body {what}: send less at once.", code="body_too_complex")
