"""Launches: kernels of ``sparsek_kernels`` run as Python functions on CPU tensors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from tests.kernels.gluon_interpreter.language import Descriptor, Language, value
from tests.kernels.gluon_interpreter.machine import Machine, Partition
from tests.kernels.gluon_interpreter.values import Pointer

Way = tuple[str, bool, int]
WAYS: list[Way] = list(itertools.product(("first first", "last first"), (True, False), (1, 3)))
"""Orders, timings and numbers of programs side by side that :func:`interpret` takes."""


def in_turn(cases: Sequence[Any]) -> list[tuple[Any, Way]]:
    """Cases with two of the eight ways each: one, and the one that differs from it in everything.

    A case meets all values of order, timing and number of programs, four neighbours all ways.
    """
    return [(case, WAYS[way]) for i, case in enumerate(cases) for way in (i % 4, 7 - i % 4)]


class Kernel:
    """Takes the place of a jitted function: called by kernels, launched by launchers."""

    def __init__(
        self,
        kernel: JITFunction,
        language: Language,
        order: str,
        late: bool,
        side_by_side: int,
        launched: list[str],
    ) -> None:
        self.kernel, self.language, self.order, self.late = kernel, language, order, late
        self.side_by_side, self.launched = side_by_side, launched
        self.fixed = {x.name for x in kernel.params if x.is_constexpr}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        return self.kernel.fn(**{n: x if n in self.fixed else value(x) for n, x in given.items()})

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launched.append(self.kernel.__name__)
            names = self.kernel.arg_names
            given = dict(zip(names, args, strict=False))
            given |= {name: x for name, x in kwargs.items() if name in names}
            found = {name: self._argument(x) for name, x in given.items()}
            size = tuple(grid(given) if callable(grid) else grid)
            size = (*size, 1, 1)[:3]
            self.language.grid = size
            self.language.machine = Machine(self.order, self.late)
            function, warps = partial(self, **found), kwargs.get("num_warps", 4)
            programs = (
                Partition(function, warps, (x, y, z))
                for z, y, x in itertools.product(*map(range, size[::-1]))
            )
            self.language.machine.launch(programs, self.side_by_side)

        return launch

    @staticmethod
    def _argument(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Pointer.of(x)
        return Descriptor(x) if isinstance(x, TensorDescriptor) else x


def _scratch(device: torch.device, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Scratch as small as a launcher asks for; only integers start as zero."""
    return torch.full((numel,), float("nan") if dtype.is_floating_point else 0, dtype=dtype)


@contextmanager
def interpret(
    order: str = "first first", late: bool = True, side_by_side: int = 1
) -> Iterator[list[str]]:
    """Let kernels run on CPU tensors; gives the names of those that were launched so far.

    Args:
        order: ``first first`` or ``last first``: which partition runs while it need not wait.
        late: asynchronous products and copies out of shared memory happen when they are waited
            for, while others run on, and copies into it when they are issued; else the reverse.
        side_by_side: programs that run at a time, and of a persistent grid.
    """
    hardware = {
        "multiprocessors": lambda _device: side_by_side,
        "device_arch": lambda _device: 90,
        "workspace": _scratch,
    }
    language = Language()
    launched: list[str] = []
    kernels: dict[int, Kernel] = {}
    replaced: list[tuple[dict[str, Any], str, Any, bool]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("sparsek_kernels"):
            continue
        names = vars(module)
        written = "gl" in names or "tl" in names  # kernels are written here, not only launched
        for key, x in list(names.items()):
            new = x
            if isinstance(x, JITFunction):
                kernel = Kernel(x, language, order, late, side_by_side, launched)
                new = kernels.setdefault(id(x), kernel)
            elif key in hardware:
                new = hardware[key]
            elif written and isinstance(x, triton.language.constexpr):
                new = x.value
            elif written and key in language.names:
                new = language.names[key]
            if new is not x:
                replaced.append((names, key, x, True))
                names[key] = new
        if written:
            replaced.append((names, "range", names.get("range"), "range" in names))
            names["range"] = language.range
    try:
        yield launched
    finally:
        for names, key, x, existed in replaced:
            if existed:
                names[key] = x
            else:
                del names[key]
