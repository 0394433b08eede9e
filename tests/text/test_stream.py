"""Streams: the texts together are the whole text, however it is split, and no text is held back without need."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.samples import TEXTS
from twostroke.errors import InputError
from twostroke.text.stream import StopMatcher, StreamDecoder
from twostroke.text.tokenizer import Tokenizer


def _stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options: Any) -> list[str]:
    decoder = StreamDecoder(tokenizer, **options)
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    pieces = [decoder.push(ids[start:end]) for start, end in pairwise(edges)]
    return [*pieces, decoder.flush()]


@pytest.mark.parametrize("name", ["byte_level", "spaced", "unspaced"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_make_the_whole(request: pytest.FixtureRequest, name: str, data: st.DataObject) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=10))
    for skip in (True, False):
        visible = frozenset() if skip else tokenizer.special_ids
        for start in (True, False):
            pieces = _stream(tokenizer, ids, cuts, visible=visible, at_start=start)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip, at_start=start)
            single = _stream(tokenizer, ids, list(range(len(ids))), visible=visible, at_start=start)
            assert "".join(single) == "".join(pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_never_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push([number]) for number in tokenizer.encode(text, parse_special=False)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert decoder.flush() == ""


def test_a_character_leaves_with_its_last_byte(spaced: Tokenizer) -> None:
    decoder = StreamDecoder(spaced, at_start=False)
    byte_ids = [spaced.token_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert [decoder.push([number]) for number in byte_ids if number is not None] == ["", "", "€"]


def test_wrong_bytes_show_once_they_are_known_to_be_wrong(spaced: Tokenizer) -> None:
    decoder = StreamDecoder(spaced, at_start=False)
    start, letter = spaced.token_id("<0xE2>"), spaced.token_id("<0x41>")
    assert start is not None
    assert letter is not None
    assert decoder.push([start]) == ""
    assert decoder.push([letter]) == "\ufffdA"
    assert decoder.push([start]) == ""
    assert decoder.flush() == "\ufffd"


def _naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


_SMALL = st.text("ab<|>", max_size=24)


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(_SMALL, max_size=8), stops=st.lists(st.text("ab<|>", min_size=1, max_size=5), max_size=4))
def test_stops_do_not_depend_on_the_cut(pieces: list[str], stops: list[str]) -> None:
    matcher, emitted, matched = StopMatcher(stops), "", None
    text = ""
    for piece in pieces:
        text += piece
        more, matched = matcher.push(piece)
        emitted += more
        if matched is None:  # held back: the longest end that begins a stop string, not a character more
            held = text[len(emitted) :]
            assert emitted + held == text
            longest = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
            assert len(held) == longest
        else:
            break
    emitted += matcher.flush()
    assert (emitted, matched) == _naive(text, stops)


def test_nothing_is_sent_after_a_stop() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one E") == ("one ", None)
    assert matcher.push("ND two") == ("", "END")
    assert matcher.push("three") == ("", "END")
    assert matcher.flush() == ""


def test_the_first_to_end_wins_and_the_longest_of_those() -> None:
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopMatcher(["c", "bc"]).push("abc") == ("a", "bc")


def test_long_stops_are_cheap() -> None:
    stop = "a" * 50_000 + "b"
    matcher = StopMatcher([stop, "b" + stop])
    assert matcher.push("a" * 60_000)[1] is None
    assert matcher.push("b") == ("", stop)


@pytest.mark.parametrize("stops", ["END", [""], [5], [None]])
def test_bad_stops_are_refused(stops: object) -> None:
    with pytest.raises(InputError, match="stop"):
        StopMatcher(stops)  # type: ignore[arg-type]
