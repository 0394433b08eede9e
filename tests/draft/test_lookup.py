"""Prompt lookup against a plain search of the whole text."""

from __future__ import annotations

import random

from twostroke.draft.lookup import CANDIDATES, COMPARED, KEY, Lookup


def longest_match(tokens: list[int]) -> int:
    """The longest past, up to COMPARED tokens, that an earlier place shares with the end; 0 below KEY."""
    best = 0
    for place in range(KEY, len(tokens)):
        length = 0
        while length < min(place, COMPARED) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= KEY else 0


def test_every_match_is_true_and_found_where_there_is_one() -> None:
    rng = random.Random(0)
    for _ in range(50):
        lookup, tokens = Lookup(), [rng.randrange(4) for _ in range(rng.randrange(1, 60))]
        for _ in range(60):
            length = lookup.update(tokens)
            assert (length > 0) == (longest_match(tokens) > 0)
            if length:
                place = lookup.next
                assert place < len(tokens) and tokens[place - KEY : place] == tokens[-KEY:]
            tokens += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]


def test_the_longest_of_the_newest_places_wins() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 8, 3, 4, 5, 7, 1, 2, 3, 4, 5]
    lookup = Lookup()
    assert lookup.update(tokens) == 5 and lookup.guess(tokens, 3) == [9, 8, 3]


def test_a_match_grows_while_guesses_are_right() -> None:
    text = list(range(10, 40))
    tokens = [*text, 1, *text[:4]]
    lookup = Lookup()
    assert lookup.update(tokens) == 4
    for token in text[4:20]:
        assert lookup.guess(tokens, 1) == [token]
        tokens.append(token)
        lookup.update(tokens)
    assert lookup.length == 20
    tokens.append(1)
    assert lookup.update(tokens) == 0 and lookup.guess(tokens, 4) != []


def test_a_loop_is_continued_past_its_end() -> None:
    tokens = [7, 5, 6, 7, 5, 6, 7]
    lookup = Lookup()
    lookup.update(tokens)
    assert lookup.guess(tokens, 8) == [5, 6, 7, 5, 6, 7, 5, 6]


def test_the_same_tokens_again_are_no_match() -> None:
    """On a GPU a plan may be made again before anything new is known."""
    lookup, tokens = Lookup(), list(range(40))
    assert [lookup.update(tokens) for _ in range(3)] == [0, 0, 0]
    again = [*tokens, *range(10)]
    assert lookup.update(again) == lookup.update(again) == 10


class Counted(list[int]):
    """Counts the tokens that are looked at."""

    seen = 0

    def __getitem__(self, place):
        self.seen += len(range(*place.indices(len(self)))) if isinstance(place, slice) else 1
        return super().__getitem__(place)


def test_a_token_costs_the_same_in_any_context() -> None:
    """Of three kinds of tokens: there is always a match, and it soon ends."""
    seen = []
    for length in (500, 4000, 40_000):
        rng, lookup = random.Random(0), Lookup()
        tokens = Counted(rng.randrange(3) for _ in range(length))
        while lookup.indexed < length:
            lookup.update(tokens)
        tokens.seen = 0
        for _ in range(100):
            tokens.append(rng.randrange(3))
            lookup.update(tokens)
        seen.append(tokens.seen / 100)
    assert max(seen) < 2 * COMPARED * CANDIDATES + 10 and seen[2] < 1.5 * seen[0]
