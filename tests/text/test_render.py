"""Templates that loop, explode or reach for Python: always our own error, within the limits of time and memory."""

# ruff: noqa: E501, SIM905  (templates read better in one line)

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.errors import InputError, ModelError, TwostrokeError
from twostroke.text.chat import ChatTemplate, renderer

TALK = [{"role": "user", "content": "Hi"}]
SECONDS = 0.5
SLACK = 1.5  # seconds of CPU time: a child process starts, too
PROCESS = renderer(SECONDS)
QUICK = renderer(0.2)

GROW = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"


def _grow(start: str, step: str, then: str = "{{ ns.x | length }}") -> str:
    return GROW.replace("START", start).replace("STEP", step) + then


ENDLESS = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "loops that skip": "{% for a in range(100000) %}{% for b in range(100000) %}{% continue %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(100000) if b is none %}{% endfor %}{% endfor %}",
    "work in a loop's test": "{% for a in range(100000) if (range(100000) | list | length) < 0 %}{% endfor %}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "caller": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% macro g(n) %}{% if n %}{% call f() %}{{ g(n - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ g(60) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "branching loop": "{% for x in [1, 2] recursive %}{% if loop.depth < 50 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "output": "{% for a in range(100000) %}{% for b in range(1000) %}" + "x" * 100 + "{% endfor %}{% endfor %}",
    "captured output": "{% set x %}{% for a in range(100000) %}" + "x" * 60_000 + "{% endfor %}{% endset %}",
    "long range": "{{ range(10 ** 9) | list }}",
    "lazy chain": "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% set ns.x = ns.x | map('string') %}{% endfor %}",
    "slow filter": "{% set x = 'a b ' * 1000000 %}{% for i in range(1000) %}{% set y = x | title %}{% endfor %}",
    "slices": "{% set x = 'a' * 4000000 %}" + "{% set y = x[1:] %}" * 2000,
}  # fmt: skip
EXPLODING = {
    "string times": "{{ 'a' * 10000000000 }}",
    "times string": "{{ 10000000000 * 'a' }}",
    "list times": "{{ ([1] * 10000000000) | length }}",
    "plus": _grow("'ab'", "ns.x + ns.x"),
    "concat": _grow("'ab'", "ns.x ~ ns.x"),
    "list plus": _grow("[1]", "ns.x + ns.x"),
    "block set": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": _grow("10", "ns.x * ns.x", "{{ ns.x }}"),
    "join": "{% set x = 'a' * 1000000 %}{{ ([x] * 100000) | join(x) | length }}",
    "join method": "{% set x = 'a' * 1000000 %}{{ x.join([x] * 100000) | length }}",
    "sort": "{% set x = 'a' * 1000000 %}{{ ([x] * 100000) | sort | length }}",
    "unique": "{% set x = 'a' * 1000000 %}{{ ([x] * 100000) | unique | length }}",
    "map": "{% set x = 'a' * 1000000 %}{{ ([x] * 100000) | map('upper') | list | length }}",
    "replace": "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) | length }}",
    "replace method": "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) | length }}",
    "replace nothing": "{% set x = 'a' * 1000000 %}{{ x.replace('', x) | length }}",
    "center": "{{ 'a'.center(100000000000) }}",
    "zfill": "{{ 'a'.zfill(100000000000) }}",
    "indent": "{{ 'a' | indent(100000000000, true) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "nested width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "filter width": "{{ '%1000000000d' | format(1) }}",
    "format many": "{{ ('{0}' * 100000).format('a' * 100000) | length }}",
    "json padding": "{{ [1] | tojson(indent=1000000000) }}",
    "round": "{{ 1.5 | round(1000000000, 'floor') }}",
    "sum of lists": "{{ ([[1]] * 200000) | sum(start=[]) | length }}",
    "shared list printed": _grow("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "shared list as JSON": _grow("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
    "shared list compared": _grow("[1]", "[ns.x, ns.x]", GROW.replace("ns", "ms").replace("START", "[1]").replace(
        "STEP", "[ms.x, ms.x]") + "{{ ns.x == ms.x }}{{ ns.x in [ms.x] }}"),
    "shared list tested": _grow("[1]", "[ns.x, ns.x]", GROW.replace("ns", "ms").replace("START", "[1]").replace(
        "STEP", "[ms.x, ms.x]") + "{{ ns.x is eq(ms.x) }}"),
    "shared list changed": _grow("[1]", "[ns.x, ns.x]", GROW.replace("ns", "ms").replace("START", "[1]").replace(
        "STEP", "[ms.x, ms.x]") + "{% for x in [ns.x, ms.x] %}{{ loop.changed(x) }}{% endfor %}"),
    "shared mapping viewed": _grow("{}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x.items() }}"),
    "shared tuple as key": _grow("(1,)", "(ns.x, ns.x)", "{{ {}[ns.x] }}"),
    "deep list printed": "{% set ns = namespace(x=[1]) %}{% for i in range(20000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "quadratic strip": "{% set x = 'b' * 4000000 + 'a' %}{{ ('a' * 4000000).strip(x) | length }}",
    "quadratic search": "{% set x = 'a' * 2000000 %}{{ x.rfind('ab' + 'a' * 1000000) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
}  # fmt: skip
REACHING = (
    "{{ ''.__class__.__mro__ }}", "{{ messages.__class__ }}", "{{ ''['__class__'] }}", "{{ '' | attr('__class__') }}",
    "{{ [''] | map(attribute='__class__') | list }}", "{{ raise_exception.__globals__ }}", "{{ self.__init__ }}",
    "{{ namespace.__init__.__globals__ }}", "{{ messages.append(1) }}", "{% set _ = messages[0].update({'a': 1}) %}",
    "{{ messages.copy.__self__ }}", "{{ 'a'.encode() }}", "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ '{0.__class__}'.format('') }}", "{{ '{a.__class__}'.format_map({'a': 1}) }}", "{{ range.__code__ }}",
    "{% set ns = namespace(jinja_pass_arg=1) %}", "{% set ns = namespace(__call__=range) %}{{ ns() }}",
    "{% set ns = namespace() %}{% set ns.__call__ = range %}{{ ns() }}", "{{ cycler.__init__.__globals__ }}",
    "{{ namespace(_x=1) }}", "{{ 'abc'.translate({97: 'x' * 1000000}) }}", "{{ messages[0].pop('role') }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}", "{{ loop.__init__ }}", "{{ caller.__globals__ }}",
)  # fmt: skip


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _begin() -> float:
    """CPU seconds so far. Children of other tests that have ended are counted first: the next start of a process would
    count them."""
    gc.collect()
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    return _cpu_seconds()


def _stopped(source: str) -> TwostrokeError:
    began = _begin()
    with pytest.raises(TwostrokeError) as caught:
        ChatTemplate(source, process=PROCESS).render(TALK)
    assert _cpu_seconds() - began < SECONDS + SLACK
    return caught.value


@pytest.mark.parametrize("name", sorted(ENDLESS))
def test_endless_templates_are_stopped(name: str) -> None:
    before = set(threading.enumerate())  # some may end meanwhile: those of other tests
    assert isinstance(_stopped(ENDLESS[name]), InputError)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", sorted(EXPLODING))
def test_exploding_templates_are_stopped(name: str) -> None:
    before = _peak_kilobytes(os.getpid())
    _stopped(EXPLODING[name])
    assert _peak_kilobytes(os.getpid()) - before < 100 << 10
    if PROCESS.pid is not None:  # None: it was killed for its time
        assert _peak_kilobytes(PROCESS.pid) < 600 << 10


def _peak_kilobytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0])


