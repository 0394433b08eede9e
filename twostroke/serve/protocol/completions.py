"""/v1/completions: text to continue exactly as given."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from twostroke.sampling import MAX_SAMPLES, SamplingParams
from twostroke.serve.errors import bad_request
from twostroke.serve.protocol.base import Text
from twostroke.serve.protocol.constraints import Form
from twostroke.serve.protocol.sampling import MAX_COUNT, MAX_TOP_LOGPROBS, Sampling, TokenId

DEFAULT_MAX_TOKENS = 16  # OpenAI's
Tokens = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(Sampling, Form):
    prompt: Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1, max_length=MAX_SAMPLES)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """One or several: a flat list of numbers is one prompt of token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        many: list[str | list[int]] = self.prompt
        if len(many) * (self.n or 1) > MAX_SAMPLES:
            raise bad_request(f"prompt: prompts × n may be at most {MAX_SAMPLES}.", "prompt")
        return many

    @property
    def silent(self) -> bool:
        """max_tokens=0 with echo: only the prompt's own logprobs are wanted."""
        return self.max_tokens == 0

    def to_params(self, **more: Any) -> SamplingParams:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of: only the value of n is supported.", "best_of")
        if self.silent and not self.echo:
            raise bad_request("max_tokens: 0 only together with echo=true.", "max_tokens")
        longest = DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)
        prompt_logprobs = self.logprobs if self.echo else None
        return self.params(max_tokens=longest, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs, **more)


def completion(head: dict[str, Any], choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {**head, "object": "text_completion", "choices": choices, "usage": usage}


def chunk(head: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {**head, "object": "text_completion", "choices": choices}


def choice(index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
