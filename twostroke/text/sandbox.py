"""A jinja environment in which a template can neither reach Python nor outrun its budget.

Jinja's immutable sandbox keeps templates from attributes and mutation, but lets them loop and multiply for ever. Here
the generated code itself is metered: every block looks at the clock when entered, every operator, call, comparison
and printed value is charged by size first. So a bad template ends with an exception in its own thread, and there is
nothing left to kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import BuiltinMethodType, CodeType, MethodType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_context

from twostroke.text.budget import MAX_INT_BITS, NODE_BYTES, Budget, BudgetError, weigh
from twostroke.text.filters import allowed_filters, allowed_tests, check_format, replaced_size

_STR_METHODS = frozenset(
    ("capitalize", "casefold", "center", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
     "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "ljust", "lower",
     "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition",
     "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill")
)  # fmt: skip
_DICT_METHODS = frozenset({"get", "items", "keys", "values", "copy"})
_LIST_METHODS = frozenset({"index", "count", "copy"})
_LOOP_METHODS = frozenset({"cycle", "changed"})


class _Metered(CodeGenerator):
    """Jinja's compiler, writing a charge before whatever costs."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        body = list(nodes)
        self.writeline(f"environment.enter({_static_size(body)})")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        if node.test is not None:  # a filtered loop may reject a million items without entering its body
            enter = nodes.Call(nodes.EnvironmentAttribute("enter"), [nodes.Const(0)], [], None, None)
            node.test = nodes.And(enter, node.test)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(")
        self._seen(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        words = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "notin": "not in"}
        self.write(f" {words.get(node.op, node.op)} ")
        self._seen(node.expr, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            return super().visit_Getitem(node, frame)
        self._seen(node.node, frame, "environment.sliced")  # slices bypass the environment's getitem
        self.write("[")
        self.visit(node.arg, frame)
        self.write("]")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx != "load":
            return super().visit_Tuple(node, frame)
        self.write("environment.seen(")  # tuples can be keys, and hashing a nested one walks all of it
        super().visit_Tuple(node, frame)
        self.write(")")

    def _seen(self, node: nodes.Node, frame: Frame, through: str = "environment.seen") -> None:
        self.write(f"{through}(")
        self.visit(node, frame)
        self.write(")")


def _static_size(body: list[nodes.Node]) -> int:
    """The literal text a block prints each time it is entered, nested blocks not counted: they count themselves."""
    data = (part for node in body if isinstance(node, nodes.Output) for part in node.nodes)
    return sum(4 * len(part.data) for part in data if isinstance(part, nodes.TemplateData))


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; rendering only sees what is inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace without two holes: names jinja itself looks for, and a repr that writes out a graph."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` too must be free as a name
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_") or name in ("jinja_pass_arg", "unsafe_callable"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering at a time, which is whose budget it spends."""

    code_generator_class = _Metered
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, budget: Budget, functions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding constants would run them while compiling, outside the budget
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.budget = budget
        self.filters: dict[str, Any] = allowed_filters(budget)
        self.tests: dict[str, Any] = allowed_tests(budget)
        self.globals = {"range": safe_range, "dict": self._dict, "namespace": _Namespace, **functions}
        self._functions = tuple(self.globals.values())
        self.finalize = self._printed

    def compile_template(self, source: str) -> CodeType:
        tree = self.parse(source)
        loading: Any = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
        if next(tree.find_all(loading), None) is not None:
            raise SecurityError("a template may not load another file")
        return self.compile(tree)

    def variables_read(self, source: str) -> frozenset[str]:
        return frozenset(name.name for name in self.parse(source).find_all(nodes.Name) if name.ctx == "load")

    # What the metered code calls.

    def enter(self, static: int) -> bool:
        self.budget.charge(static)
        return True

    def seen(self, value: Any) -> Any:
        self.budget.read(value)
        return value

    def sliced(self, value: Any) -> Any:
        self.budget.charge(_flat(value))
        return value

    def joined(self, parts: tuple[Any, ...]) -> str:
        self.budget.charge(weigh(parts))
        return "".join(map(str, parts))

    @pass_context  # which also keeps jinja from evaluating constants while compiling
    def _printed(self, context: Context, value: Any) -> Any:
        self.budget.charge(weigh(value))
        return value

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        self.budget.charge(sum(map(_flat, args)))
        return dict(*args, **kwargs)

    # What jinja's sandbox calls.

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            self.budget.read(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.charge(_binop_cost(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        return None if formatted is None else _Format(self.budget, value.__self__, formatted)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        self, function = __self, __obj
        self.budget.charge(NODE_BYTES * (1 + len(args)))
        if not self._may_call(function, args) and not isinstance(function, Undefined):
            raise SecurityError(f"calling a {type(function).__name__} is not allowed")
        return super().call(__context, __obj, *args, **kwargs)

    def _may_call(self, function: Any, args: tuple[Any, ...]) -> bool:
        if isinstance(function, (Macro, LoopContext, BlockReference, _Format)):
            return True
        if any(function is known for known in self._functions) or function == self.enter:
            return True
        if not isinstance(function, (BuiltinMethodType, MethodType)):
            return False
        return self._may_call_method(function.__self__, function.__name__, args)

    def _may_call_method(self, owner: object, name: str, args: tuple[Any, ...]) -> bool:
        if isinstance(owner, str) and name in _STR_METHODS:
            self.budget.charge(_str_cost(owner, name, args))
            return True
        if isinstance(owner, (list, tuple)) and name in _LIST_METHODS:
            self.budget.read((owner, args))
            return True
        if isinstance(owner, LoopContext) and name in _LOOP_METHODS:
            self.budget.read(args)  # changed() compares
            return True
        if isinstance(owner, dict) and name in _DICT_METHODS:
            self.budget.charge(_flat(owner) if name == "copy" else 0)
            return True
        return False


class _Format:
    """str.format behind a check of its widths."""

    def __init__(self, budget: Budget, text: str, formatted: Callable[..., str]) -> None:
        self._budget, self._text, self._formatted = budget, text, formatted

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self._budget.charge(weigh((self._text, args, kwargs)) * (1 + self._text.count("{")))
        check_format(self._text)
        return self._formatted(*args, **kwargs)


def _flat(value: object) -> int:
    """The cost of copying a value's outermost level."""
    if isinstance(value, str):
        return weigh(value)
    return NODE_BYTES * (1 + len(value)) if isinstance(value, (list, tuple, Mapping)) else NODE_BYTES


def _binop_cost(operator: str, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _int_cost(operator, left, right)
    if operator == "*":
        times, value = (left, right) if isinstance(left, int) else (right, left)
        each = 4 * len(value) if isinstance(value, str) else _flat(value)
        return each * max(times, 1) if isinstance(times, int) else NODE_BYTES
    if operator == "%" and isinstance(left, str):
        check_format(left)
        return weigh((left, right)) * (1 + left.count("%"))
    return _flat(left) + _flat(right)


def _int_cost(operator: str, left: int, right: int) -> int:
    """Numbers stay small: a square of a square of a square fills memory too."""
    bits = max(left.bit_length(), right.bit_length())
    if operator == "*":
        bits = left.bit_length() + right.bit_length()
    elif operator == "**":
        bits = left.bit_length() * max(right, 0)
    if bits > MAX_INT_BITS:
        raise BudgetError("it computes with a number longer than any honest template")
    return NODE_BYTES


def _str_cost(text: str, name: str, args: tuple[Any, ...]) -> int:
    """What a string method reads and makes; searching from the right and stripping are quadratic at worst."""
    cost = weigh((text, args)) + len(text) * max((len(arg) for arg in args if isinstance(arg, str)), default=0) // 16
    if name == "join" and args and isinstance(args[0], (list, tuple)):
        return cost + len(args[0]) * weigh(text)
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        return cost + replaced_size(text, args[0], args[1])
    if name in ("split", "rsplit", "splitlines"):
        by = args[0] if args and isinstance(args[0], str) and args[0] else None
        return cost + NODE_BYTES * (text.count(by) if by else len(text) // 4)
    if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        return cost + 4 * max(args[0], 0)
    return cost
