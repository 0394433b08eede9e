"""Which questions may share an answer at all, however similar they are.

A similarity does not see what an answer would have to repeat: a number, a name, a quoted string, a "not". So both
questions must agree on each row of `GUARD`, on their words in one of `FORMS`, and neither may hold what `PERSONAL`,
`REFERRING` or `CHANGING` find. The first form in which they agree is the kind of the pair; each has its own evidence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

MAX_QUESTION = 2000  # characters: longer ones are not compared by meaning
MAX_LENGTH_RATIO = 2.0

PERSONAL = re.compile(r"\b(my|mine|our|ours|me|us|i am|i'm|i've|i was|myself)\b", re.IGNORECASE)
CHANGING = re.compile(
    r"\b(now|today|tonight|tomorrow|yesterday|current(ly)?|latest|recent(ly)?|this (week|month|year)|right now)\b",
    re.IGNORECASE,
)
REFERRING = re.compile(r"\b(this|these|following|above|attached)\b", re.IGNORECASE)  # to what is not in the question
_WORD = re.compile(r"[^\W\d_][\w'’+#-]*|\d[\w.,:/%°-]*|[^\w\s]", re.UNICODE)
_NUMBER = re.compile(r"\d+(?:[.,:/-]\d+)*")
_QUOTED = re.compile(r"\"([^\"]*)\"|“([^”]*)”|'([^']{2,})'|`([^`]*)`|«([^»]*)»")
_CODE = re.compile(
    r"[\w.]+\([^)]*\)|\w+(?:_\w+)+|\w+::\w+|[A-Za-z]:\\\S+|(?:/[\w.-]+){2,}|https?://\S+|[{}<>=;|&]+|[\w.+-]+@\S+"
)
_NEGATION = re.compile(
    r"\b(not|no|never|none|without|cannot|nor|neither|un(?:able|safe|like)|avoid|stop|except|lack|fail|wrong|false|"
    r"[a-z]+n['’]t|dont|doesnt|isnt|cant|wont|shouldnt|opposite|dis\w+|il?legal|im?possible)\b",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"\b(who|whom|whose|what|when|where|why|which|how (?:many|much|long|often|far|old)|how)\b", re.IGNORECASE
)
_OPPOSITES = re.compile(
    r"\b(before|after|more|less|most|least|best|worst|decrease|gain|sell|open|close|"
    r"end|first|last|min(?:imum)?|max(?:imum)?|up|down|left|right|out|off|from|over|under|above|below|male|female|"
    r"man|woman|men|women|boy|girl|husband|wife|mother|father|old|new|young|hot|cold|high|low|big|small|long|short|fast|"
    r"slow|easy|hard|good|bad|advantages?|disadvantages?|pros|cons|enable|disable|install|uninstall|add|remove|create|"
    r"delete|import|export|encode|decode|upload|download|north|south|east|west)\b",
    re.IGNORECASE,
)
_SYMBOLS = re.compile(r"[^\w\s.,;:?!'’\"“”`()-]")
_UNITS = re.compile(
    r"\b(mm|cm|km|m|inch(?:es)?|f(?:oo|ee)t|miles?|kg|g|mg|lbs?|pounds?|ounces?|oz|l|ml|lit(?:er|re)s?|gallons?|celsius|"
    r"fahrenheit|kelvin|seconds?|minutes?|hours?|days?|weeks?|months?|years?|euros?|dollars?|usd|eur|rupees?|percent|%|"
    r"kb|mb|gb|tb|bytes?|bits?|volts?|watts?|amps?|hz)\b",
    re.IGNORECASE,
)
_STOP = frozenset(
    ["a", "an", "the", "of", "to", "please", "some", "any", "it", "us", "who", "what", "which", "exactly", "really",
     "actually"]
)  # fmt: skip
# Ways to begin the same question: "what is the best way to", "how can I" and "how do I" ask how something is done.
_HOW = re.compile(
    r"^\W*(?:how (?:to|(?:do|can|could|should|would|shall) (?:i|(?P<you>you)|we|one|someone|people))|"
    r"what(?:['’]s| is| are| would be)(?: the| some| a)*"
    r"(?: best| good| easiest| simplest| possible| effective| proper| right| correct| most effective)*"
    r" (?:ways?|methods?)(?: to|(?: that)? (?:i|one|we) can))\b",
    re.IGNORECASE,
)


def _opened(text: str) -> str:
    """The question with one word for such a beginning. "You" may mean the one who is asked, so it is kept."""
    return _HOW.sub(lambda match: "how you" if match["you"] else "how", text, count=1)


def _listed(pattern: re.Pattern[str]) -> Callable[[str], tuple[str, ...]]:
    def find(text: str) -> tuple[str, ...]:
        return tuple(sorted(match.group(0).lower() for match in pattern.finditer(text)))

    return find


def _in_order(pattern: re.Pattern[str]) -> Callable[[str], tuple[str, ...]]:
    def find(text: str) -> tuple[str, ...]:
        return tuple(match.group(0).lower() for match in pattern.finditer(text))

    return find


def _exactly(pattern: re.Pattern[str]) -> Callable[[str], tuple[str, ...]]:
    def find(text: str) -> tuple[str, ...]:
        return tuple(match.group(0) for match in pattern.finditer(text))

    return find


def _names(text: str) -> tuple[str, ...]:
    """Words in capitals that are common words when written small: US, IT, WHO. Other names are among the words."""
    return tuple(word for word in _WORD.findall(text) if len(word) > 1 and word.isupper() and word.lower() in _STOP)


def _words(text: str) -> list[str]:
    return [_bare(word.lower()) for word in _WORD.findall(text) if word[0].isalnum()]


def _plain(text: str) -> tuple[str, ...]:
    return tuple(_words(text))


def _without_small_words(text: str) -> tuple[str, ...]:
    """The words that carry meaning, in order: another word, or another order, is another question. An entity cannot be
    told from any other word, so every word counts."""
    return tuple(_GRAMMAR.get(stem(word), stem(word)) for word in _words(_opened(text)) if word not in _STOP)


def _with_synonyms(text: str) -> tuple[str, ...]:
    """The same with the first of its synonyms for each word."""
    words = [_SAME.get(word, word) for word in _without_small_words(text)]
    return tuple(word for word in words if word not in ("i", "you"))


def _bare(word: str) -> str:
    """The word without an apostrophe's "s" and without marks at its ends."""
    return word.removesuffix("'s").removesuffix("’s").strip(".,:'’-")


