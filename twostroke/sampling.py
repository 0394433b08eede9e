"""What a caller may ask of one request, checked once for every face of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite
from typing import Any, NamedTuple

from twostroke.errors import InputError
from twostroke.record import replace

MAX_SAMPLES = 128
MAX_LOGPROBS = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_BIASES = 4096
MASK = 2**64 - 1
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MAX_GRAMMAR = 1 << 18  # characters
GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "ebnf")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that the whole answer belongs to: data only, so that it can be hashed, sent and compiled anywhere.

    kind: "json_schema" (source: the schema, as JSON text or a mapping), "json_object" (any object; no source), "regex"
    (the whole answer matches it) or "ebnf" (`root ::= …` as llama.cpp writes it, or Lark's `start: …`).
    """

    kind: str
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise InputError(f"grammar.kind must be one of {', '.join(GRAMMAR_KINDS)}; got {self.kind!r}.")
        if self.kind == "json_schema" and isinstance(self.source, Mapping):
            object.__setattr__(self, "source", schema_text(self.source))
        if not isinstance(self.source, str) or not is_text(self.source):
            raise InputError(f"grammar.source must be a string of whole characters, got {type(self.source).__name__}.")
        if bool(self.source) == (self.kind == "json_object"):
            needs = "no source" if self.source else "a source"
            raise InputError(f"grammar: kind {self.kind!r} takes {needs}.")
        if len(self.source) > MAX_GRAMMAR:
            raise InputError(
                f"grammar.source has {len(self.source)} characters, at most {MAX_GRAMMAR} are read: make it smaller."
            )


def schema_text(schema: Any, name: str = "grammar.source") -> str:
    """A JSON schema as text."""
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: is not plain JSON data: {error}.") from None


class Range(NamedTuple):
    """The values that a number may have. Whole numbers where `low` is one; high: None for no limit."""

    low: float
    high: float | None
    optional: bool = False  # None is a value too
    above: bool = False  # `low` itself is not a value

    def check(self, name: str, value: Any) -> None:
        if value is None and self.optional:
            return
        right = is_whole if isinstance(self.low, int) else is_number
        too_low = right(value) and (value <= self.low if self.above else value < self.low)
        if not right(value) or too_low or (self.high is not None and value > self.high):
            kind = "whole number" if isinstance(self.low, int) else "number"
            low, high = (f"{bound:g}" if isinstance(bound, float) else bound for bound in (self.low, self.high))
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise InputError(f"{name} must be a {kind} {bounds}, got {value!r}.")


