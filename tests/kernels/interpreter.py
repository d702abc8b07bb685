"""Triton's interpreter, made faster: it leaves out what it repeats, and what it throws away.

Its products of bfloat16, and its rounding to it, are made right, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def _languages(function: Callable[..., Any]) -> frozenset[str]:
    """The modules of Triton's language that a kernel sees."""
    return frozenset(
        module.__name__
        for value in function.__globals__.values()
        for module in (tl, tl.core)
        if value is module
    )


@functools.cache
def hasten_interpreter() -> None:
    """Replace the parts of Triton's interpreter that take longest, once in this process."""
    _replace_language_once_a_launch()
    _keep_numpy_types()
    _keep_shapes()
    _multiply_bfloat16()
    _round_bfloat16()
    # Half of all steps: a check of each sum of integers, whose finding only debug mode looks at.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _keep_numpy_types() -> None:
    """Fill the table of NumPy's types once, not at each step."""
    find = interpreter._get_np_dtype
    find_once = functools.cache(find)

    def numpy_type(dtype: Any) -> Any:
        scalar = dtype.scalar
        return find(scalar) if isinstance(scalar, tl.pointer_type) else find_once(scalar)

    interpreter._get_np_dtype = numpy_type


def _keep_shapes() -> None:
    """Make what tells of a shape once for each shape, and the type of a tuple when it is asked for.

    They took a third of all the time.
    """
    begin_type = tl.block_type.__init__

    @functools.cache
    def described(*sizes: int) -> tuple[Any, Any]:
        """A type of this shape, and the shape of its tensors."""
        found = object.__new__(tl.block_type)
        begin_type(found, tl.int32, list(sizes))
        return found, tl.tuple([tl.constexpr(size) for size in sizes])

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        known, _ = described(*tl.core._unwrap_shape(shape))
        self.element_ty, self.shape, self.numel = element_ty, known.shape, known.numel
        self.name = f"<{known.shape}, {element_ty}>"

    scalar = tl.tuple([]), tl.constexpr(1)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = scalar
        if type.is_block():
            self.shape, self.numel = described(*type.shape)[1], tl.constexpr(type.numel)

    def init_tuple(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, tl.tuple_type) else tl.tuple_type(type)

    def tuple_type(self: Any) -> Any:
        given = vars(self)
        if "type" not in given:
            given["type"] = tl.core._type_for_tuple_values(self.values)
        return given["type"]

    def set_tuple_type(self: Any, type: Any) -> None:
        vars(self)["type"] = type

    tl.block_type.__init__ = init_type
    tl.tensor.__init__ = init_tensor
    tl.tuple.__init__, tl.tuple.type = init_tuple, property(tuple_type, set_tuple_type)


def _multiply_bfloat16() -> None:
    """Multiply matrices of bfloat16 as numbers; the interpreter would multiply their bits."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        numbers = interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(numbers.view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _round_bfloat16() -> None:
    """Round fp32 to the nearest bfloat16, as GPUs do; the interpreter would cut bits off."""
    convert = interpreter._convert_float

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        half = source == tl.float32 and target == tl.bfloat16
        if not half or mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return convert(x, source, target, mode)
        bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # ties to even
        # A NaN stays one, whatever bits are left of it.
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(nan, bits >> 16 | 0x40, nearest).astype(np.uint16).reshape(x.shape)

    interpreter._convert_float = rounded


def _replace_language_once_a_launch() -> None:
    """Leave out what each device function repeats when a kernel calls it, ``tl.sum`` among them.

    It searches all of ``triton.language`` for functions of the compiler, which its kernel's launch
    has replaced already.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[frozenset[str]] = set()

    def replace_once(function: Callable[..., Any]) -> Any:
        languages = _languages(function)
        if languages in replaced:
            return interpreter._LangPatchScope()
        replaced.add(languages)
        return patch(function)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            replaced.clear()

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_afresh
