"""Fields that switch reasoning on and off. They are honoured where the model's chat template has a switch for it;
elsewhere they are hints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from twostroke.serve.fates import Hint
from twostroke.serve.fields import OrEmpty, Payload, ShortText
from twostroke.serve.transport.errors import bad_request
from twostroke.text.chat import ARGUMENTS

SWITCHES = ("enable_thinking", "thinking")  # names that templates give to it


class ThinkingConfig(Payload):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Hint = None
    display: Hint = None

    @property
    def enabled(self) -> bool:
        return self.type != "disabled"


class ThinkingOption(NamedTuple):
    """What one field of a request says."""

    field: str
    effort: str | None = None  # "none": no reasoning
    enabled: bool | None = None

    def arguments(self, variables: Collection[str]) -> dict[str, Any]:
        """The arguments for a template that reads these variables; empty if it has no switch."""
        if self.effort is not None and "reasoning_effort" in variables:
            return {"reasoning_effort": self.effort}
        enabled = self.effort != "none" if self.enabled is None else self.enabled
        return next(({name: enabled} for name in SWITCHES if name in variables), {})


class ThinkingFields(Payload):
    """Switches of reasoning under the names that other servers gave them, on every route with a conversation."""

    reasoning_effort: ShortText | None = None
    thinking: OrEmpty[ThinkingConfig] = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[ShortText, Any] | None = None

    def thinking_options(self) -> list[ThinkingOption]:
        return [
            ThinkingOption("reasoning_effort", self.reasoning_effort),
            ThinkingOption("thinking", enabled=None if self.thinking is None else self.thinking.enabled),
            ThinkingOption("enable_thinking", enabled=self.enable_thinking),
        ]


class ThinkingHints(Payload):
    """The same fields where no chat template is used."""

    reasoning_effort: Hint = None
    thinking: Hint = None
    enable_thinking: Hint = None
    chat_template_kwargs: Hint = None


def template_arguments(
    variables: Collection[str], options: Collection[ThinkingOption], given: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], set[str]]:
    """The arguments of the template, and the fields that are hints. given: chat_template_kwargs, which come first."""
    arguments, all_options = dict(given or {}), list(options)
    for name in given or ():
        if name not in ARGUMENTS:
            raise bad_request(f"chat_template_kwargs: {name!r} may not be set.", "chat_template_kwargs")
        value = arguments[name]
        if name in SWITCHES and name not in variables and isinstance(value, bool):
            del arguments[name]
            all_options.append(ThinkingOption(f"chat_template_kwargs.{name}", enabled=value))
    hints = set()
    for option in all_options:
        if not option.effort and option.enabled is None:
            continue
        found = option.arguments(variables)
        if not found:
            hints.add(option.field)
        for name, value in found.items():
            arguments.setdefault(name, value)
    return arguments, hints