@pytest.mark.parametrize("source", REACHING)
def test_templates_cannot_reach_python(source: str) -> None:
    assert isinstance(_stopped(source), (ModelError, InputError))


def test_a_namespace_does_not_write_itself_out() -> None:
    source = "{% set a = namespace() %}{% set b = namespace(x=a) %}{% set a.x = b %}{{ a }}"
    assert ChatTemplate(source, process=PROCESS).render(TALK) == "<namespace>"


def test_messages_are_copies() -> None:
    talk = [{"role": "user", "content": "Hi", "extra": {"n": [1]}}]
    ChatTemplate("{{ messages[0].extra.n }}", process=PROCESS).render(talk)
    assert talk == [{"role": "user", "content": "Hi", "extra": {"n": [1]}}]


def test_a_stopped_template_still_serves_honest_messages() -> None:
    source = "{% for i in range(messages[0].content | int) %}{% for j in range(100000) %}{% endfor %}{% endfor %}ok"
    template = ChatTemplate(source, process=PROCESS)
    with pytest.raises(InputError, match="did not finish"):
        template.render([{"role": "user", "content": "90000"}])
    assert template.render([{"role": "user", "content": "0"}]) == "ok"


def test_the_output_is_bounded() -> None:
    template = ChatTemplate("{{ messages[0].content }}", process=PROCESS, max_output=10)
    assert template.render([{"role": "user", "content": "x" * 10}]) == "x" * 10
    with pytest.raises(InputError, match="more than 10 characters"):
        template.render([{"role": "user", "content": "x" * 11}])