RANGES = {
    "max_tokens": Range(1, None, optional=True),
    "min_tokens": Range(0, None),
    "temperature": Range(0.0, 100.0),
    "top_k": Range(0, None),
    "top_p": Range(0.0, 1.0, above=True),
    "min_p": Range(0.0, 1.0),
    "seed": Range(-(2**63), 2**64 - 1, optional=True),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.01, 100.0),
    "logprobs": Range(0, MAX_LOGPROBS, optional=True),
    "prompt_logprobs": Range(0, MAX_LOGPROBS, optional=True),
    "n": Range(1, MAX_SAMPLES),
    "priority": Range(-(2**31), 2**31 - 1),
    "deadline": Range(0.0, 1e9, optional=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the answer is chosen, when it ends, and what is reported about it. Immutable; wrong values are refused."""

    max_tokens: int | None = 256  # None: until the model stops or the context is full
    min_tokens: int = 0  # no stop of any kind before this many output tokens
    temperature: float = 1.0  # 0: greedy. Not set: as the model's generation config says, and so are the next three
    top_k: int = 0  # keep the k likeliest; 0: all
    top_p: float = 1.0  # keep the likeliest tokens that together reach this probability
    min_p: float = 0.0  # keep tokens at least this likely relative to the likeliest
    seed: int | None = None  # None: drawn by the engine
    stop: str | Sequence[str] = ()  # the text ends before the first of these
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0  # subtracted once from every token already written
    frequency_penalty: float = 0.0  # subtracted for every time a token was written
    repetition_penalty: float = 1.0  # divides (multiplies, when negative) logits of tokens in prompt or answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # for each output token its own and this many best; 0: its own only
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # what the answer must look like; it decides where the answer may end
    n: int = 1
    speculate: bool = True  # False: no drafts for this request; they change when its tokens come, never which
    retry: bool = True  # False: an answer that has begun ends with an error where the worker that writes it is lost
    priority: int = 0  # lower first (policy "priority"; victims of preemption are chosen from the highest)
    deadline: float | None = None  # seconds after arrival by which the first token should be out (policy "deadline")

    given: frozenset[str] = field(init=False, repr=False, compare=False)  # the names that the caller set

    def __new__(cls, *positional: Any, **given: Any) -> SamplingParams:
        if positional:
            raise InputError("SamplingParams takes its values by name, as in SamplingParams(temperature=0).")
        for name in given:
            if name not in cls.__dataclass_fields__:
                near = get_close_matches(name, cls.__dataclass_fields__, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(cls.__dataclass_fields__)}."
                raise InputError(f"{name}: unknown sampling parameter. {hint}")
        made = object.__new__(cls)
        object.__setattr__(made, "given", frozenset(given))
        return made

    @property
    def is_plain(self) -> bool:
        """Whether a choice depends on its logits and noise alone, and nothing is reported about it."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return not penalties and not self.logit_bias and self.logprobs is None and self.grammar is None

    def __post_init__(self) -> None:
        if self.top_p == 0.0:
            raise InputError("top_p must be above 0: for the likeliest token alone use temperature=0.")
        for name, allowed in RANGES.items():
            allowed.check(name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}): lower it.")
        self._check_stops()
        flag(self, "ignore_eos")
        flag(self, "speculate")
        flag(self, "retry")
        self._check_bias()
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InputError(f"grammar must be a Grammar, got {type(self.grammar).__name__}.")

    def _check_stops(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InputError("stop must be a non-empty string or a list of such strings.")
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            raise InputError(f"stop takes at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters.")
        ids = self.stop_token_ids
        if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(is_whole(token) for token in ids):
            raise InputError("stop_token_ids must be a list of token ids (whole numbers).")
        if len(ids) > MAX_BIASES:
            raise InputError(f"stop_token_ids takes at most {MAX_BIASES} ids, got {len(ids)}.")
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    def _check_bias(self) -> None:
        bias = self.logit_bias
        if not isinstance(bias, Mapping) or len(bias) > MAX_BIASES:
            raise InputError(f"logit_bias must be a mapping of at most {MAX_BIASES} token ids to numbers.")
        for token, value in bias.items():
            if not is_whole(token) or not is_number(value) or not -100.0 <= value <= 100.0:
                raise InputError(f"logit_bias: {token!r}: {value!r} must map a token id to a number from -100 to 100.")
        object.__setattr__(self, "logit_bias", dict(bias))

    def with_defaults(self, defaults: Mapping[str, float]) -> SamplingParams:
        """The same with a model's values where the caller set none. A caller that sets the temperature has chosen how
        to sample, and nothing is added."""
        chosen = "temperature" in self.given
        missing: dict[str, Any] = {} if chosen else {n: v for n, v in defaults.items() if n not in self.given}
        return replace(self, **missing) if missing else self

    def check_vocabulary(self, vocab: int) -> None:
        """Token ids must name rows of the logits, or they would reach memory that is not theirs."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocab:
                    raise InputError(f"{name}: token id {token} is outside the vocabulary (0 to {vocab - 1}).")


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: half a character (a lone surrogate) cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def flag(params: Any, name: str) -> None:
    if not isinstance(getattr(params, name), bool):
        raise InputError(f"{name} must be True or False, got {getattr(params, name)!r}.")


def mix(z: int) -> int:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)
