"""Grammars: what they allow, that their state is made of tokens alone, and that no grammar can hurt the engine."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import tiny
from twostroke import LLM, InputError, SamplingParams
from twostroke.metrics.timeline import Timeline
from twostroke.run.grammar import DEAD, TOO_SHORT, GrammarCompiler, GrammarRows, allowed_tokens
from twostroke.run.grammar_check import GrammarChecker
from twostroke.run.grammar_library import GrammarError
from twostroke.run.grammar_text import to_lark
from twostroke.sampling import MAX_GRAMMAR, Grammar
from twostroke.text.tokenizer import from_folder
from twostroke.types import Request, Status

END = 2  # <|im_end|> of the tiny tokenizer
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    tiny.save_tokenizer(folder)
    return from_folder(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer, tiny.VOCAB + 5)  # logits are wider than the vocabulary
    yield made
    made.checker.close()


@pytest.fixture(scope="module")
def llm(llama_folder):
    return LLM(llama_folder, dtype="float32", max_requests=16)


def request(tokenizer, output=(), **params):
    made = Request(1, [5, 6, 7], SamplingParams(**params), 0, Timeline(0.0))
    made.tokens += output
    made.stop_ids = tokenizer.eos_ids | frozenset(made.params.stop_token_ids)
    return made


def texts(tokenizer, allowed):
    return {tokenizer.token_bytes(int(number)) for number in np.flatnonzero(allowed)}


# ---- what is allowed -------------------------------------------------------------------------------------------------


def test_mask_is_what_continues_the_text(compiler, tokenizer):
    state = compiler.state(Grammar("regex", "on(ce|ly)"))
    assert texts(tokenizer, allowed_tokens(state, request(tokenizer), tiny.VOCAB + 5)) <= {b"o", b"on", b"onc", b"once"}
    state.advance(tokenizer.encode("o")[0])
    state.advance(tokenizer.encode("n")[0])
    assert {b"c", b"l"} <= texts(tokenizer, state.next_tokens()[0]) <= {b"c", b"ce", b"l", b"ly"}


def test_end_tokens_only_where_the_text_may_end(compiler, tokenizer):
    state = compiler.state(Grammar("regex", "a{1,2}"))
    a = tokenizer.encode("a")[0]
    asked = request(tokenizer, grammar=Grammar("regex", "a{1,2}"))
    assert not allowed_tokens(state, asked, tiny.VOCAB)[list(asked.stop_ids)].any()
    state.advance(a)
    allowed = allowed_tokens(state, asked, tiny.VOCAB)
    assert allowed[list(asked.stop_ids)].all() and allowed[a]
    state.advance(a)
    assert set(np.flatnonzero(allowed_tokens(state, asked, tiny.VOCAB))) == asked.stop_ids


def test_a_stop_token_is_never_text(compiler, tokenizer):
    b = tokenizer.encode("b")[0]
    asked = request(tokenizer, stop_token_ids=[b])
    state = compiler.state(Grammar("regex", "a[bc]+"))
    state.advance(tokenizer.encode("a")[0])
    assert not allowed_tokens(state, asked, tiny.VOCAB)[b]
    state.advance(tokenizer.encode("c")[0])
    assert allowed_tokens(state, asked, tiny.VOCAB)[b]


def test_min_tokens_and_ignore_eos_go_on_for_as_long_as_the_grammar_does(compiler, tokenizer):
    a = tokenizer.encode("a")[0]
    state = compiler.state(Grammar("regex", "a{1,2}"))
    state.advance(a)
    for params in ({"min_tokens": 3}, {"ignore_eos": True}):
        assert set(np.flatnonzero(allowed_tokens(state, request(tokenizer, [a], **params), tiny.VOCAB))) == {a}
    state.advance(a)
    assert allowed_tokens(state, request(tokenizer, [a, a], ignore_eos=True), tiny.VOCAB)[END]
    with pytest.raises(GrammarError, match=TOO_SHORT):
        allowed_tokens(state, request(tokenizer, [a, a], min_tokens=3), tiny.VOCAB)


def test_special_tokens_are_allowed_only_where_named(compiler, tokenizer):
    state = compiler.state(Grammar("regex", "(.|\\n)*"))
    allowed, _ = state.next_tokens()
    assert not allowed[1]
    state = compiler.state(Grammar("ebnf", 'start: <[1]> "a"'))
    assert set(np.flatnonzero(state.next_tokens()[0])) == {1}


def test_a_state_that_nothing_continues_is_an_error(tokenizer):
    rows = GrammarRows(GrammarCompiler(tokenizer, 40))  # most letters are missing
    grammar = Grammar("regex", re.escape(tokenizer.token_bytes(39).decode()) + "z")
    asked = request(tokenizer, [39], grammar=grammar)
    free = request(tokenizer)
    masks = rows.masks([free, asked])
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


def accepts(compiler, tokenizer, grammar, text):
    state = compiler.state(grammar)
    try:
        for token in tokenizer.encode(text):
            state.advance(token)
    except GrammarError:
        return False
    return state.next_tokens()[1]


# ---- the state is a function of the tokens ---------------------------------------------------------------------------


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_rollback_and_rebuilding_give_the_same_masks(compiler, seed):
    choice = random.Random(seed)
    grammar = choice.choice(
        [Grammar("json_schema", PERSON), Grammar("json_object"), Grammar("regex", "(ab?|[c-f]{2})*")]
    )
    state, masks = compiler.state(grammar), []
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
    fresh = compiler.state(grammar)
    fresh.follow([9, 9, *state.tokens], 2)
    for one in (state, fresh):
        for position in range(len(state.tokens), len(masks)):
            one.follow([1, *tokens[:position]], 1)
            allowed, may_end = one.next_tokens()
            assert (allowed.tobytes(), may_end) == masks[position]
        one.follow([1, *tokens[: len(tokens) - back]], 1)  # backwards as well
        assert one.tokens == tokens[: len(tokens) - back]


def test_rollback_leaves_an_error_behind(compiler, tokenizer):
    state = compiler.state(Grammar("regex", "abc"))
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
    rows.masks([first, second])
    first.status = Status.FINISHED
    rows.masks([second])
    assert set(rows.states) == {2}


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("yaml", "x"), "kind"),
        (("regex", ""), "source"),
        (("json_object", "{}"), "source"),
        (("regex", 3), "string"),
        (("regex", "\ud800"), "whole characters"),
        (("regex", "a" * (MAX_GRAMMAR + 1)), "at most"),
        (("json_schema", {"a": float("nan")}), "JSON"),
        (("json_schema", {"a": object()}), "JSON"),
    ],
)
def test_descriptions_are_refused_by_name(arguments, word):
    with pytest.raises(InputError, match=word):
        Grammar(*arguments)


def test_params_take_a_grammar_only():
    with pytest.raises(InputError, match="grammar"):
        SamplingParams(grammar={"kind": "regex", "source": "a"})


def nested(count):
    return json.loads('{"items":' * count + "{}" + "}" * count)


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (("regex", "("), "unclosed"),
        (("regex", "(?=a)"), "regex"),
        (("ebnf", "root ::= nobody"), "nobody"),
        (("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "EBNF"),
        (("ebnf", "start: start"), "no text"),
        (("json_schema", "{"), "schema"),
        (("json_schema", "[]"), "object"),
        (("json_schema", '{"a": NaN}'), "JSON"),
        (("json_schema", "false"), ""),
        (("json_schema", {"type": "array", "uniqueItems": True}), "uniqueItems"),
        (("json_schema", {"type": "object", "minProperties": 3}), "minProperties"),
        (("json_schema", {"const": "a\x07"}), "control character"),
        (("json_schema", {"properties": {"a": {"enum": [{"\x1f": 1}]}}}), "control character"),
        (("json_schema", {"type": "string", "pattern": r"[\x00-\x1f]"}), "pattern"),
        (("json_schema", {"type": "string", "pattern": r"[a-z&&b]"}), "pattern"),
        (("json_schema", {"type": "string", "pattern": "(?=a)"}), "look-ahead"),
        (("json_schema", {"x-guidance": {"lenient": True}}), "x-guidance"),
        (("json_schema", {"$ref": "file:///etc/hostname"}), ""),
        (("json_schema", nested(70)), "nested"),
        (("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000), "schema"),
    ],
)
def test_bad_grammars_are_refused(compiler, grammar, word):
    with pytest.raises(InputError, match=f"^grammar.*{word}"):
        compiler.prepare(Grammar(*grammar))


def chain(form, count, last):
    return "start: r0\n" + "\n".join(form.format(i, i + 1) for i in range(count)) + f"\n{last}"


EXPLOSIVE = {
    "nested repeats": ("regex", "((((a{1000}){1000}){1000}){1000})"),
    "ambiguous repeats": ("regex", "((a|a)*){1000}"),
    "repeats of repeats": ("regex", "(((((a|b)*){100}){100}){100})"),
    "deep groups": ("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "exponential automaton": ("regex", "(.|\\n)*a(.|\\n){2000}"),
    "deep rules": ("ebnf", chain('r{}: r{} "x"', 5000, 'r5000: "a"')),  # runs out of stack
    "doubling rules": ("ebnf", chain("r{0}: r{1} r{1}", 60, 'r60: "a"')),
    "doubling words": ("ebnf", "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(60)) + '\nT60: "a"'),
    "long conversion": ("ebnf", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(6000)) + "r6000 ::="),
    "a state per remainder": ("json_schema", {"type": "integer", "multipleOf": 1_000_003}),
    "their product": ("json_schema", {"allOf": [{"type": "integer", "multipleOf": m} for m in (10007, 10009, 10037)]}),
    "and of patterns": ("json_schema", {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(3, 40)]}),
    "and of ors": ("json_schema", {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}},
                   "required": [f"p{i}{j}"]} for j in range(4)]} for i in range(12)]}),
    "many properties": ("json_schema", {"properties": {f"p{i}": {"type": "null"} for i in range(6000)}}),
    "many choices": ("json_schema", {"enum": [f"value {i}" for i in range(12_000)]}),
    "huge counts": ("json_schema", {"type": "array", "minItems": 10**8, "items": {"minLength": 10**8}}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_explosive_grammars_are_refused_in_time_or_harmless(compiler, name):
    grammar = Grammar(*EXPLOSIVE[name])
    started = time.monotonic()
    try:
        compiler.prepare(grammar)
    except InputError:
        again = time.monotonic()
        with pytest.raises(InputError, match=r"^grammar.{0,500}\Z"):
            compiler.prepare(grammar)
        assert time.monotonic() - again < 0.1, "the verdict is remembered"
    else:
        walk(compiler, grammar, 0, 20)
    assert time.monotonic() - started < 25


def walk(compiler, grammar, seed, steps, hurry=0.5, likes=()):
    """Tokens chosen at random among those allowed: harder than any model. None if it did not end in time.

    likes: tokens that are taken more often than others.
    """
    choice, state = random.Random(seed), compiler.state(grammar)
    for _ in range(steps):
        started = time.thread_time()
        try:
            allowed, may_end = state.next_tokens()
        except GrammarError:
            return None  # out of fuel, which fails one request
        assert time.thread_time() - started < 1
        allowed[[0, 1, END]] = False
        choices = np.flatnonzero(allowed)
        if may_end and (not len(choices) or choice.random() < hurry):
            return list(state.tokens)
        liked = [token for token in likes if allowed[token]]
        state.advance(choice.choice(liked) if liked and choice.random() < 0.6 else int(choice.choice(choices)))
    return None


def test_verdicts_and_compiled_grammars_are_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr("twostroke.run.grammar.COMPILED", 3)
    monkeypatch.setattr("twostroke.run.grammar_check.VERDICTS", 4)
    compiler = GrammarCompiler(tokenizer, tiny.VOCAB)
    for number in range(6):
        compiler.prepare(Grammar("regex", f"a{{{number + 1}}}"))
    assert len(compiler._ready) == 3 and len(compiler.checker._verdicts) == 4
    assert compiler.state(Grammar("regex", "a{1}")).next_tokens() is not None  # made again though it was dropped
    compiler.checker.close()


def test_the_checking_process_is_replaced_when_it_dies(compiler):
    compiler.prepare(Grammar("regex", "first"))
    child = compiler.checker._child
    child.process.kill()
    child.process.wait()
    with pytest.raises(InputError, match="time or memory"):
        compiler.prepare(Grammar("regex", "second"))
    compiler.prepare(Grammar("regex", "third"))
    assert compiler.checker._child is not child


def test_the_checking_process_does_not_outlive_its_parent(tmp_path):
    tiny.save_tokenizer(tmp_path)
    code = f"""
