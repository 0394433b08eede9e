"""The filters and tests a chat template may use, each charged for before it runs.

An allow list: what chat templates in the wild use, and nothing that multiplies its input without a way to foresee by
how much. Lazy filters are made eager, so that their cost is paid where they stand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sized
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.tests import TESTS
from markupsafe import escape

from twostroke.text.budget import NODE_BYTES, Budget, BudgetError, weigh

_FREE = ("length", "count", "first", "last", "default", "d")
_SHALLOW = ("items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
_DEEP = (
    "abs", "capitalize", "dictsort", "float", "groupby", "int", "lower", "max", "min", "sort", "string", "trim",
    "truncate", "unique", "upper",
)  # fmt: skip
_COMPARING = ("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge",
              ">=", "in")  # fmt: skip
_WIDTH = re.compile(r"\d{4}|\*|\{[^{}]*\{")  # a width of thousands, or one taken from an argument


def allowed_filters(budget: Budget) -> dict[str, Callable[..., Any]]:
    """Name to function, as jinja wants them, with the budget built in."""
    jinja: dict[str, Any] = FILTERS
    charged = {name: _charged(budget, jinja[name], lambda value: 0) for name in _FREE}
    charged |= {name: _charged(budget, jinja[name], _length) for name in _SHALLOW}
    charged |= {name: _charged(budget, jinja[name], weigh) for name in _DEEP}
    charged["title"] = _charged(budget, jinja["title"], lambda value: 32 * weigh(value))  # slow
    written = _Written(budget)
    return charged | {
        "tojson": written.tojson, "replace": written.replace, "indent": written.indent, "join": written.join,
        "format": written.format, "round": written.round, "sum": written.sum, "safe": written.safe,
        "escape": written.escape, "e": written.escape,
    }  # fmt: skip


def allowed_tests(budget: Budget) -> dict[str, Callable[..., Any]]:
    """Jinja's tests; those that compare pay for what they compare."""
    jinja: dict[str, Any] = TESTS
    return jinja | {name: _charged(budget, jinja[name], lambda value: weigh(value) >> 3) for name in _COMPARING}


def _length(value: object) -> int:
    return NODE_BYTES * len(value) if isinstance(value, Sized) else NODE_BYTES


def _charged(budget: Budget, function: Callable[..., Any], cost: Callable[[object], int]) -> Callable[..., Any]:
    inner = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja's own first argument is nobody's data

    @wraps(function)  # keeps that mark
    def call(*args: Any, **kwargs: Any) -> Any:
        budget.charge(NODE_BYTES + sum(map(cost, args[inner:])) + sum(map(cost, kwargs.values())))
        result = function(*args, **kwargs)
        return budget.collect(result) if isinstance(result, Iterator) else result

    return call


def check_format(text: str) -> None:
    """A format string may not choose a width of thousands: '%999999999d' is short to write and long to make."""
    if _WIDTH.search(text):
        raise BudgetError("it formats text with a width no honest template needs")


def replaced_size(text: str, old: str, new: str) -> int:
    """How large text.replace(old, new) becomes, at four bytes a character."""
    return 4 * (len(text) + text.count(old) * len(new))


class _Written:
    """Filters written here, because their cost has to be foreseen from their arguments."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Plain JSON, without the HTML escapes of jinja's own filter: this is what templates were tested with."""
        width = len(indent) if isinstance(indent, str) else indent or 0
        if not 0 <= width <= 16 or (separators is not None and sum(map(len, separators)) > 16):
            raise BudgetError("it writes JSON with more padding than any honest template")
        self._budget.charge(weigh(value))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        self._budget.charge(weigh((value, old, new)))
        text, old, new = str(value), str(old), str(new)
        self._budget.charge(replaced_size(text, old, new))
        return text.replace(old, new, -1 if count is None else count)

    def indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        self._budget.charge(weigh((value, width)))
        text = str(value)
        space = len(width) if isinstance(width, str) else int(width)
        self._budget.charge(4 * (len(text) + space * (text.count("\n") + 2)))
        return str(FILTERS["indent"](text, width, first, blank))

    def join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        items = self._budget.collect(iter(value))
        self._budget.charge(weigh(items) + len(items) * weigh(d))
        if attribute is not None:
            items = [item.get(attribute, "") if isinstance(item, dict) else "" for item in items]
        return str(d).join(map(str, items))

    def format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        self._budget.charge(weigh((value, args, kwargs)))
        check_format(str(value))
        return str(value) % (kwargs or args)

    def round(self, value: Any, precision: int = 0, method: str = "common") -> float:
        if not -100 <= precision <= 100:
            raise BudgetError("it rounds to more places than a number has")
        return float(FILTERS["round"](value, precision, method))

    def sum(self, value: Any, attribute: Any = None, start: Any = 0) -> Any:
        items = self._budget.collect(iter(value))
        if attribute is not None:
            items = [item.get(attribute, 0) if isinstance(item, dict) else 0 for item in items]
        numbers = [item for item in items if isinstance(item, (int, float))]
        if len(numbers) < len(items) or not isinstance(start, (int, float)):
            raise SecurityError("sum adds numbers only")
        return sum(numbers, start)

    def escape(self, value: Any) -> str:
        self._budget.charge(5 * weigh(value))
        return str(escape(str(value)))

    def safe(self, value: Any) -> str:
        self._budget.charge(weigh(value))
        return str(value)
