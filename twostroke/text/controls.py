"""Control tokens that the chat template wrote, told apart from the same characters in a message.

Only the template may write control tokens. Its constants are compiled with an alias for each control token, a text with
a secret number that no client knows. After rendering, an alias is a control token, and "<|im_end|>" is plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

DIGITS = 24  # of a secret number


class Controls:
    """The control tokens of one vocabulary by their texts. The same `texts` and `secret` give the same aliases."""

    def __init__(self, texts: Sequence[str] = (), secret: str = "") -> None:
        self.texts = tuple(texts)
        self.secret = secret or _number()
        self._mark = _number()  # put into the text of a token that a message spells
        self._aliases = {text: f"{self.secret}x{index}x" for index, text in enumerate(self.texts)}
        self._token = any_of(self.texts)
        self._alias = re.compile(self.secret + r"x(\d+)x")

    def alias(self, text: str) -> str:
        return self._aliases[text]

    def hide(self, text: str) -> str:
        """Every control token as its alias."""
        return self._token.sub(lambda found: self._aliases[found[0]], text)

    def show(self, text: str) -> str:
        """Every alias as the text of its token."""
        return self._alias.sub(lambda found: self.texts[int(found[1])], text)

    def spelled(self, text: str) -> set[str]:
        """The control tokens that the text has as plain characters."""
        return set(self._token.findall(text))

    def composed(self, text: str, words: Iterable[str]) -> set[str]:
        """The spelled tokens that have one of these words: a template may have put them together from parts, such
        as "<|" + role + "|>"."""
        known = [word.lower() for word in words]
        return {token for token in self.spelled(text) if any(word in token.lower() for word in known)}

    def mark(self, value: Any, tokens: set[str]) -> Any:
        """A copy of messages or tools in which these tokens are marked. Roles are left as they are."""
        pattern = any_of(tokens)
        return _map_texts(value, lambda text: pattern.sub(lambda found: found[0][:1] + self._mark + found[0][1:], text))

    def hide_composed(self, text: str, tokens: set[str]) -> str:
        """The text with these tokens as aliases, except where they are marked. The marks are removed."""
        return any_of(tokens).sub(lambda found: self._aliases[found[0]], text).replace(self._mark, "")


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of these texts. Its time for one place does not grow with their number."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_branches(tree) if tree else r"(?!)")


def _branches(node: dict[str, Any]) -> str:
    chain = ""
    while len(node) == 1 and "" not in node:  # a common prefix
        ((char, node),) = node.items()
        chain += re.escape(char)
    below = [re.escape(char) + _branches(inner) for char, inner in node.items() if char]
    if not below:
        return chain
    return f"{chain}(?:{'|'.join(below)}){'?' if '' in node else ''}"


def _number() -> str:
    """Digits survive what templates do with text: upper case, JSON, escapes."""
    return "".join(secrets.choice("0123456789") for _ in range(DIGITS))


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): item if key == "role" else _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, list) else value
