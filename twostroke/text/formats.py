"""The formats in which models write tool calls and reasoning: one table, known from the models' chat templates.

`parse.py` reads calls by it, `grammar/tools.py` forces them by it, `generic_tools.py` describes them by it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from twostroke.record import Record, replace


class Tags(NamedTuple):
    """A call whose name and arguments stand between tags, each argument by itself."""

    name: tuple[str, str]  # before and after the name; ("", ""): it ends at white space or at a tag
    key: tuple[str, str]  # before and after the name of an argument
    values: tuple[tuple[str, bool | None], ...]  # before a value; whether it is a string, None: its schema says it
    value_end: str
    close: str  # after the last argument, before the mark that ends the call; "" if there is none
    argument: str  # how an argument is written: {key}, {open}, {value}
    lines: bool = False  # a value stands on lines of its own


class ToolFormat(Record):
    """How a family of models writes calls.

    A call stands between two marks. It is a JSON object with a name and arguments; or a head with the name and then the
    arguments as a JSON object (`head`); or tags (`tags`); or a message of its own (`channels`).
    """

    family: str
    begin: str  # the mark before a call; often a single token
    end: str = ""  # the mark after it, "" if there is none
    arguments: str = "arguments"  # the key of the arguments
    bare: bool = False  # the mark may be missing: an answer that starts with such an object is a call
    listed: bool = False  # after the mark comes a list of objects
    section: tuple[str, str] = ("", "")  # marks around all calls of an answer
    head: str = ""  # a pattern of what stands between `begin` and the arguments, with the group `name`
    lead: str = "\n"  # what is written between `begin` and the arguments; {name} is the name
    tail: str = "\n"  # what is written between the arguments and `end`
    between: str = "\n"  # what is written between two calls
    tags: Tags | None = None
    inner: tuple[str, ...] = ()  # further marks inside a call
    channels: bool = False  # the answer is a series of messages in channels (Harmony)
    text_arguments: bool = False  # its chat template joins the arguments of earlier calls as text
    calls_alone: bool = False  # its chat template writes the calls of a message or its content, not both

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be single tokens."""
        found = (*self.section, self.begin, self.end, *self.inner, *(HARMONY_MARKS if self.channels else ()))
        return tuple(dict.fromkeys(mark for mark in found if mark))


_NAME = r"(?P<name>[a-zA-Z0-9_-]{1,64})"
_SEP = "<｜tool▁sep｜>"
_FENCE = "```"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", *HARMONY_ENDS)

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
GENERIC = replace(HERMES, family="generic")  # for templates without a form of their own: text/generic_tools.py
LLAMA = ToolFormat("llama", "<|python_tag|>", arguments="parameters", bare=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", listed=True)
MISTRAL_ARGS = ToolFormat(
    "mistral-args", "[TOOL_CALLS]", head=_NAME + r"\s*(\[CALL_ID\]\s*\w{1,64}\s*)?\[ARGS\]\s*", lead="{name}[ARGS]",
    tail="", between="", inner=("[ARGS]", "[CALL_ID]"),
)  # fmt: skip
DEEPSEEK_V31 = ToolFormat(
    "deepseek-v3.1", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", inner=(_SEP,),
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    head=rf"(function\s*{_SEP}\s*{_NAME}|(?P<first>[a-zA-Z0-9_-]{{1,64}})\s*{_SEP})\s*({_FENCE}(json)?\s*)?",
    lead="{name}" + _SEP, tail="", between="", text_arguments=True,
)  # fmt: skip
DEEPSEEK = replace(  # V3 and R1; their heads are read in both forms
    DEEPSEEK_V31, family="deepseek", lead=f"function{_SEP}{{name}}\n{_FENCE}json\n", tail=f"\n{_FENCE}", between="\n",
    calls_alone=True,
)  # fmt: skip
KIMI = ToolFormat(
    "kimi", "<|tool_call_begin|>", "<|tool_call_end|>", inner=("<|tool_call_argument_begin|>",),
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    head=rf"\s*(functions\.)?{_NAME}(:\d{{1,6}})?\s*<\|tool_call_argument_begin\|>\s*",
    lead="functions.{name}:0<|tool_call_argument_begin|>", tail="", between="",
)  # fmt: skip
QWEN_XML = ToolFormat(
    "qwen-xml", "<tool_call>", "</tool_call>", lead="\n<function={name}>\n", tail="</function>\n",
    tags=Tags(("<function=", ">"), ("<parameter=", ">"), (("", None),), "</parameter>", "</function>",
              "<parameter={key}>\n{value}\n</parameter>\n", lines=True),
)  # fmt: skip
GLM = ToolFormat(
    "glm", "<tool_call>", "</tool_call>", lead="{name}\n", tail="",
    tags=Tags(("", ""), ("<arg_key>", "</arg_key>"), (("<arg_value>", None),), "</arg_value>", "",
              "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"),
)  # fmt: skip
DSML = ToolFormat(
    "dsml", "<｜DSML｜invoke", "</｜DSML｜invoke>", section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    lead=' name="{name}">\n', tail="", inner=("｜DSML｜",),
    tags=Tags((' name="', '">'), ('<｜DSML｜parameter name="', '"'),
              ((' string="true">', True), (' string="false">', False)), "</｜DSML｜parameter>", "",
              '<｜DSML｜parameter name="{key}"{open}{value}</｜DSML｜parameter>\n'),
)  # fmt: skip
DSML_V32 = replace(DSML, family="dsml-v3.2", section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"))
HARMONY = ToolFormat("harmony", "<|channel|>", channels=True)


def tool_format(template_source: str | None) -> ToolFormat | None:
    """How a model with this chat template writes calls. None: it has no tools, or a format that is not read here:
    `GENERIC` is used then."""
    source = template_source or ""
    if "<|channel|>" in source and "<|message|>" in source:
        return HARMONY
    if "｜DSML｜" in source:
        return DSML_V32 if "function_calls>" in source else DSML
    if KIMI.begin in source:
        return KIMI
    if DEEPSEEK.begin in source:
        form = DEEPSEEK if f"{_FENCE}json" in source else DEEPSEEK_V31
        as_json = re.search(r"arguments['\"]?\]?\s*\|\s*tojson", source)
        return replace(form, text_arguments=False) if as_json else form
    if HERMES.begin in source:  # the same mark around tags, or around JSON
        return QWEN_XML if "<function=" in source else GLM if "<arg_key>" in source else HERMES
    if MISTRAL.begin in source:
        return MISTRAL_ARGS if "[ARGS]" in source else MISTRAL
    if LLAMA.begin in source or re.search(r'"name": [^\n]{0,40}"parameters":', source):
        return LLAMA
    return None


def has_reasoning(template_source: str | None) -> bool:
    """Whether a model with this chat template writes its reasoning between <think> and </think>."""
    return "</think>" in (template_source or "")
