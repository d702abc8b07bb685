"""Triton's interpreter, made faster: ``triton.language`` is replaced once a launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
def replace_language_once_a_launch() -> None:
    """Leave out what each device function repeats when a kernel calls it, ``tl.sum`` among them.

    It searches all of ``triton.language`` for functions of the compiler, which its kernel's launch
    has replaced already.
    """
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[frozenset[str]] = set()

    def replace_once(function: Callable[..., Any]) -> Any:
        languages = _languages(function)
        if languages in replaced:
            return interpreter._LangPatchScope()
        replaced.add(languages)
        return replace(function)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            replaced.clear()

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_afresh
