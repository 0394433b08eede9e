"""What Triton's interpreter does again and again for nothing: more than a third of the time that tests of kernels take.

It looks through its whole language for what to replace whenever one kernel function calls another: within a launch once
is enough. It computes whether each sum and product of integers overflows, and without `debug` drops the answer.

And one thing that a GPU does: a number of a product has the same bits wherever it is in its tile, and whichever of the
two matrices is the first. OpenBLAS has that for some processors only. So products are added in 64 bits, and rounded
once.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import cache, partialmethod
from types import FunctionType
from typing import Any

import numpy as np

from tests import interpreter_types


def prepare() -> None:
    """When all kernels have been imported."""
    replace_once_a_launch()
    drop_what_is_not_asked()
    add_in_64_bits()
    interpreter_types.install()


class Kept:
    """Nothing was replaced, so nothing is to be put back."""

    def restore(self) -> None:
        pass


class Launch:
    """What a launch has replaced, in modules that count as done until it ends."""

    def __init__(self, scope: Any, done: set[int]):
        self.scope, self.done = scope, done

    def restore(self) -> None:
        self.scope.restore()
        self.done.clear()


def replace_once_a_launch() -> None:
    """Where Triton has been imported and works as it does in the versions we know; otherwise nothing changes."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    replace = getattr(interpreter, "_patch_lang", None)
    if replace is None:
        return
    language = sys.modules["triton.language"]
    done: set[int] = set()

    @cache
    def modules_of(function: FunctionType) -> set[int]:
        return {id(value) for value in function.__globals__.values() if value is language or value is language.core}

    def once(function: FunctionType) -> Any:
        modules = modules_of(function)
        if done and modules <= done:
            return Kept()
        outermost = not done
        scope = replace(function)
        done.update(modules)
        return Launch(scope, done) if outermost and scope is not None else scope

    interpreter._patch_lang = once  # type: ignore[union-attr]


def drop_what_is_not_asked() -> None:
    """Where Triton has been imported and works as it does in the versions we know; otherwise nothing changes."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and hasattr(options, "debug"):
        builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)  # type: ignore[union-attr]


def add_in_64_bits() -> None:
    """Where Triton has been imported and works as it does in the versions we know; otherwise nothing changes."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    builder = getattr(interpreter, "InterpreterBuilder", None)
    if hasattr(builder, "create_dot") and builder.create_dot.__module__ == interpreter.__name__:  # type: ignore[union-attr]
        builder.create_dot = partialmethod(dot, builder.create_dot, interpreter.TensorHandle)  # type: ignore[union-attr]


def dot(builder: Any, whole: Any, handle: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
    """whole: of products that it cannot make itself."""
    if a.data.dtype.kind != "f" or b.data.dtype.kind != "f" or d.data.dtype.kind != "f":
        return whole(builder, a, b, d, *how)
    found = np.matmul(a.data, b.data, dtype=np.float64) + d.data
    return handle(found.astype(d.data.dtype), d.dtype.scalar)