def test_a_long_honest_conversation_fits() -> None:
    source = "{% for m in messages %}{{ '<' + m.role + '>' ~ m.content.strip().split('</t>')[-1] }}{% if '<t>' in m.content %}!{% endif %}{% endfor %}"
    talk = [{"role": "user", "content": "語 " * 1000}] * 400
    began = _begin()
    template = ChatTemplate(source)
    assert len(template.render(talk)) == 400 * (6 + 1999)
    template.close()
    assert _cpu_seconds() - began < 2


LOOP = "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"


def test_a_stopped_rendering_fails_no_other_caller() -> None:
    """Many threads share one child. The hostile message kills it; every other caller still gets its prompt."""
    template, wrong, stopped = ChatTemplate(LOOP, process=PROCESS), [], []

    def honest(number: int) -> None:
        for turn in range(40):
            text = f"{number} {turn}"
            wrong.extend([text] if template.render([{"role": "user", "content": text}]) != text else [])

    def hostile() -> None:
        for _ in range(3):
            with suppress(InputError):
                template.render([{"role": "user", "content": "loop"}])
                wrong.append("loop")
            stopped.append(1)

    threads = [threading.Thread(target=honest, args=(number,)) for number in range(3)]
    threads.append(threading.Thread(target=hostile))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(stopped) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_was_killed_or_stopped_is_replaced(number: signal.Signals) -> None:
    template = ChatTemplate("{{ messages[0].content }}", process=QUICK)
    assert template.render(TALK) == "Hi"
    before = QUICK.pid
    assert before is not None
    os.kill(before, number)
    assert template.render(TALK) == "Hi"
    assert QUICK.pid != before


# Random programs over what a template has: most fail, none may hang, grow without bound or fail otherwise.
_NAMES = st.sampled_from(["ns.x", "ns.y", "messages", "i", "'ab'", "[1]", "{}", "(1, 2)", "7", "none", "nothing"])
_EXPRESSIONS = st.recursive(
    _NAMES,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+ - * / // % ** ~ == < in".split()), inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("({}, {})".format, inner, inner),
        st.builds("{{'a': {}, 'b': {}}}".format, inner, inner),
        st.builds("({} | {})".format, inner, st.sampled_from(
            "list string tojson length sort unique join upper reverse first items sum int dictsort title".split())),
        st.builds("({} | {}({}))".format, inner, st.sampled_from("join replace default map indent round".split()), inner),
        st.builds("{}.{}({})".format, inner, st.sampled_from(
            "join replace split get count strip center index format".split()), inner),
        st.builds("{}[{}]".format, inner, inner),
        st.builds("{}[{}:]".format, inner, inner),
    ),
    max_leaves=6,
)  # fmt: skip
_STATEMENTS = st.recursive(
    st.one_of(
        st.builds("{{% set ns.x = {} %}}".format, _EXPRESSIONS),
        st.builds("{{% set ns.y = {} %}}".format, _EXPRESSIONS),
        st.builds("{{{{ {} }}}}".format, _EXPRESSIONS),
    ),
    lambda inner: st.one_of(
        st.builds("{{% for i in range(300) %}}{}{{% endfor %}}".format, inner),
        st.builds("{{% for i in {} %}}{}{{% endfor %}}".format, _EXPRESSIONS, inner),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, _EXPRESSIONS, inner),
        st.builds("{{% set z %}}{}{{% endset %}}{{% set ns.x = z %}}".format, inner),
        st.builds("{}{}".format, inner, inner),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def counted() -> None:
    """Children of other tests have ended: the CPU seconds of one that ends later would count here."""
    _begin()


@settings(max_examples=250, deadline=None)
@given(body=_STATEMENTS)
def test_random_templates_end_in_time(counted: None, body: str) -> None:
    source = "{% set ns = namespace(x='ab', y=[1]) %}" + body
    began = _cpu_seconds()
    with suppress(TwostrokeError):
        ChatTemplate(source, process=QUICK).render(TALK)
    assert _cpu_seconds() - began < 0.2 + SLACK


def test_jinja_stays_in_the_child() -> None:
    code = """
import sys
from twostroke.text.chat import ChatTemplate
assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "Hi"}]) == "Hi"
assert "jinja2" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
