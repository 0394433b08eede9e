"""Fields that bind the answer to a form: JSON, a schema, a regular expression, a grammar, calls of tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.serve.protocol.base import Name, Shape, Text

MAX_TOOLS = 128


class PlainText(Shape):
    type: Literal["text"]


class JsonObject(Shape):
    type: Literal["json_object"]


class JsonSchema(Shape):
    name: Name
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Shape):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchemaFormat, Field(discriminator="type")]


class Function(Shape):
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Shape):
    type: Literal["function"]
    function: Function


class FunctionName(Shape):
    name: Name


class NamedTool(Shape):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class Form(Shape):
    """The whole answer has this form; the last two are extensions."""

    response_format: ResponseFormat | None = None
    regex: Text | None = None
    grammar: Text | None = None


class Constraints(Form):
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool of another API in this one's shape."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
