"""Passes of native sparse attention can be replayed: all that they read is known beforehand.

A script, because it needs kernels of the compiler, not of the interpreter.  None of them runs:
launches are noted, and what they would fill stays as it is.  Prints a line for each case and exits
1 if any failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any
from unittest import mock

import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from sparsek_backend.nn import NativeSparseAttention, NSAConfig
from sparsek_kernels.common import tape
from sparsek_kernels.common.recording import Launch
from sparsek_kernels.nsa import launches, ops  # noqa: F401 - the launches' modules are patched
from sparsek_kernels.nsa.compress import launch_rotary, rotary  # noqa: F401 - the same
from tests.kernels.spied import STREAM

LAUNCHED: list[str] = []


class Compiled:
    """A compiled kernel that does nothing."""

    packed_metadata = "metadata"

    def __init__(self, name: str) -> None:
        self.function = name

    def run(self, *args: Any) -> None:
        """Called as Triton's launchers."""


CASES = [
    (arch, packed, *kind)
    for arch, packed, kind in product((80, 90), (False, True), ((False, 4), (True, 16)))
]
COMPILED: dict[str, Compiled] = {}
PASSES = {"rotary", "means", "means backward", "compressed", "branches", "backward", "gated"}
"""What the options of a replayed call begin with."""


def through_the_jit(kernel: Any, _grid: object) -> Callable[..., Compiled]:
    """Stands for ``kernel[grid]``."""

    def launch(*_args: Any, **_options: Any) -> Compiled:
        LAUNCHED.append(kernel.__name__)
        return COMPILED.setdefault(kernel.__name__, Compiled(kernel.__name__))

    return launch


def run(arch: int, packed: bool, shared_kv: bool, group: int) -> bool:
    """Three passes of a layer, of which the last launches nothing through the JIT."""
    replays: dict[Any, Any] = {}
    stand_ins: dict[str, Any] = {
        "device_arch": lambda _: arch, "multiprocessors": lambda _: 132,
        "current_device": lambda: -1, "current_stream": lambda _: STREAM,
    }  # fmt: skip
    with ExitStack() as stack:
        for kind in (JITFunction, GluonJITFunction):
            stack.enter_context(mock.patch.object(kind, "__getitem__", through_the_jit))
        for module in [x for name, x in sys.modules.items() if name.startswith("sparsek_kernels.")]:
            for name in stand_ins.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, stand_ins[name]))
        for owner, name, value in (
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (ops, "runs_kernels", lambda _: True),
            (rotary, "runs_kernels", lambda _: True),
            (ops, "_replayed", tape.replayed),
            (tape, "_replays", replays),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        config = NSAConfig(compression="mean", shared_kv=shared_kv)
        layer = NativeSparseAttention(64, 2 * group, 2, 64, config=config).bfloat16()
        cu_seqlens = torch.tensor([0, 20, 21, 2048], dtype=torch.int32) if packed else None
        by_turn = []
        for _ in range(3):  # seen, recorded, replayed
            LAUNCHED.clear()
            x = torch.randn(1, 2048, 64).bfloat16().requires_grad_()
            layer(x, cu_seqlens=cu_seqlens).sum().backward()
            with torch.no_grad():
                layer(x, cu_seqlens=cu_seqlens)
            by_turn.append({*LAUNCHED})
    first, _, again = by_turn
    good = any("hopper" in name for name in first) == (arch == 90)
    good = good and bool(first) and not again and all(replays.values())
    good = good and {key[1][0] for key in replays} == PASSES
    actions = [step.action for replay in replays.values() if replay for step in replay.steps]
    good = good and first <= {x.args[4] for x in actions if isinstance(x, Launch)}
    kind = f"{'packed' if packed else 'sequence'} {'shared' if shared_kv else 'own'} KV"
    case = f"sm{arch} {kind}, groups of {group}"
    print(f"{'ok  ' if good else 'FAIL'} {case:36} {len(first)} kernels, again {sorted(again)}")
    return not good


if __name__ == "__main__":
    sys.exit(any([run(*case) for case in CASES]))
