"""Make SparseK the first choice of xFormers' own dispatch, and take that back.

xFormers has no registration: :func:`install` wraps the two functions that decide, and
:func:`uninstall` puts the very objects back.  Calls that SparseK does not support, and calls that
name an operator, go where they went.  Tensor biases and dropout, which no SparseK kernel takes,
reach SparseK only when xFormers has nothing for them (as on a CPU).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import RLock
from types import ModuleType
from typing import Any

from sparsek_backend.xformers_op.compat import Inputs, dispatch_module, fmha_module
from sparsek_backend.xformers_op.op import BwOp, FwOp, runs_kernels

logger = logging.getLogger(__name__)

_lock = RLock()
_holders: set[Installation] = set()
_patches: list[_Patch] = []


class _Patch:
    """One replaced function of a module."""

    def __init__(
        self, module: ModuleType, name: str, wrap: Callable[[Callable[..., Any]], Any]
    ) -> None:
        self.module, self.name = module, name
        self.original = getattr(module, name)
        self.active = True
        inner = wrap(self.original)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (inner if self.active else self.original)(*args, **kwargs)

        self.replacement = replacement
        setattr(module, name, replacement)

    def undo(self) -> None:
        """Restore the original; behind somebody else's later wrapper, only step aside."""
        self.active = False
        if getattr(self.module, self.name) is self.replacement:
            setattr(self.module, self.name, self.original)
        else:
            logger.warning(
                "%s.%s was replaced after SparseK's install(): SparseK steps aside in place",
                self.module.__name__,
                self.name,
            )


def _prefers(inp: Inputs) -> bool:
    """Whether SparseK's kernels should come first for these inputs."""
    return FwOp.supports(inp) and runs_kernels(inp)


def _wrap_forward(original: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    def priority_list(inp: Inputs, needs_gradient: bool) -> list[Any]:
        others = list(original(inp, needs_gradient))
        return [FwOp, *others] if _prefers(inp) else [*others, FwOp]

    return priority_list


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(inp: Inputs, varlen_lse_packed: bool | None) -> Any:
        # The random state of dropout belongs to the operator that ran forward.
        ours = varlen_lse_packed is not False and inp.p == 0.0 and BwOp.supports(inp)
        if ours and _prefers(inp):
            return BwOp
        try:
            return original(inp, varlen_lse_packed=varlen_lse_packed)
        except NotImplementedError:
            if ours:
                return BwOp
            raise

    return dispatch


class Installation:
    """A context manager that takes an installation back when it ends (see :func:`install`).

    Blocks of one installation may nest, and run in several threads: the last to end takes it back.
    """

    def __init__(self) -> None:
        self._blocks = 0

    def __enter__(self) -> Installation:
        with _lock:
            self._blocks += 1
            _hold(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._blocks -= 1
            if self._blocks == 0:
                _holders.discard(self)
                _release()


def _hold(holder: Installation) -> None:
    _holders.add(holder)
    if not _patches:
        _patches.append(_Patch(dispatch_module(), "_dispatch_fw_priority_list", _wrap_forward))
        _patches.append(_Patch(fmha_module(), "_dispatch_bw", _wrap_backward))


def _release() -> None:
    if not _holders:
        while _patches:
            _patches.pop().undo()


def install() -> Installation:
    """Make ``(FwOp, BwOp)`` the first choice wherever no ``op=`` is given.

    Idempotent and thread-safe.  As a context manager, ``with install(): ...``, it ends with the
    block, unless another ``install()`` is in force.

    Returns:
        A handle; ignore it to stay installed until :func:`uninstall`.
    """
    with _lock:
        installation = Installation()
        _hold(installation)
        return installation


def uninstall() -> None:
    """Restore xFormers' dispatch to the objects it had, whatever was installed how often."""
    with _lock:
        _holders.clear()
        _release()


def installed() -> bool:
    """Whether SparseK is in xFormers' dispatch now."""
    with _lock:
        return bool(_patches)
