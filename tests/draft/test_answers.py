"""Earlier answers: found by their own tenant alone, in bounded memory."""

from __future__ import annotations

import random

from twostroke.draft.answers import BEFORE, KEY, PAST, TEMPLATE, EarlierAnswers
from twostroke.draft.lookup import Lookup

PROMPT = list(range(100, 150))
ANSWER = [(7 * i) % 90 for i in range(60)]


def test_a_question_that_comes_again_finds_its_answer() -> None:
    earlier = EarlierAnswers()
    earlier.add(b"a", PROMPT + ANSWER, len(PROMPT))
    lookup = Lookup(earlier, b"a")
    assert lookup.update(PROMPT) == BEFORE
    assert lookup.guess(PROMPT, 16) == ANSWER[:16]
    written = PROMPT + ANSWER[:20]
    assert lookup.update(written) > BEFORE and lookup.guess(written, 8) == ANSWER[20:28]
    other = [*written, *range(200, 210)]
    assert lookup.update(other) == 0  # another way: no guess
    lookup = Lookup(earlier, b"a")
    whole = PROMPT + ANSWER
    assert lookup.update(whole[:-1]) and lookup.guess(whole[:-1], 4) == ANSWER[-1:]
    assert lookup.update(whole) and not lookup.guess(whole, 4)  # the earlier answer ended here
    assert lookup.update([*whole, 300]) == 0


def test_another_tenant_finds_nothing() -> None:
    earlier = EarlierAnswers()
    earlier.add(b"a", PROMPT + ANSWER, len(PROMPT))
    assert Lookup(earlier, b"b").update(PROMPT) == 0 and Lookup(earlier).update(PROMPT) == 0
    assert earlier.find(b"b", PROMPT) is None and earlier.find(b"a", PROMPT) is not None


def test_a_few_equal_tokens_are_no_match() -> None:
    earlier = EarlierAnswers()
    earlier.add(b"", PROMPT + ANSWER, len(PROMPT))
    assert earlier.find(b"", [900, *PROMPT[1 - TEMPLATE :]]) is None  # all of it may be the chat template's
    assert earlier.find(b"", [900, *PROMPT[-TEMPLATE:]]) is not None
    assert earlier.find(b"", [900, *ANSWER[11 : 10 + PAST]]) is None
    assert earlier.find(b"", [900, *ANSWER[10 : 10 + PAST]]) is not None


def test_the_request_itself_comes_first() -> None:
    earlier = EarlierAnswers()
    earlier.add(b"", PROMPT + ANSWER, len(PROMPT))
    mine = [*PROMPT[-10:], 800, 801, 802, *PROMPT[-10:]]
    lookup = Lookup(earlier)
    assert lookup.update(mine) and lookup.guess(mine, 3) == [800, 801, 802]


def test_memory_is_bounded_and_what_is_forgotten_is_not_found() -> None:
    earlier, rng = EarlierAnswers(most=2000), random.Random(0)
    texts = [[rng.randint(0, 20) for _ in range(rng.randint(20, 200))] for _ in range(100)]
    for number, text in enumerate(texts):
        earlier.add(b"%d" % (number % 3), text, 10)
        assert earlier.held <= 2000 and earlier.held == sum(len(kept) for _, kept, _ in earlier.texts.values())
        for salt, places in earlier.places.items():
            for key, (where, end) in places.items():
                kept_salt, kept, _ = earlier.texts[where]
                assert kept_salt == salt and kept[end - KEY : end] == key
    assert len(earlier.texts) < 60 and set(earlier.places) <= {b"0", b"1", b"2"}