import os, pathlib, signal
from twostroke.run.grammar import GrammarCompiler
from twostroke.sampling import Grammar
from twostroke.text.tokenizer import from_folder
compiler = GrammarCompiler(from_folder(pathlib.Path({str(tmp_path)!r})), {tiny.VOCAB})
compiler.prepare(Grammar("json_object"))
print(compiler.checker._child.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    number, deadline = int(done.stdout), time.monotonic() + 10
    while Path(f"/proc/{number}/cmdline").exists() and Path(f"/proc/{number}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)


def test_a_grammar_is_compiled_beside_the_steps(compiler):
    """A long compilation does not keep others from their states."""
    ready = compiler.state(Grammar("json_object"))
    schema = {"properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(1500)}}
    thread = threading.Thread(target=compiler.compile, args=[Grammar("json_schema", schema)])
    thread.start()
    longest = 0.0
    while thread.is_alive():
        began = time.perf_counter()
        assert compiler.state(Grammar("json_object")).next_tokens()[0].tobytes() == ready.next_tokens()[0].tobytes()
        longest = max(longest, time.perf_counter() - began)
    thread.join()
    assert longest < 0.5


def test_checking_alone_needs_no_compiler(tokenizer):
    from twostroke.run.grammar import Words

    checker = GrammarChecker(Words(tokenizer, tiny.VOCAB).as_message)
    checker.prepare(Grammar("json_object"))
    with pytest.raises(InputError):
        checker.prepare(Grammar("regex", "["))
    checker.close()


# ---- schemas ---------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "name", "x y", "ключ", 'q"'])
NUMBERS = st.integers(-1000, 1000)
PATTERNS = [
    "^[a-z]{2,4}$",
    "x",
    r"^\d{4}-\d\d$",
    "(ab)+c?",
    '^[^"]{1,4}$',
    r"^[^\\]+$",
    r"^[^\s,]*$",
    "^[^[]?$",
    "^a|b$",
]


def objects(values):
    @st.composite
    def build(draw):
        properties = draw(st.dictionaries(NAMES, values, max_size=3))
        required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
        schema = {"type": "object", "properties": properties, "required": required}
        extra = draw(st.one_of(st.just(False), st.just(None), values))
        return schema if extra is None else {**schema, "additionalProperties": extra}

    return build()


def bounded(kind, low, high, numbers):
    return st.tuples(numbers, numbers).map(lambda pair: {"type": kind, low: min(pair), high: max(pair)})


LEAVES = st.one_of(
    st.sampled_from([{"type": t} for t in ("string", "integer", "number", "boolean", "null")]),
    st.sampled_from([{"type": "string", "pattern": p} for p in PATTERNS]),
    st.sampled_from([{"type": "string", "format": f} for f in ("date", "uuid", "ipv4", "time", "email")]),
    st.sampled_from([{"type": ["string", "null"]}, {"const": {"k": [1, "ü"]}}, {"type": "integer", "multipleOf": 7}]),
    st.lists(st.one_of(st.text(max_size=5), NUMBERS, st.none(), st.booleans()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    bounded("string", "minLength", "maxLength", st.integers(0, 6)),
    bounded("integer", "minimum", "maximum", NUMBERS),
    bounded("number", "minimum", "maximum", NUMBERS),
    bounded("number", "exclusiveMinimum", "exclusiveMaximum", NUMBERS).filter(
        lambda s: s["exclusiveMinimum"] < s["exclusiveMaximum"]
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda v: {"type": "array", "items": v[0], "minItems": v[1], "maxItems": v[1] + v[2]}
        ),
        st.tuples(inner, inner).map(lambda v: {"type": "array", "prefixItems": list(v), "items": False, "minItems": 1}),
        st.lists(inner, min_size=1, max_size=3).map(lambda v: {"anyOf": v}),
        inner.map(lambda v: {"$defs": {"d": v}, "type": "object", "properties": {"p": {"$ref": "#/$defs/d"}}}),
    ),
    max_leaves=6,
).map(lambda schema: {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False})
REFS = json.dumps({"$ref": "#/$defs/d"})


def usable(schema):
    """A reference finds its schema only from the root of a document."""
    return REFS not in json.dumps(schema) or json.dumps(schema).count("$defs") == 0


@given(SCHEMAS.filter(usable), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_a_schema_allows_validates(compiler, tokenizer, schema, seed):
    grammar = Grammar("json_schema", schema)
    try:
        compiler.prepare(grammar)
    except InputError:
        return  # refused is never wrong
    for number in range(4):
        tokens = walk(compiler, grammar, seed + number, 250)
        if tokens is not None:
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)


@pytest.mark.parametrize(
    "pattern", [*PATTERNS, r"^[^\s\"\\]+@[^@]+$", r"^[^\n]$", '^[^-"]$', r"^[^\]\"]{2}$", "^.[^a]$"]
)
def test_patterns_hold_where_quotes_are_special(compiler, tokenizer, pattern):
    grammar = Grammar("json_schema", {"type": "string", "pattern": pattern})
    compiler.prepare(grammar)
    likes = [tokenizer.encode(char)[0] for char in '\\\\""abx@1-']
    ended = 0
    for seed in range(60):
        tokens = walk(compiler, grammar, seed, 60, likes=likes)
        if tokens is not None:
            ended += 1
            assert re.search(pattern, json.loads(tokenizer.decode(tokens)))
    assert ended > 5


@pytest.mark.parametrize("text", ['{"a":1,"a":"x"}', '{"a":1,"\\u0061":"x"}', '{"a":1,"b":"\\u0061"}'])
def test_no_property_is_written_twice(compiler, tokenizer, text):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert not accepts(compiler, tokenizer, Grammar("json_schema", schema), text)


# ---- in the engine ---------------------------------------------------------------------------------------------------


def test_all_kinds_in_generate(llm):
    kinds = [
        (Grammar("json_schema", PERSON), lambda text: jsonschema.validate(json.loads(text), PERSON)),
        (Grammar("regex", r"[a-f]{3,6}-\d\d"), lambda text: re.fullmatch(r"[a-f]{3,6}-\d\d", text)[0]),
        (Grammar("ebnf", 'root ::= ("yes" | "no") " " [0-9]{2}'), lambda text: re.fullmatch(r"(yes|no) \d\d", text)[0]),
        (Grammar("json_object"), lambda text: json.loads(text)),
    ]
    for temperature in (0.0, 1.0):
        params = [SamplingParams(grammar=g, max_tokens=250, temperature=temperature, seed=3) for g, _ in kinds]
        for output, (_, check) in zip(llm.generate(["Once upon"] * 4, params), kinds, strict=True):
            assert output.samples[0].error is None
            if output.finish_reason == "stop":
                check(output.text)
    assert output.finish_reason in ("stop", "length")


@given(SCHEMAS.filter(usable), st.integers(0, 2**32))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_weights_write_what_a_schema_says(llm, schema, seed):
    params = SamplingParams(grammar=Grammar("json_schema", schema), max_tokens=120, seed=seed, n=3)
    try:
        (output,) = llm.generate("The quick", params)
    except InputError:
        return
    for sample in output.samples:
        assert sample.error is None
        if sample.finish_reason == "stop":
            jsonschema.validate(json.loads(sample.text), schema)


def mixed_params():
    grammars = [Grammar("json_schema", PERSON), Grammar("regex", "(ab|[c-f]{2}){4,30}"), None, Grammar("json_object")]
    return [
        SamplingParams(
            grammar=grammars[i % 4], temperature=0.7 * (i % 3), seed=i, max_tokens=40 + i, top_k=20 * (i % 2)
        )
        for i in range(12)
    ]


def test_the_same_tokens_alone_in_a_batch_and_through_preemption(llm, llama_folder):
    prompts = [f"prompt number {i} " * (1 + i % 4) for i in range(12)]
    params = mixed_params()
    alone = [llm.generate(p, one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
    assert [output.token_ids for output in llm.generate(prompts, params)] == alone
    tight = LLM(llama_folder, dtype="float32", max_requests=8, kv_blocks=14, max_model_len=200, max_batch_tokens=24)
    assert [output.token_ids for output in tight.generate(prompts, params)] == alone
    assert tight.stats()["preemptions"] > 0


def test_a_failed_step_is_taken_back(llm, monkeypatch):
    params = mixed_params()[:4]
    expected = [output.token_ids for output in llm.generate(["Once"] * 4, params)]
    runner, calls = llm.engine.core.runner, iter([False, False, True, False, False, True])
    launch = runner.launch

    def failing(plan):
        result = launch(plan)
        if len(plan.works) > 1 and next(calls, False):
            raise RuntimeError("on purpose")
        return result

    monkeypatch.setattr(runner, "launch", failing)
    assert [output.token_ids for output in llm.generate(["Once"] * 4, params)] == expected


def test_a_request_whose_grammar_cannot_go_on_fails_alone(llm):
    good = SamplingParams(grammar=Grammar("json_schema", PERSON), seed=5, max_tokens=60)
    bad = SamplingParams(grammar=Grammar("regex", "[ab]{2}"), min_tokens=20, seed=5)
    (expected,) = llm.generate("Once", good)
    first, second = llm.generate(["Once", "Once"], [bad, good])
    assert first.finish_reason == "error" and first.samples[0].error == TOO_SHORT
    assert second.token_ids == expected.token_ids


def test_logprobs_are_of_the_model_not_of_the_mask(llm):
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=3, seed=1)
    bound = SamplingParams(temperature=0, max_tokens=1, logprobs=3, seed=1, grammar=Grammar("regex", "zzz"))
    first, second = llm.generate(["Once", "Once"], [free, bound])
    assert second.text == "z" and first.logprobs[0].top == second.logprobs[0].top
    assert second.logprobs[0].logprob <= first.logprobs[0].logprob


def test_bias_and_penalties_act_within_the_grammar(llm):
    b = llm.tokenizer.encode("b")[0]
    params = SamplingParams(grammar=Grammar("regex", "[abc]{8}"), temperature=0, logit_bias={b: 100.0, 9: 100.0})
    assert llm.generate("Once", params)[0].text == "b" * 8


def test_bad_grammars_are_refused_before_anything_runs(llm):
    before = llm.stats()["steps"]
    with pytest.raises(InputError, match="grammar"):
        llm.generate(["Once", "Once"], [SamplingParams(), SamplingParams(grammar=Grammar("regex", "("))])
    with pytest.raises(InputError, match="grammar"):
        next(llm.stream("Once", SamplingParams(grammar=Grammar("regex", "("))))
    assert llm.stats()["steps"] == before


def test_a_poisoned_row_fails_as_before(llm, monkeypatch):
    logits = llm.engine.core.runner.model.logits

    def poisoned(hidden):
        out = logits(hidden)
        out[0, 7] = torch.nan
        return out

    monkeypatch.setattr(llm.engine.core.runner.model, "logits", poisoned)
    (output,) = llm.generate("Once", SamplingParams(grammar=Grammar("json_object")))
    assert output.finish_reason == "error" and "not numbers" in output.samples[0].error


def test_every_kind_compiles_to_the_one_notation():
    for grammar in (Grammar("json_object"), Grammar("regex", "a/b"), Grammar("ebnf", 'root ::= "a"')):
        assert to_lark(grammar).count("no_forcing") == 1
