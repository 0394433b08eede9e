"""The sampling fields of a generating request, and how they become SamplingParams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo

from twostroke.errors import InputError
from twostroke.sampling import MAX_STOP_LENGTH, RANGES, SamplingParams
from twostroke.serve.fates import Hint, HintFate, RefusedField
from twostroke.serve.fields import Integer, Many, Natural, Payload, ShortText, TokenId
from twostroke.serve.transport.errors import bad_request

MAX_TOP_LOGPROBS = 20
SAME_NAME = (  # fields that SamplingParams has under the same name
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "priority", "deadline", "speculate", "retry",
)  # fmt: skip

StopString = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]  # an empty one stops nothing
TopK = Natural | Literal[-1]  # -1 and 0: all tokens
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


def add_ranges(schema: dict[str, Any]) -> None:
    """Into the JSON schema of a payload: the ranges that SamplingParams checks. A narrower one of the payload stays."""
    for name in SAME_NAME:
        allowed, found = RANGES.get(name), schema.get("properties", {}).get(name)
        if allowed is None or found is None:
            continue
        for branch in found.get("anyOf", [found]):
            if branch.get("type") not in ("integer", "number") or "const" in branch:
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
    continuous_usage_stats: bool | None = None  # usage so far in every chunk
    include_obfuscation: Annotated[Any, HintFate((False,))] = None


class PrefixCacheOptions(Payload):
    """Extension: whether the answer explains what the prefix cache did for this request."""

    explain: bool = False


class AnswerCacheOptions(Payload):
    """Extension: how this request uses the answer cache."""

    answer: bool = True  # False: the answer is computed, and not stored
    max_age: Annotated[float, Field(ge=0)] | None = None  # seconds


class ExplainField(SampledPayload):
    prefix_cache: PrefixCacheOptions | None = None
    cache: AnswerCacheOptions | None = None

    @property
    def explain(self) -> bool:
        return self.prefix_cache is not None and self.prefix_cache.explain


class CommonHints(Payload):
    """Hints that clients send to every route."""

    cache_prompt: Hint = None
    chat_id: Hint = None
    context_management: Hint = None
    keep_alive: Hint = None
    metadata: Hint = None
    num_ctx: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_options: Hint = None
    prompt_cache_retention: Hint = None
    provider: Hint = None
    safety_identifier: Hint = None
    service_tier: Hint = None
    session_id: Hint = None
    store: Annotated[Any, HintFate((False,))] = None
    usage: Hint = None
    user: Hint = None

    @property
    def user_name(self) -> str | None:
        """The name that the client gave for its user, for the log."""
        return self.user[:64] if isinstance(self.user, str) else None


class GenerationHints(CommonHints):
    """Hints that clients send to every generating route, whichever API they were made for."""

    cache_control: Hint = None
    eager_input_streaming: Hint = None
    include: Annotated[Any, HintFate(([],))] = None
    include_obfuscation: Annotated[Any, HintFate((False,))] = None
    reasoning: Hint = None
    truncation: Annotated[Any, HintFate(("disabled",))] = None
    verbosity: Hint = None


class MessageHints(Payload):
    """Hints of a message: what a client's library added to an answer that is sent back."""

    cache_control: Hint = None
    id: Hint = None
    parsed: Hint = None
    provider_specific_fields: Hint = None
    reasoning: Hint = None
    reasoning_details: Hint = None
    redacted_thinking: Hint = None
    thinking_blocks: Hint = None


def without_stream_empty(value: Any, info: ValidationInfo) -> Any:
    """Options of a stream that is not asked for are a hint, whatever they are. `stream` is a field before this one."""
    return value if value is None or info.data.get("stream") else {}


WITH_STREAM = BeforeValidator(without_stream_empty)


class SamplingFields(ExplainField, GenerationHints):
    """Fields of OpenAI's chat and completions, then extensions under the names that other engines gave them."""

    model: ShortText | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, WITH_STREAM] = None
    n: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Integer | None = None
    stop: StopString | Many[StopString] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[ShortText, Bias] | None = None

    top_k: TopK | None = None
    min_p: float | None = None
    min_tokens: Natural | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # another name of repetition_penalty
    stop_token_ids: Many[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None  # False: special tokens are part of the text
    spaces_between_special_tokens: Hint = None
    use_beam_search: RefusedField = None
    include_stop_str_in_output: RefusedField = None
    priority: Integer | None = None
    deadline: float | None = None
    speculate: bool | None = None
    retry: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def hints(self) -> set[str]:
        """Fields that are hints because of the values of others."""
        return {"stream_options"} if self.stream_options is not None and not self.stream else set()

    def params(self, **more: Any) -> SamplingParams:
        """SamplingParams of these fields and of `more`."""
        values = {name: getattr(self, name) for name in SAME_NAME}
        values["stop"] = stop_strings(self.stop)
        values["repetition_penalty"] = same_value(self, "repetition_penalty", "repeat_penalty")
        return make_params(**(values | {"logit_bias": token_biases(self.logit_bias)} | more))


def stop_strings(given: str | list[str] | None) -> list[str]:
    """The stop strings without empty ones, which stop nothing."""
    return [stop for stop in ([given] if isinstance(given, str) else given or ()) if stop]


def same_value(payload: Payload, name: str, other: str) -> Any:
    """The value of a field that has two names. Both may be sent if they agree."""
    first, second = getattr(payload, name), getattr(payload, other)
    if first is not None and second is not None and first != second:
        raise bad_request(f"{other}: means the same as {name}, which has another value: send one.", other)
    return second if first is None else first


def make_params(*, unlimited: bool = False, **values: Any) -> SamplingParams:
    """SamplingParams of the values that are not None. unlimited: without max_tokens the answer may fill the context."""
    given = {name: value for name, value in values.items() if value is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
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
