"""The fields that every generating request has, and how they become SamplingParams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.errors import InputError
from twostroke.sampling import MAX_BIASES, MAX_SAMPLES, MAX_STOP_LENGTH, MAX_STOPS, SamplingParams
from twostroke.serve.errors import bad_request
from twostroke.serve.protocol.base import Name, Shape

MAX_TOP_LOGPROBS = 20
MAX_COUNT = 2**31 - 1
PLAIN = (  # fields that SamplingParams has under the same name
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "priority", "deadline",
)  # fmt: skip

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(Shape):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class PrefixCache(Shape):
    """Extension: what the prefix cache should tell about this request."""

    explain: bool = False


class Sampling(Shape):
    """Fields of OpenAI's chat and completions, then extensions under the names other engines gave them."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: Annotated[dict[Name, Bias], Field(max_length=MAX_BIASES)] | None = None
    user: Name | None = None

    top_k: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    min_p: Unit | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIASES)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    deadline: Annotated[float, Field(ge=0.0, le=1e9)] | None = None
    prefix_cache: PrefixCache | None = None

    @property
    def explain(self) -> bool:
        return self.prefix_cache is not None and self.prefix_cache.explain

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def params(self, **more: Any) -> SamplingParams:
        """What was set, and `more`; whatever was not set is SamplingParams' own default."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options: only together with stream=true.", "stream_options")
        values = {name: getattr(self, name) for name in PLAIN}
        values["logit_bias"] = biases(self.logit_bias)
        return make_params(**values, **more)


def make_params(**values: Any) -> SamplingParams:
    """SamplingParams of the values that are not None. What fields cannot see of each other is refused here."""
    open_end = values.pop("unlimited", False)
    given = {name: value for name, value in values.items() if value is not None}
    if open_end and "max_tokens" not in given:
        given["max_tokens"] = None
    try:
        return SamplingParams(**given)
    except InputError as error:
        raise bad_request(str(error), str(error).split(" ", 1)[0].rstrip(":"), "invalid_value") from None


def biases(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise bad_request(f"logit_bias: {name[:40]!r} is no token id.", "logit_bias", "invalid_value")
    return {int(name): bias for name, bias in given.items()}