def stem(word: str) -> str:
    """The word without the ending of a plural."""
    for end, instead in (("ies", "y"), ("sses", "ss"), ("s", "")):
        if word.endswith(end) and len(word) - len(end) >= 3 and not word.endswith("ss" if end == "s" else " "):
            return word[: -len(end)] + instead
    return word


def _scripts(text: str) -> tuple[str, ...]:
    """The alphabets that the text is written in: a cheap sign of its language."""
    kinds = {"latin" if char < "ɐ" else f"{ord(char) >> 8:x}" for char in text if char.isalpha()}
    return tuple(sorted(kinds))


SYNONYMS = (
    "buy purchase", "fix repair", "movie film", "quick fast rapid", "begin start", "big large", "choose select",
    "phone cellphone smartphone", "learn study", "photo picture", "difference differ", "example instance",
    "reason cause", "remove delete erase", "improve enhance", "calculate compute", "automobile car",
    "doctor physician", "error mistake", "benefit advantage", "can could",
)  # fmt: skip
GRAMMAR = ("is are be", "do does")


def _first_of(groups: tuple[str, ...]) -> dict[str, str]:
    return {stem(word): stem(group.split()[0]) for group in groups for word in group.split()}


_SAME, _GRAMMAR = _first_of(SYNONYMS), _first_of(GRAMMAR)


def _asks(text: str) -> tuple[str, ...]:
    """Question words; "which" asks for what "what" asks for."""
    found = _listed(_ASKS)(_opened(text))
    return tuple(sorted("what" if word == "which" else word for word in found))


def _opposites(text: str) -> tuple[str, ...]:
    return _listed(_OPPOSITES)(_opened(text))


class Rule(NamedTuple):
    name: str
    find: Callable[[str], tuple[str, ...]]


# What two questions must agree on.
GUARD: tuple[Rule, ...] = (
    Rule("numbers", _in_order(_NUMBER)),
    Rule("units", _listed(_UNITS)),
    Rule("quoted text", _exactly(_QUOTED)),
    Rule("code", _exactly(_CODE)),
    Rule("symbols", _exactly(_SYMBOLS)),
    Rule("negation", _listed(_NEGATION)),
    Rule("question word", _asks),
    Rule("opposites", _opposites),
    Rule("names", _names),
    Rule("script", _scripts),
)
# How two questions may differ, from the least on. Words are compared in order: "is A taller than B" is not "is B taller
# than A".
FORMS: tuple[Rule, ...] = (
    Rule("same words", _plain),
    Rule("small words", _without_small_words),
    Rule("synonyms", _with_synonyms),
)
KINDS = tuple(form.name for form in FORMS)
WORDS = "words"  # the reason of a refusal


MARKERS = {"personal": PERSONAL, "referring": REFERRING, "changing": CHANGING}


def fit_for_sharing(question: str, allowed: frozenset[str] = frozenset()) -> str | None:
    """Why a question is not compared by meaning; None: it is. allowed: markers that are no reason."""
    if not question.strip() or len(question) > MAX_QUESTION:
        return "length"
    found = (name for name, pattern in MARKERS.items() if name not in allowed and pattern.search(question))
    return next(found, None)


def wording(question: str) -> str:
    """Equal for all questions that agree in one of `FORMS`, as the last one has the least words: a question that no
    known one shares it with is not compared. (Marks within the way that "how" begins may hide a pair with the same
    words.)"""
    return " ".join(FORMS[-1].find(question))


class Compared(NamedTuple):
    refusal: str | None  # the first rule on which two questions differ; None: they may share an answer
    kind: str = ""  # the first form in which their words agree


@lru_cache(maxsize=256)
def _found(question: str) -> tuple[tuple[str, ...], ...]:
    """What each row of the table finds."""
    return tuple(rule.find(question) for rule in GUARD)


def compare(asked: str, known: str) -> Compared:
    long, short = max(len(asked), len(known)), max(1, min(len(asked), len(known)))
    if long / short > MAX_LENGTH_RATIO:
        return Compared("length ratio")
    for rule, one, other in zip(GUARD, _found(asked), _found(known), strict=True):
        if one != other:
            return Compared(rule.name)
    for form in FORMS:
        if form.find(asked) == form.find(known):
            return Compared(None, form.name)
    return Compared(WORDS)
