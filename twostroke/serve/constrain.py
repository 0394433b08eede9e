"""From the fields that bind an answer's form to what is done about it.

That is a grammar for the engine, tools for the chat template, and a reader for the text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from twostroke.errors import InputError
from twostroke.grammar.tools import tool_grammar
from twostroke.sampling import Grammar, schema_text
from twostroke.serve.errors import bad_request
from twostroke.serve.protocol.constraints import Constraints, Form, JsonSchemaFormat, PlainText
from twostroke.serve.reading import Reader
from twostroke.text.parse import StreamParser
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tools import Tool, ToolFormat, has_reasoning, marker_ids, read_choice, read_tools, tool_format


class Binding(NamedTuple):
    """What a request's answer is bound to."""

    grammar: Grammar | None = None
    tools: list[dict[str, Any]] | None = None  # for the chat template
    form: ToolFormat | None = None  # how calls are written; None: whatever is written is content
    names: frozenset[str] = frozenset()
    reasons: bool = False  # the model may think aloud first
    visible: frozenset[int] = frozenset()  # special tokens that the reader must see

    def reader(self, prompt: str) -> Reader:
        """For one answer to this prompt, which may itself have opened the thinking."""
        if self.form is None and not self.reasons:
            return Reader()
        inside = self.reasons and prompt.rstrip().endswith("<think>")
        return Reader(StreamParser(self.form, self.names, reasoning=self.reasons, inside=inside))


FREE = Binding()


def bind(tokenizer: Tokenizer, request: Constraints) -> Binding:
    """For conversations: forms and tools."""
    source = tokenizer.chat.source if tokenizer.chat is not None else None
    grammar = grammar_of(request)
    reasons = has_reasoning(source) and grammar is None  # what a grammar binds is all answer, whatever it contains
    try:
        tools = read_tools([tool.model_dump(exclude_none=True) for tool in request.tools or ()])
        choice = read_choice(plain_choice(request), tools)
    except InputError as error:
        raise bad_request(str(error), str(error).split(":", 1)[0], "invalid_value") from None
    if choice.mode == "none":
        return Binding(grammar, reasons=reasons, visible=marker_ids(tokenizer, None) if reasons else frozenset())
    form = tool_format(source)
    if form is None:
        raise bad_request("tools: this model's chat template has no form for tools that is known.", "tools")
    if grammar is not None:
        raise bad_request("response_format, regex and grammar do not go together with tools.", "tools")
    if choice.forced:
        grammar, reasons = forced(tools, choice, form, tokenizer, request.parallel_tool_calls is not False), False
    given = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    return Binding(grammar, given, form, frozenset(t.name for t in tools), reasons, marker_ids(tokenizer, form))


def forced(tools: tuple[Tool, ...], choice: Any, form: ToolFormat, tokenizer: Tokenizer, parallel: bool) -> Grammar:
    try:
        return tool_grammar(tools, choice, form, tokenizer, parallel)
    except InputError as error:
        raise bad_request(str(error), "tools", "invalid_value") from None


def grammar_of(request: Form) -> Grammar | None:
    """At most one of the three fields that give the answer a form."""
    wanted = request.response_format
    if isinstance(wanted, PlainText):
        wanted = None
    given = {"response_format": wanted, "regex": request.regex, "grammar": request.grammar}
    names = [name for name, value in given.items() if value is not None]
    if not names:
        return None
    if len(names) > 1:
        raise bad_request(f"{' and '.join(names)} both give the answer a form: send one of them.", names[1])
    try:
        if request.regex is not None:
            return Grammar("regex", request.regex)
        if request.grammar is not None:
            return Grammar("ebnf", request.grammar)
        if isinstance(wanted, JsonSchemaFormat):
            schema = wanted.json_schema.schema_
            return Grammar("json_object") if schema is None else Grammar("json_schema", schema_text(schema))
        return Grammar("json_object")
    except InputError as error:
        raise bad_request(str(error), names[0], "invalid_value") from None


def grammar_field(request: Form) -> str:
    """The field a grammar came from, for errors that are found later."""
    if request.regex is not None:
        return "regex"
    if request.grammar is not None:
        return "grammar"
    return "response_format" if request.response_format is not None else "tools"


def plain_choice(request: Constraints) -> Any:
    choice = request.tool_choice
    return choice if choice is None or isinstance(choice, str) else choice.model_dump()
