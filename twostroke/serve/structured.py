"""Fields that fix the form of an answer (JSON, a schema, a regular expression, a grammar, tool calls), and what follows
from them: a grammar for the engine, tools for the chat template, a parser for the answer's text."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from twostroke.errors import InputError
from twostroke.grammar.budget import TOO_SLOW
from twostroke.grammar.masks import DEAD, TOO_SHORT
from twostroke.grammar.tools import tool_grammar
from twostroke.sampling import Grammar, schema_text
from twostroke.serve.fields import Many, Name, Payload, Text
from twostroke.serve.segments import SegmentReader
from twostroke.serve.transport.errors import ApiError, bad_request
from twostroke.text.parse import StreamParser
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tools import MAX_TOOLS, ToolFormat, has_reasoning, marker_ids, read_choice, read_tools, tool_format


class PlainText(Payload):
    type: Literal["text"]


class JsonObject(Payload):
    type: Literal["json_object"]


class JsonSchema(Payload):
    name: Name
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Payload):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class Function(Payload):
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Payload):
    type: Literal["function"]
    function: Function


class FunctionName(Payload):
    name: Name


class NamedTool(Payload):
    type: Literal["function"]
    function: FunctionName


class FormatFields(Payload):
    """The form of the whole answer. `regex` and `grammar` are extensions."""

    response_format: Annotated[PlainText | JsonObject | JsonSchemaFormat, Field(discriminator="type")] | None = None
    regex: Text | None = None
    grammar: Text | None = None

    def make_grammar(self) -> Grammar | None:
        """At most one of the three fields may be set."""
        wanted = None if isinstance(self.response_format, PlainText) else self.response_format
        given = {"response_format": wanted, "regex": self.regex, "grammar": self.grammar}
        names = [name for name, value in given.items() if value is not None]
        if not names:
            return None
        if len(names) > 1:
            raise bad_request(f"{' and '.join(names)} both give the answer a form: send one of them.", names[1])
        if wanted is not None:
            return json_grammar(wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else None)
        try:
            return Grammar("ebnf", self.grammar) if self.grammar is not None else Grammar("regex", self.regex or "")
        except InputError as error:
            raise bad_request(str(error), names[0], "invalid_value") from None

    @property
    def grammar_field(self) -> str:
        """The field that the grammar comes from, for errors that are found later."""
        if self.regex is not None:
            return "regex"
        if self.grammar is not None:
            return "grammar"
        return "response_format" if self.response_format is not None else "tools"


def json_grammar(schema: dict[str, Any] | None, field: str = "response_format") -> Grammar:
    """JSON of this schema; any JSON object without one."""
    try:
        return Grammar("json_object") if schema is None else Grammar("json_schema", schema_text(schema))
    except InputError as error:
        raise bad_request(str(error), field, "invalid_value") from None


class ToolFields(FormatFields):
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    def answer_format(self, tokenizer: Tokenizer) -> AnswerFormat:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        return chat_format(tokenizer, self.make_grammar(), tools, choice, self.parallel_tool_calls is not False)


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
    names: frozenset[str] = frozenset()  # of the tools
    reasons: bool = False  # the model may write its reasoning first
    visible: frozenset[int] = frozenset()  # special tokens whose text the reader needs

    def reader(self, prompt: str) -> SegmentReader:
        """For one answer to this prompt. The prompt itself may have opened the reasoning."""
        if self.calls is None and not self.reasons:
            return SegmentReader()
        inside = self.reasons and prompt.rstrip().endswith("<think>")
        return SegmentReader(StreamParser(self.calls, self.names, reasoning=self.reasons, inside=inside))


def chat_format(
    tokenizer: Tokenizer, grammar: Grammar | None, given: list[dict[str, Any]], choice: Any, parallel: bool
) -> AnswerFormat:
    """The format of an answer in a conversation. given, choice: tools and tool_choice as /v1/chat/completions has them;
    parallel: an answer may have several calls."""
    source = tokenizer.chat.source if tokenizer.chat is not None else None
    reasons = has_reasoning(source) and grammar is None  # a grammar covers the whole answer, which leaves no reasoning
    try:
        tools = read_tools(given)
        chosen = read_choice(choice, tools)
    except InputError as error:
        raise bad_request(str(error), str(error).split(":", 1)[0], "invalid_value") from None
    if chosen.mode == "none":
        return AnswerFormat(grammar, reasons=reasons, visible=marker_ids(tokenizer, None) if reasons else frozenset())
    calls = tool_format(source)
    if calls is None:
        raise bad_request("tools: this model's chat template has no form for tools that is known.", "tools")
    if grammar is not None:
        raise bad_request("response_format, regex and grammar do not go together with tools.", "tools")
    if chosen.forced:
        try:
            grammar = tool_grammar(tools, chosen, calls, tokenizer, parallel)
        except InputError as error:
            raise bad_request(str(error), "tools", "invalid_value") from None
        reasons = False
    names = frozenset(tool.name for tool in tools)
    return AnswerFormat(grammar, given, calls, names, reasons, marker_ids(tokenizer, calls))
