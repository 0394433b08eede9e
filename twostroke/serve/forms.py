"""Fields that give an answer its form: JSON of a schema, a regular expression, a choice, a grammar. OpenAI, vLLM and
llama.cpp have different names for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from twostroke.errors import InputError
from twostroke.grammar.schema import close_objects
from twostroke.sampling import Grammar, schema_text
from twostroke.serve.fates import Hint, RefusedField
from twostroke.serve.fields import LongText, Many, OrEmpty, Payload, ShortText
from twostroke.serve.transport.errors import bad_request

MAX_CHOICES = 1024


class PlainText(Payload):
    type: Literal["text"]


class JsonObject(Payload):
    type: Literal["json_object"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class JsonSchema(Payload):
    name: ShortText | None = None
    description: Hint = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Hint = None


class JsonSchemaFormat(Payload):
    type: Literal["json_schema"]
    json_schema: JsonSchema


AnyFormat = Annotated[PlainText | JsonObject | JsonSchemaFormat, Field(discriminator="type")]
Choices = Annotated[Many[LongText], Field(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(Payload):
    """vLLM's one field for every form."""

    json_: Annotated[dict[str, Any] | LongText | None, Field(alias="json")] = None
    regex: LongText | None = None
    choice: Choices | None = None
    grammar: LongText | None = None
    json_object: bool | None = None
    structural_tag: RefusedField = None
    disable_additional_properties: bool | None = None  # objects are closed where their schema says nothing
    disable_any_whitespace: Literal[False] | None = None
    disable_fallback: Hint = None
    whitespace_pattern: RefusedField = None

    def form(self) -> Form | None:
        """At most one of the fields that give a form."""
        given = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar,
                 "json_object": self.json_object or None}  # fmt: skip
        found = [(name, value) for name, value in given.items() if value is not None]
        if len(found) > 1:
            raise bad_request("structured_outputs: gives the answer two forms: send one of them.", "structured_outputs")
        return Form(found[0][0], found[0][1], "structured_outputs") if found else None


class FormatFields(Payload):
    """The form of the whole answer: OpenAI's field, then those of other engines."""

    response_format: OrEmpty[AnyFormat] = None
    regex: LongText | None = None
    grammar: LongText | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | LongText | None = None
    guided_regex: LongText | None = None
    guided_choice: Choices | None = None
    guided_grammar: LongText | None = None
    guided_decoding_backend: Hint = None
    guided_whitespace_pattern: RefusedField = None

    def form(self) -> Form | None:
        """At most one field may give a form; null and empty texts give none."""
        found = [form for form in self._forms() if form is not None]
        if len(found) > 1:
            names = [form.field for form in found]
            raise bad_request(f"{' and '.join(names)} both give the answer a form: send one of them.", names[1])
        return found[0] if found else None

    def _forms(self) -> Iterator[Form | None]:
        wanted = self.response_format
        if isinstance(wanted, JsonObject):
            kind = "json_object" if wanted.schema_ is None else "json"
            yield Form(kind, wanted.schema_, "response_format")
        elif isinstance(wanted, JsonSchemaFormat):
            schema = wanted.json_schema.schema_
            yield Form("json_object" if schema is None else "json", schema, "response_format")
        for field, kind in FORM_FIELDS.items():
            value = getattr(self, field)
            yield None if value is None or value == "" else Form(kind, value, field)
        if self.structured_outputs is not None:
            yield self.structured_outputs.form()

    def make_grammar(self, closed: bool = False) -> Grammar | None:
        """closed: objects have no other properties than their schema names, unless it says so."""
        form, more = self.form(), self.structured_outputs
        closed = closed or (more is not None and bool(more.disable_additional_properties))
        return None if form is None else form.make(closed)

    @property
    def grammar_field(self) -> str:
        """The field that the grammar comes from, for errors that are found later."""
        form = self.form()
        return "tools" if form is None else form.field


FORM_FIELDS = {
    "regex": "regex", "grammar": "grammar", "json_schema": "json", "guided_json": "json", "guided_regex": "regex",
    "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip


class Form(NamedTuple):
    """What a request says about the form of its answer."""

    kind: str  # json, json_object, regex, choice, grammar
    value: Any
    field: str  # that it comes from

    def make(self, closed: bool) -> Grammar:
        try:
            if self.kind == "json_object":
                return Grammar("json_object")
            if self.kind == "json":
                return schema_grammar(self.value, closed)
            if self.kind == "choice":
                return Grammar("ebnf", "start: " + " | ".join(json.dumps(text) for text in self.value))
            return Grammar("ebnf" if self.kind == "grammar" else "regex", self.value)
        except InputError as error:
            raise bad_request(str(error), self.field, "invalid_value") from None


def schema_grammar(schema: dict[str, Any] | str, closed: bool) -> Grammar:
    """JSON of this schema. A schema may come as text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the schema is not JSON: {error}.") from None
    return Grammar("json_schema", schema_text(close_objects(schema) if closed else schema))


def json_grammar(schema: dict[str, Any] | None, closed: bool, field: str) -> Grammar:
    """JSON of this schema; any JSON object without one."""
    return Form("json_object" if schema is None else "json", schema, field).make(closed)
