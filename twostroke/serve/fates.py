"""The fate of a field: honoured, a hint, or refused. docs/clients.md shows the table of all fields, made from here.

A *hint* changes nothing about the answer. It is accepted with any value and listed in the answer's header
`x-twostroke-ignored`. A *refused* field would change the answer, so ignoring it would deceive the caller: only null and
empty values are accepted. Every other field of a payload class is honoured. `HINTS` and `REFUSED` hold the words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

REFUSED_TYPE = "refused_field"  # pydantic's name for the error of a refused field
EMPTY: tuple[Any, ...] = (None, False, "", [], {})

HINTS = {
    "access_programs": "there are none",
    "allowed_callers": "only the client calls tools",
    "annotations": "citations of an earlier answer",
    "budget_tokens": "reasoning has no limit of its own; `max_tokens` counts it",
    "cache_control": "every prompt is cached",
    "cache_prompt": "every prompt is cached",
    "caller": "only the client calls tools",
    "chat_id": "conversations are not stored",
    "chat_template_kwargs": "a plain text has no template",
    "content": "reasoning is not given to the model again",
    "context_management": "the client edits its conversation itself",
    "continuous_usage_stats": "the last event has the usage",
    "data": "reasoning is not given to the model again",
    "defer_loading": "every tool is shown to the model",
    "description": "the model is not shown the description of a form",
    "diagnostics": "`prefix_cache.explain` says what was cached",
    "disable_fallback": "there is one grammar library",
    "display": "reasoning is given whole",
    "eager_input_streaming": "arguments are always streamed",
    "enable_thinking": "a plain text has no template with a switch for it",
    "encrypted_content": "reasoning is not given to the model again",
    "generate_summary": "reasoning is given whole",
    "guided_decoding_backend": "there is one grammar library",
    "id": "of an item or message that the client sends back",
    "image": "answers and messages are text only",
    "include": "only `message.output_text.logprobs` adds something",
    "include_obfuscation": "streams are not padded",
    "include_usage": "the last event has the usage",
    "inference_geo": "the model runs on this machine",
    "input_examples": "examples of a tool's arguments are not shown to the model",
    "input_type": "one model reads queries and documents alike",
    "keep_alive": "the model stays loaded",
    "logprobs": "of a part that the client sends back",
    "max_tool_calls": "it limits tools that run on the server, and none does",
    "metadata": "nothing is stored; /v1/responses repeats it",
    "name": "this API has no names of speakers",
    "num_ctx": "the context has its full length",
    "parsed": "the content is used",
    "parsed_arguments": "the arguments are used",
    "prediction": "drafts come from the prompt and the answer themselves",
    "prompt_cache_breakpoint": "every prompt is cached",
    "prompt_cache_key": "prompts are found by their tokens",
    "prompt_cache_options": "every prompt is cached",
    "prompt_cache_retention": "prompts are kept while there is room",
    "provider": "there is one provider",
    "provider_specific_fields": "of a message that the client sends back",
    "reasoning": "`reasoning_content` of a message and `reasoning_effort` of a request are read",
    "reasoning_content": "reasoning is not given to the model again",
    "reasoning_details": "of a message that the client sends back: `reasoning_content` is read",
    "reasoning_effort": "a plain text has no template with a switch for it",
    "redacted_thinking": "reasoning is not given to the model again",
    "safety_identifier": "users are not observed",
    "service_tier": "there is one tier",
    "session_id": "conversations are not stored",
    "signature": "reasoning is not signed",
    "spaces_between_special_tokens": "text is exact, no spaces are added",
    "speed": "every answer is written as fast as this machine can",
    "status": "of an item that the client sends back",
    "store": "nothing is stored",
    "stream_options": "a stream of this API always has its usage",
    "strict": "a form and a forced call always keep to their schema; a call of the model's own choice is only read",
    "summary": "reasoning is given whole",
    "thinking": "reasoning is not given to the model again, and a plain text has no switch for it",
    "thinking_blocks": "of a message that the client sends back",
    "truncation": "a prompt beyond the context is an error",
    "usage": "usage is always counted",
    "user": "it is written to the log",
    "user_profile_id": "users are not observed",
    "verbosity": "models have no switch for it",
    "workspace_id": "there are no workspaces",
}
REFUSED = {
    "audio": "answers and messages are text only: leave it out",
    "background": "answers are not stored, so none can be fetched later: wait for it, or stream it",
    "citations": "documents are not cited here: leave it out",
    "container": "no code is run here: leave it out",
    "conversation": "conversations are not stored: send the whole conversation as input",
    "function_call": "an old form: send tools and tool_choice",
    "functions": "an old form: send tools",
    "guided_whitespace_pattern": "the white space of JSON is fixed: leave it out",
    "include_stop_str_in_output": "a text ends before its stop string: leave it out",
    "mcp_servers": "no other server is called from here: call it yourself and offer its functions as tools",
    "moderation": "nothing is moderated here: leave it out, and check the texts yourself",
    "previous_response_id": "answers are not stored: send the whole conversation as input",
    "prompt": "prompts are not stored: send the text as instructions and input",
    "structural_tag": "is not supported: send json, regex, choice or grammar",
    "use_beam_search": "there is no beam search: send n with a temperature",
    "web_search_options": "nothing is searched here: search yourself and put what you found into a message",
    "whitespace_pattern": "the white space of JSON is fixed: leave it out",
}


@dataclass(frozen=True, slots=True)
class HintFate:
    """Marks a field as a hint. honoured: values that are kept, so they are not listed as ignored."""

    honoured: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class RefusedFate:
    """Marks a field of which only empty values are accepted."""


def _only_empty(value: Any, info: ValidationInfo) -> None:
    if value not in EMPTY:
        why = REFUSED[info.field_name or ""]
        raise PydanticCustomError(REFUSED_TYPE, "{why}", {"why": why})


Hint = Annotated[Any, HintFate()]
RefusedField = Annotated[Any, RefusedFate(), AfterValidator(_only_empty), WithJsonSchema({"type": "null"})]


def refusal(why: str) -> PydanticCustomError:
    """A validator's error for a value that is refused with a sentence of its own."""
    return PydanticCustomError(REFUSED_TYPE, "{why}", {"why": why})


@cache
def fates(payload: type[BaseModel]) -> dict[str, HintFate | RefusedFate]:
    """The fields of a class that are not honoured, by the names that they have in JSON."""
    marks = (HintFate, RefusedFate)
    return {
        field.alias or name: mark
        for name, field in payload.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, marks)
    }


def ignored(payload: BaseModel, path: str = "") -> Iterator[str]:
    """The hints that a request has, such as `metadata` and `messages.parsed`. Places in lists are left out."""
    known = fates(type(payload))
    for name in payload.model_fields_set:
        value, fate = getattr(payload, name), known.get(name)
        if isinstance(fate, HintFate):
            if value is not None and not any(value == kept and type(value) is type(kept) for kept in fate.honoured):
                yield path + name
        elif isinstance(value, BaseModel):
            yield from ignored(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for item in value:
                yield from ignored(item, f"{path}{name}.")
