"""Tools, and what follows from them and from a form: a grammar for the engine, tools for the chat template, a parser of
the answer's text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from twostroke.errors import InputError
from twostroke.grammar.budget import TOO_SLOW
from twostroke.grammar.masks import DEAD, TOO_SHORT
from twostroke.grammar.schema import close_objects
from twostroke.grammar.tagged import unbound
from twostroke.grammar.tools import answer_grammar, tool_grammar
from twostroke.grammar.unique import CHARACTERS, spell_out
from twostroke.record import replace
from twostroke.sampling import Grammar
from twostroke.serve.fates import Hint, refusal
from twostroke.serve.fields import LongText, Many, OrEmpty, Payload, ShortText
from twostroke.serve.forms import FormatFields
from twostroke.serve.segments import SegmentReader
from twostroke.serve.transport.errors import ApiError, bad_request
from twostroke.text.formats import GENERIC, ToolFormat, has_reasoning, tool_format
from twostroke.text.parse import StreamParser
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tools import MAX_TOOLS, marker_ids, read_choice, read_tools


class FormContext(NamedTuple):
    """What the form of an answer depends on beside the request."""

    tokenizer: Tokenizer
    closed: bool = False  # objects have no other properties than their schema names, unless it says so


class Function(Payload):
    name: ShortText
    description: LongText | None = None
    parameters: dict[str, Any] | None = None
    strict: Hint = None


def _only_functions(kind: str) -> str:
    if kind != "function":
        raise refusal(
            f"{kind[:40]!r} tools are not run here: nothing is searched, fetched or executed; offer a function"
        )
    return kind


FunctionType = Annotated[str, AfterValidator(_only_functions)]


class Tool(Payload):
    type: FunctionType
    function: Function
    cache_control: Hint = None


class FunctionName(Payload):
    name: ShortText


class NamedTool(Payload):
    type: Literal["function"]
    function: FunctionName


class ToolFields(FormatFields):
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: OrEmpty[Literal["auto", "none", "required"] | NamedTool] = None
    parallel_tool_calls: bool | None = None

    def answer_format(self, context: FormContext) -> AnswerFormat:
        tools = [tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in self.tools or ()]
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        form = self.make_grammar(context.closed)
        return chat_format(context, form, tools, choice, self.parallel_tool_calls)


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool of another API in the form of /v1/chat/completions."""
    given = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def function_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def grammar_failure(error: str) -> ApiError | None:
    """An answer that its grammar ended: the client's own grammar is the reason. None: another error."""
    if error not in (TOO_SLOW, DEAD, TOO_SHORT):
        return None
    return bad_request(f"grammar: {error}.", "grammar", "grammar_failed")


class AnswerFormat(NamedTuple):
    """What an answer may look like, and how its text is read."""

    grammar: Grammar | None = None
    tools: list[dict[str, Any]] | None = None  # for the chat template
    calls: ToolFormat | None = None  # how the model writes tool calls; None: all of its text is content
    names: Mapping[str, Any] = {}  # of the tools, with their schemas
    reasons: bool = False  # the model may write its reasoning first
    visible: frozenset[int] = frozenset()  # special tokens whose text the reader needs
    hints: frozenset[str] = frozenset()  # what the grammar cannot promise
    parallel: bool = True  # False: the answer has one call, whatever the model writes

    def reader(self, prompt: str) -> SegmentReader:
        """The reader of one answer to this prompt. The prompt itself may have opened the reasoning."""
        if self.calls is None and not self.reasons:
            return SegmentReader()
        inside = self.reasons and prompt.rstrip().endswith("<think>")
        parser = StreamParser(self.calls, self.names, reasoning=self.reasons, inside=inside)
        return SegmentReader(parser, self.parallel)


def chat_format(
    context: FormContext, form: Grammar | None, given: list[dict[str, Any]], choice: Any, parallel: bool | None
) -> AnswerFormat:
    """The format of an answer in a conversation. form: of an answer that calls no tool; given, choice: tools and
    tool_choice as /v1/chat/completions has them; parallel: an answer may have several calls. None: it may if the model
    was trained to call tools; a grammar ends the answers of other models after one call, as many would repeat it."""
    tokenizer, closed = context
    source = tokenizer.chat.source if tokenizer.chat is not None else None
    try:
        tools = read_tools(given)
        chosen = read_choice(choice, tools)
    except InputError as error:
        raise bad_request(str(error), str(error).split(":", 1)[0], "invalid_value") from None
    calls = tool_format(source) or GENERIC
    if chosen.mode == "none":
        reasons = has_reasoning(source) and form is None  # a grammar covers the whole answer: there is no reasoning
        channels = calls if calls.channels else None  # these models write marks whatever they answer
        visible = marker_ids(tokenizer, channels) if reasons or channels else frozenset()
        grammar = None if form is None else answer_grammar(form, channels, tokenizer)
        return AnswerFormat(grammar, None, channels, {}, reasons, visible, grammar_hints(form))
    grammar = None
    if chosen.forced or form is not None:
        if closed:
            tools = tuple(replace(tool, parameters=close_objects(tool.parameters)) for tool in tools)
        try:
            several = calls is not GENERIC if parallel is None else parallel
            grammar = tool_grammar(tools, chosen, calls, tokenizer, several, None if chosen.forced else form)
        except InputError as error:
            raise bad_request(str(error), "tools", "invalid_value") from None
    reasons = has_reasoning(source) and grammar is None
    names = {tool.name: tool.parameters for tool in tools}
    hints = grammar_hints(form)
    if grammar is not None:
        hints |= frozenset().union(*(_unheld(tool.parameters, len(tools)) for tool in tools))
        hints |= unbound(given) if calls.tags is not None else frozenset()
    visible = marker_ids(tokenizer, calls)
    return AnswerFormat(grammar, given, calls, names, reasons, visible, hints, parallel is not False)


def grammar_hints(form: Grammar | None) -> frozenset[str]:
    """What a form asks for and its grammar cannot promise."""
    if form is None or form.kind != "json_schema" or '"uniqueItems":true' not in form.source:
        return frozenset()
    return _unheld(json.loads(form.source))


def _unheld(schema: Any, schemas: int = 1) -> frozenset[str]:
    """schemas: that the request has."""
    return frozenset() if spell_out(schema, CHARACTERS // schemas)[1] else frozenset({"uniqueItems"})
