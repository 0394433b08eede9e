"""What Triton's interpreter makes anew for every tensor and need not: types, shapes and the calls that lead to them.

Every kernel computes what it computed before. A replacement is written from the text of the function that it replaces:
where Triton has another text, everything stays as it is.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from functools import cached_property
from typing import Any

Replaced = list[tuple[Any, str, Any]]  # what has it, its name, the value

MISSING = object()
KNOWN = {"d9725874aa425084": "3.9.0"}  # a digest of the texts that are replaced, and the version that has them
originals: Replaced = []  # what install() has replaced


def of_shapes(core: Any) -> Replaced:
    """Each shape is made once: for types (sizes) and for tensors (constants), with the number of elements of both."""
    block_type, constexpr, dtype, make = core.block_type, core.constexpr, core.dtype, core.block_type.__init__
    by_sizes: dict[tuple[int, ...], tuple[Any, ...]] = {}
    by_identity: dict[int, tuple[Any, ...]] = {}  # of a type's shape, which by_sizes keeps alive
    blocks: dict[tuple[int, str], Any] = {}  # types, by the identity of the shape and the name of the element
    none, one = core.tuple([]), constexpr(1)

    def made(self: Any, element_ty: Any, shape: Any) -> tuple[Any, ...]:
        make(self, element_ty, shape)  # this refuses what is no shape
        parts = core.tuple([constexpr(size) for size in self.shape])
        return self.shape, self.numel, parts, constexpr(self.numel)

    def set_type(self: Any, element_ty: Any, shape: Any) -> None:
        known = by_identity.get(id(shape))
        if known is None:
            sizes = tuple([size.value if type(size) is constexpr else size for size in shape])
            if type(shape) not in (list, core.tuple) or any(type(size) is not int for size in sizes):
                return make(self, element_ty, shape)
            if sizes not in by_sizes:
                known = by_sizes[sizes] = made(self, element_ty, shape)
                by_identity[id(self.shape)] = known
            known = by_sizes[sizes]
        self.element_ty, self.shape, self.numel = element_ty, known[0], known[1]
        return None

    def set_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        if not kind.is_block():
            self.shape, self.numel = none, one
            return
        known = by_identity.get(id(kind.shape))
        if known is not None:
            self.shape, self.numel = known[2], known[3]
        else:
            self.shape, self.numel = core.tuple([constexpr(size) for size in kind.shape]), constexpr(kind.numel)

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        if type(scalar_ty) is not dtype or id(self.shape) not in by_identity:
            return block_type(scalar_ty, self.shape)
        key = id(self.shape), scalar_ty.name
        if key not in blocks:
            blocks[key] = block_type(scalar_ty, self.shape)
        return blocks[key]

    name = cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    name.__set_name__(block_type, "name")
    return [
        (block_type, "__init__", set_type),
        (block_type, "name", name),
        (block_type, "with_element_ty", with_element_ty),
        (core.tensor, "__init__", set_tensor),
    ]


def of_types(interpreter: Any, core: Any) -> Replaced:
    """Answers that depend on types only are kept."""
    constexpr, dtype, block_type = core.constexpr, core.dtype, core.block_type
    unwrap, np_dtype, to_ir = core._unwrap_if_constexpr, interpreter._get_np_dtype, block_type.to_ir
    computation_type = interpreter.TritonSemantic.computation_type_impl
    plain = {int, float, bool, str, type(None), dtype, block_type, core.pointer_type, core.tensor}
    np_dtypes: dict[str, Any] = {}
    computation_types: dict[Any, Any] = {}

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        return o if kind in plain else o.value if kind is constexpr else unwrap(o)

    def equal(self: Any, other: Any) -> bool:
        other = unwrapped(other)
        return self is other or (isinstance(other, dtype) and self.name == other.name)

    def known_np_dtype(tt_dtype: Any) -> Any:
        element = tt_dtype.element_ty if type(tt_dtype) is block_type else tt_dtype
        if type(element) is not dtype:
            return np_dtype(tt_dtype)
        if element.name not in np_dtypes:
            np_dtypes[element.name] = np_dtype(element)
        return np_dtypes[element.name]

    def known_computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, divides
        if key not in computation_types:
            computation_types[key] = computation_type(self, a, a_is_scalar, b, b_is_scalar, divides)
        return computation_types[key]

    def same(self: Any, builder: Any) -> Any:
        """For the interpreter a type of plain elements stands for itself."""
        itself = builder is interpreter.interpreter_builder and type(self.element_ty) is dtype
        return self if itself else to_ir(self, builder)

    return [
        (core, "_unwrap_if_constexpr", unwrapped),
        (dtype, "__eq__", equal),
        (block_type, "to_ir", same),
        (interpreter, "_get_np_dtype", known_np_dtype),
        (interpreter.TritonSemantic, "computation_type_impl", known_computation_type),
    ]


def of_calls(interpreter: Any, core: Any) -> Replaced:
    """The short way for tensors of one shape, for a tensor and a number, and to what a kernel calls."""
    builder, semantic = interpreter.InterpreterBuilder, interpreter.TritonSemantic
    broadcast, full, checked = semantic.broadcast_impl_value, interpreter.np.full, core.add.__code__

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not left.is_block():
            if right.is_block():
                rhs, lhs = broadcasted(self, rhs, lhs)
        elif not right.is_block():
            block = left.with_element_ty(right.scalar)
            rhs = self.make_tensor(self.builder.create_splat(block, rhs.handle), block)
        elif left.shape is not right.shape:
            return broadcast(self, lhs, rhs)
        return lhs, rhs

    def splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        value = arg.data[0] if isinstance(arg.dtype, core.block_type) else arg.data
        data = full(ret_ty.shape.values, value, dtype=interpreter._get_np_dtype(arg.dtype))
        return interpreter.TensorHandle(data, arg.dtype.scalar)

    def patch(obj: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        call, semantic = member, interpreter.interpreter_semantic
        if getattr(member, "__code__", None) is checked:  # what builtin() makes: it asks for `_semantic` only
            call = member.__wrapped__

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return call(*args, **kwargs)

        scope.set_attr(obj, name, called)

    return [
        (semantic, "broadcast_impl_value", broadcasted),
        (builder, "create_splat", splat),
        (interpreter, "_patch_attr", patch),
    ]


def replacements() -> Replaced:
    """Nothing where Triton has not been imported, or is of another version."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return []
    core = sys.modules["triton.language"].core
    found = [*of_shapes(core), *of_types(interpreter, core), *of_calls(interpreter, core)]
    return found if digest(core, found) in KNOWN else []


def digest(core: Any, found: Replaced) -> str:
    texts = [inspect.getsource(core.builtin)]
    for place, name, _ in found:
        value = vars(place).get(name)
        texts.append(inspect.getsource(value) if callable(value) else "")
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def install() -> None:
    originals.extend(put(replacements()))


def put(values: Replaced) -> Replaced:
    """Set these values, and return those that were there."""
    before = [(place, name, vars(place).get(name, MISSING)) for place, name, _ in values]
    for place, name, value in values:
        if value is MISSING:
            delattr(place, name)
        else:
            setattr(place, name, value)
    return before
