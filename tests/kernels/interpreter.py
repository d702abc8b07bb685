"""Triton's interpreter, made faster: it leaves out what it repeats, and what it throws away.

Its products of bfloat16 are made right, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    _multiply_bfloat16()
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
