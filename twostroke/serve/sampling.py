"""The sampling fields of a generating request, and how they become SamplingParams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from twostroke.errors import InputError
from twostroke.sampling import MAX_STOP_LENGTH, RANGES, SamplingParams
from twostroke.serve.fields import Integer, Many, Name, Natural, Payload, TokenId
from twostroke.serve.transport.errors import bad_request

MAX_TOP_LOGPROBS = 20
SAME_NAME = (  # fields that SamplingParams has under the same name
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "priority", "deadline", "speculate",
)  # fmt: skip

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


def add_ranges(schema: dict[str, Any]) -> None:
    """Into the JSON schema of a payload: the ranges that SamplingParams checks. A narrower one of the payload stays."""
    for name in SAME_NAME:
        allowed, found = RANGES.get(name), schema.get("properties", {}).get(name)
        if allowed is None or found is None:
            continue
        for branch in found.get("anyOf", [found]):
            if branch.get("type") not in ("integer", "number"):
                continue
            lowest = "exclusiveMinimum" if allowed.above else "minimum"
            branch[lowest] = max(allowed.low, branch.get(lowest, allowed.low))
            if allowed.high is not None:
                branch["maximum"] = min(allowed.high, branch.get("maximum", allowed.high))


class SampledPayload(Payload):
    """A payload with fields of SamplingParams."""

    model_config = ConfigDict(json_schema_extra=add_ranges)


class StreamOptions(Payload):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class PrefixCacheOptions(Payload):
    """Extension: whether the answer explains what the prefix cache did for this request."""

    explain: bool = False


class ExplainField(SampledPayload):
    prefix_cache: PrefixCacheOptions | None = None

    @property
    def explain(self) -> bool:
        return self.prefix_cache is not None and self.prefix_cache.explain


class SamplingFields(ExplainField):
    """Fields of OpenAI's chat and completions, then extensions under the names that other engines gave them."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Integer | None = None
    stop: StopString | Many[StopString] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Name, Bias] | None = None
    user: Name | None = None

    top_k: Natural | None = None
    min_p: float | None = None
    min_tokens: Natural | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Many[TokenId] | None = None
    ignore_eos: bool | None = None
    priority: Integer | None = None
    deadline: float | None = None
    speculate: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def params(self, **more: Any) -> SamplingParams:
        """SamplingParams of these fields and of `more`."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options: only together with stream=true.", "stream_options")
        values = {name: getattr(self, name) for name in SAME_NAME}
        return make_params(**values, logit_bias=token_biases(self.logit_bias), **more)


def make_params(*, unlimited: bool = False, **values: Any) -> SamplingParams:
    """SamplingParams of the values that are not None. unlimited: without max_tokens the answer may fill the context."""
    given = {name: value for name, value in values.items() if value is not None}
    if unlimited:
        given.setdefault("max_tokens", None)
    try:
        return SamplingParams(**given)
    except InputError as error:
        raise bad_request(str(error), str(error).split(" ", 1)[0].rstrip(":"), "invalid_value") from None


def token_biases(given: dict[str, float] | None) -> dict[int, float] | None:
    """JSON has names where SamplingParams has token ids. One id has one name, so that no token is named twice."""
    for name in given or ():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise bad_request(f"logit_bias: {name[:40]!r} is no token id.", "logit_bias", "invalid_value")
        if name != str(int(name)):
            reason = f"logit_bias: {name!r} is not how token id {int(name)} is written; send {str(int(name))!r}."
            raise bad_request(reason, "logit_bias", "invalid_value")
    return None if given is None else {int(name): bias for name, bias in given.items()}
