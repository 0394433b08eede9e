"""No grammar can hurt the engine: bad and explosive ones are refused in time, with a reason, in a child process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from tests import tiny
from tests.ended_parent import assert_ends
from tests.grammar.walks import start, walk
from tests.measured import measured
from twostroke import InputError, SamplingParams
from twostroke.confined import START_SECONDS, WALL_FACTOR
from twostroke.grammar.check import CPU_SECONDS, GrammarChecker
from twostroke.grammar.compile import GrammarCompiler
from twostroke.sampling import MAX_GRAMMAR, Grammar


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
        (("ebnf", "root ::= missing"), "missing"),
        (("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "EBNF"),
        (("ebnf", "start: start"), "no text"),
        (("json_schema", "{"), "schema"),
        (("json_schema", "[]"), "object"),
        (("json_schema", '{"a": NaN}'), "JSON"),
        (("json_schema", "false"), ""),
        (("json_schema", {"type": "object", "minProperties": 3}), "minProperties"),
        (("json_schema", {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3}), "minItems"),
        (("json_schema", {"type": "array", "uniqueItems": "yes"}), "uniqueItems must be true or false"),
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
def test_explosive_grammars_are_refused_in_time_or_harmless(compiler, name, monkeypatch):
    grammar = Grammar(*EXPLOSIVE[name])
    started = time.monotonic()
    try:
        compiler.prepare(grammar)
    except InputError:
        monkeypatch.setattr(compiler.checker, "_try", lambda grammar: pytest.fail("the verdict was not remembered"))
        with pytest.raises(InputError, match=r"^grammar.{0,500}\Z"):
            compiler.prepare(grammar)
    else:
        walk(compiler, grammar, 0, 20)
    assert time.monotonic() - started < CPU_SECONDS * WALL_FACTOR + START_SECONDS


def test_verdicts_and_compiled_grammars_are_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr("twostroke.grammar.compile.COMPILED", 3)
    monkeypatch.setattr("twostroke.grammar.check.VERDICTS", 4)
    compiler = GrammarCompiler(tokenizer, tiny.VOCAB)
    for number in range(6):
        compiler.prepare(Grammar("regex", f"a{{{number + 1}}}"))
    assert len(compiler._ready) == 3 and len(compiler.checker._verdicts) == 4
    assert start(compiler, Grammar("regex", "a{1}")).next_tokens() is not None  # compiled again although it was dropped
    compiler.checker.close()


def test_the_checking_process_is_replaced_when_it_dies(compiler):
    compiler.prepare(Grammar("regex", "first"))
    before = compiler.checker.process.pid
    os.kill(before, signal.SIGKILL)
    compiler.prepare(Grammar("regex", "second"))  # not the fault of this grammar
    assert compiler.checker.process.pid not in (None, before)


def test_the_checking_process_does_not_outlive_its_parent(tmp_path):
    tiny.save_tokenizer(tmp_path)
    code = f"""
import os, pathlib, signal
from twostroke.grammar.compile import GrammarCompiler
from twostroke.sampling import Grammar
from twostroke.text.tokenizer import from_folder
compiler = GrammarCompiler(from_folder(pathlib.Path({str(tmp_path)!r})), {tiny.VOCAB})
compiler.prepare(Grammar("json_object"))
print(compiler.checker.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert_ends(code)


@measured
def test_a_grammar_is_compiled_beside_the_steps(compiler):
    """A long compilation does not keep others from their states."""
    ready = start(compiler, Grammar("json_object"))
    fresh = str(time.monotonic())  # no grammar of an earlier try, which is compiled already
    schema = {"title": fresh, "properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(1500)}}
    thread = threading.Thread(target=compiler.compile, args=[Grammar("json_schema", schema)])
    thread.start()
    longest = 0.0
    while thread.is_alive():
        began = time.perf_counter()
        assert start(compiler, Grammar("json_object")).next_tokens()[0].tobytes() == ready.next_tokens()[0].tobytes()
        longest = max(longest, time.perf_counter() - began)
    thread.join()
    assert longest < 0.5


def test_checking_alone_needs_no_compiler(tokenizer):
    checker = GrammarChecker(tokenizer, tiny.VOCAB)
    checker.prepare(Grammar("json_object"))
    with pytest.raises(InputError):
        checker.prepare(Grammar("regex", "["))
    checker.close()
