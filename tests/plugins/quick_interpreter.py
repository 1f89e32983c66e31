"""Triton's interpreter with the same results in half the time.

The interpreter runs kernels through the compiler's front end, and most of its time goes into types: for every operation
it creates the result type, its name and the shapes again, although a kernel has few of them. It also computes every
integer sum twice, for an overflow check that is only reported in debug mode.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any


def quicken() -> None:
    """Apply all patches to the interpreter of this process."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # nothing reports overflows then
        builder.options = replace(builder.options, sanitize_overflow=False)
    _read_numbers_of_any_shape(interpreter)
    _patch_language_once(interpreter)
    _call_builtins_directly(interpreter)
    _remember_types(interpreter)
    _leave_alike_alone()
    _remember_operands()
    _multiply_bfloat16(interpreter)


def _read_numbers_of_any_shape(interpreter: Any) -> None:
    """A loop bound is an array with one number. Triton 3.6 converts it by `int`, which numpy refuses since 2.4."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


def _patch_language_once(interpreter: Any) -> None:
    """Patch the language at the launch of a kernel, not again at each call in it."""
    from triton import language as tl

    patch = interpreter._patch_lang

    @cache
    def languages_of(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def patch_once(function: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages_of(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _call_builtins_directly(interpreter: Any) -> None:
    """Call builtins directly with the one existing semantic object, and do not inspect the arrays of tensors again."""
    semantics = interpreter.interpreter_semantic

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantics
            return function(*args, **named)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr
    interpreter.TensorHandle.__post_init__ = lambda handle: None


def _remember_types(interpreter: Any) -> None:
    """Cache types and shapes: equal ones are the same object."""
    from triton.language import core

    describe_block = core.block_type.__init__
    described: dict[tuple[Any, ...], dict[str, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = (element_ty.name, *sizes)
        if key not in described:
            describe_block(self, element_ty, sizes)
            described[key] = dict(self.__dict__)
        self.__dict__.update(described[key])

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(prod(sizes))

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape.values) if type.is_block() else ())

    numpy_of: dict[str, Any] = {}
    find = interpreter._get_np_dtype

    def numpy_type(ty: Any) -> Any:
        if ty.name not in numpy_of:
            numpy_of[ty.name] = find(ty)
        return numpy_of[ty.name]

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = numpy_type


def _leave_alike_alone() -> None:
    """Return values that already have the wanted type or shape, by identity, before anything is compared."""
    from triton.language import core, semantic

    front = semantic.TritonSemantic
    broadcast, cast, equals, unwrap = (
        front.broadcast_impl_value,
        front.cast,
        core.dtype.__eq__,
        core._unwrap_if_constexpr,
    )
    sequences = (list, tuple, core.tuple)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def cast_if_it_must(self: Any, value: Any, to: Any, *rounding: Any, **named: Any) -> Any:
        return value if value.dtype is to.scalar else cast(self, value, to, *rounding, **named)

    def unwrap_if_constexpr(value: Any) -> Any:
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, sequences) else value

    front.broadcast_impl_value = broadcast_impl_value
    front.cast = cast_if_it_must
    core.dtype.__eq__ = lambda self, other: self is other or equals(self, other)
    core._unwrap_if_constexpr = unwrap_if_constexpr


def _remember_operands() -> None:
    """Cache the common type of two operands; operands with equal types need no conversion, and numbers are broadcast at
    once.
    """
    from triton.language import core, semantic

    front = semantic.TritonSemantic
    common_type, check = front.computation_type_impl, front.binary_op_type_checking_impl
    types: dict[tuple[Any, ...], Any] = {}
    numbers: dict[tuple[Any, ...], Any] = {}

    def computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, divides)
        if key not in types:
            types[key] = common_type(self, a, a_is_scalar, b, b_is_scalar, divides)
        return types[key]

    def operands(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        how = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if lhs.__class__ is not core.tensor or lhs.dtype.is_ptr() or not arithmetic_check:
            return check(self, lhs, rhs, *how)
        if rhs.__class__ is core.tensor and not div_or_mod and lhs.dtype is rhs.dtype and lhs.shape is rhs.shape:
            return lhs, rhs
        if rhs.__class__ is not int and (rhs.__class__ is not float or not rhs):  # 0.0 is -0.0
            return check(self, lhs, rhs, *how)
        key = (rhs.__class__, rhs, lhs.dtype.name, id(lhs.shape), div_or_mod)
        if key not in numbers:
            lhs, numbers[key] = check(self, lhs, rhs, *how)
        return self.cast(lhs, numbers[key].dtype), numbers[key]

    front.computation_type_impl = computation_type
    front.binary_op_type_checking_impl = operands


def _multiply_bfloat16(interpreter: Any) -> None:
    """Multiply bfloat16 matrices, whose bits the interpreter would multiply as integers (Triton 3.6 to 3.9)."""
    from triton import language as tl

    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return plain(builder, *(_in_float32(interpreter, tl, x) for x in (a, b)), d, *options)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _in_float32(interpreter: Any, tl: Any, x: Any) -> Any:
    if x.dtype.scalar is not tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype("uint32") << 16).view("float32"), tl.float32)
