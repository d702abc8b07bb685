"""The launch of the kernel for few rows, as far as it can be seen without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsek_kernels.common.alignment import copyable
from sparsek_kernels.common.recording import run
from sparsek_kernels.sink_window import launch_sm90, replay
from sparsek_kernels.sink_window.config import ProblemShape, select_config
from sparsek_kernels.sink_window.kernels.fwd_small_sm90 import sink_window_hopper_small_kernel
from sparsek_kernels.sink_window.problem import SinkWindowProblem
from sparsek_kernels.sink_window.spec import AttentionSpec
from tests.kernels.spied import SpiedKernel


@pytest.mark.parametrize("sinks", [False, True])
def test_a_replayed_launch_has_every_argument_in_its_place(
    monkeypatch: pytest.MonkeyPatch, sinks: bool
) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(launch_sm90, "run", lambda *args, **given: calls.append((args, given)))
    q, k, v = (torch.zeros(1, 512, heads, 64, dtype=torch.float16) for heads in (8, 2, 2))
    shape = ProblemShape(1, 512, 512, 8, 2, 64, causal=False)
    config = select_config(shape, q.dtype, 90)
    assert config.hopper_small is not None
    spec = AttentionSpec(0, None, False, 0.125)
    problem = SinkWindowProblem(q, k, v, spec, torch.zeros(8) if sinks else None)
    launch_sm90.forward_small(problem, config.hopper_small, torch.empty_like(q), None)
    (((kernel, grid, *positional), options),) = calls
    assert kernel is sink_window_hopper_small_kernel
    assert grid == (8, 8, 1)
    # A replay passes every argument by position, constexprs too, and knows no defaults.
    names = kernel.arg_names
    tensors = [isinstance(value, torch.Tensor) for value in positional]
    pointers = [name.endswith("_ptr") for name in names[: len(positional)]]
    assert tensors == pointers
    assert names[len(positional) :] == [name for name in options if name in names]


def test_copies_need_aligned_heads() -> None:
    x = torch.zeros(2, 10, 3, 72, dtype=torch.float16)[..., :64]
    assert copyable(x)
    assert not copyable(x.transpose(2, 3))
    assert not copyable(torch.zeros(1, 10, 3, 68, dtype=torch.float16)[..., :64])
    assert copyable(torch.zeros(1, 10, 3, 68)[..., :64])  # rows of 17 times 16 bytes
    assert not copyable(x[..., 1:])


def test_a_launcher_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refuse(*given: object) -> None:
        asked.append(given)
        raise TypeError("function takes 17 arguments")

    monkeypatch.setattr(replay, "_replays", {"key": refuse})
    x = torch.zeros(1, 3, 2, 16)
    for _ in range(2):
        assert replay.replay("key", x, x, x, True) is None
        with replay.remembered("key", (x,)):
            run(SpiedKernel("kernel", ["x"], []), (1,), x)
    assert len(asked) == 1
