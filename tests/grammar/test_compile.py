"""Grammars: what they allow, and that their state depends on the tokens only."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny
from tests.choices import next_choice
from tests.grammar.walks import END, PERSON, accepts, request, start, texts
from twostroke.grammar.compile import GrammarCompiler
from twostroke.grammar.lark import to_lark
from twostroke.grammar.library import GrammarError
from twostroke.grammar.masks import DEAD, TOO_SHORT, GrammarRows, allowed_tokens
from twostroke.sampling import Grammar
from twostroke.types import Status


def test_mask_is_what_continues_the_text(compiler, tokenizer):
    state = start(compiler, Grammar("regex", "on(ce|ly)"))
    allowed = allowed_tokens(state, next_choice(request(tokenizer)), tiny.VOCAB + 5)
    assert texts(tokenizer, allowed) <= {b"o", b"on", b"onc", b"once"}
    state.advance(tokenizer.encode("o")[0])
    state.advance(tokenizer.encode("n")[0])
    assert {b"c", b"l"} <= texts(tokenizer, state.next_tokens()[0]) <= {b"c", b"ce", b"l", b"ly"}


def test_end_tokens_only_where_the_text_may_end(compiler, tokenizer):
    state = start(compiler, Grammar("regex", "a{1,2}"))
    a = tokenizer.encode("a")[0]
    asked = request(tokenizer, grammar=Grammar("regex", "a{1,2}"))
    assert not allowed_tokens(state, next_choice(asked), tiny.VOCAB)[list(asked.stop_ids)].any()
    state.advance(a)
    allowed = allowed_tokens(state, next_choice(asked), tiny.VOCAB)
    assert allowed[list(asked.stop_ids)].all() and allowed[a]
    state.advance(a)
    assert set(np.flatnonzero(allowed_tokens(state, next_choice(asked), tiny.VOCAB))) == asked.stop_ids


def test_a_stop_token_is_never_text(compiler, tokenizer):
    b = tokenizer.encode("b")[0]
    asked = request(tokenizer, stop_token_ids=[b])
    state = start(compiler, Grammar("regex", "a[bc]+"))
    state.advance(tokenizer.encode("a")[0])
    assert not allowed_tokens(state, next_choice(asked), tiny.VOCAB)[b]
    state.advance(tokenizer.encode("c")[0])
    assert allowed_tokens(state, next_choice(asked), tiny.VOCAB)[b]


def test_min_tokens_and_ignore_eos_go_on_for_as_long_as_the_grammar_does(compiler, tokenizer):
    a = tokenizer.encode("a")[0]
    state = start(compiler, Grammar("regex", "a{1,2}"))
    state.advance(a)
    for params in ({"min_tokens": 3}, {"ignore_eos": True}):
        choice = next_choice(request(tokenizer, [a], **params))
        assert set(np.flatnonzero(allowed_tokens(state, choice, tiny.VOCAB))) == {a}
    state.advance(a)
    assert allowed_tokens(state, next_choice(request(tokenizer, [a, a], ignore_eos=True)), tiny.VOCAB)[END]
    with pytest.raises(GrammarError, match=TOO_SHORT):
        allowed_tokens(state, next_choice(request(tokenizer, [a, a], min_tokens=3)), tiny.VOCAB)


def test_special_tokens_are_allowed_only_where_named(compiler, tokenizer):
    state = start(compiler, Grammar("regex", "(.|\\n)*"))
    allowed, _ = state.next_tokens()
    assert not allowed[1]
    state = start(compiler, Grammar("ebnf", 'start: <[1]> "a"'))
    assert set(np.flatnonzero(state.next_tokens()[0])) == {1}


def test_a_state_that_nothing_continues_is_an_error(tokenizer):
    rows = GrammarRows(GrammarCompiler(tokenizer, 40))  # most letters are missing
    grammar = Grammar("regex", re.escape(tokenizer.token_bytes(39).decode()) + "z")
    asked = request(tokenizer, [39], grammar=grammar)
    free = request(tokenizer)
    masks = rows.masks([next_choice(free), next_choice(asked)])
    assert masks.allowed == {} and masks.errors == {1: DEAD}


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("regex", r"\d{2}/[a-c]\w*", ["12/a", "99/cXy_0"], ["1/a", "12/d", "٣٤/a"]),
        ("regex", "a\nb", ["a\nb"], ["ab"]),
        ("regex", "^once$", ["once"], ["on", "once "]),
        ("ebnf", 'root ::= "a" b+\nb ::= [0-9]', ["a1", "a123"], ["a", "b1"]),
        ("ebnf", "start: A b\nA: /x+/\nb: \"(\" b \")\" | \"y\"", ["xy", "xx((y))"], ["y", "x(y"]),
        ("json_object", "", ["{}", '{"a": [null, {"b": "ü\\n"}]}', '{\n  "a": 1.5e3\n}'], ["[]", "1", '{"a":}', "{"]),
        ("json_schema", '{"enum": ["a", 1, null]}', ['"a"', "1", "null"], ["2", '"b"']),
        ("json_schema", "true", ["1", "[]"], ["x"]),
    ],
)  # fmt: skip
def test_languages(compiler, tokenizer, kind, source, good, bad):
    grammar = Grammar(kind, source)
    compiler.prepare(grammar)
    for text in good:
        assert accepts(compiler, tokenizer, grammar, text), text
    for text in bad:
        assert not accepts(compiler, tokenizer, grammar, text), text


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_rollback_and_rebuilding_give_the_same_masks(compiler, seed):
    choice = random.Random(seed)
    grammar = choice.choice(
        [Grammar("json_schema", PERSON), Grammar("json_object"), Grammar("regex", "(ab?|[c-f]{2})*")]
    )
    state, masks = start(compiler, grammar), []
    for _ in range(30):
        allowed, may_end = state.next_tokens()
        masks.append((allowed.tobytes(), may_end))
        choices = [int(t) for t in np.flatnonzero(allowed) if t not in (0, 1, END)]
        if not choices:
            break
        state.advance(choice.choice(choices))
    tokens = list(state.tokens)
    back = choice.randrange(len(tokens) + 1)
    state.rollback(back)
    assert state.tokens == tokens[: len(tokens) - back]
    fresh = start(compiler, grammar)
    fresh.follow([9, 9, *state.tokens], 2)
    for one in (state, fresh):
        for position in range(len(state.tokens), len(masks)):
            one.follow([1, *tokens[:position]], 1)
            allowed, may_end = one.next_tokens()
            assert (allowed.tobytes(), may_end) == masks[position]
        one.follow([1, *tokens[: len(tokens) - back]], 1)  # backwards as well
        assert one.tokens == tokens[: len(tokens) - back]


def test_rollback_leaves_an_error_behind(compiler, tokenizer):
    state = start(compiler, Grammar("regex", "abc"))
    state.advance(tokenizer.encode("a")[0])
    before = state.next_tokens()[0].tobytes()
    with pytest.raises(GrammarError):
        state.advance(tokenizer.encode("x")[0])
    state.rollback(0)
    with pytest.raises(ValueError):
        state.rollback(2)
    state.rollback(1)
    state.advance(tokenizer.encode("a")[0])
    assert state.next_tokens()[0].tobytes() == before


def test_states_of_finished_requests_are_forgotten(compiler, tokenizer):
    rows = GrammarRows(compiler)
    first, second = (request(tokenizer, grammar=Grammar("json_object")) for _ in range(2))
    second.id = 2
    rows.masks([next_choice(first), next_choice(second)])
    first.status = Status.FINISHED
    rows.masks([next_choice(second)])
    assert set(rows.states) == {2}


def test_every_kind_compiles_to_the_one_notation():
    for grammar in (Grammar("json_object"), Grammar("regex", "a/b"), Grammar("ebnf", 'root ::= "a"')):
        assert to_lark(grammar).count("no_forcing") == 1
