"""What the tests of this folder share: the way to its modules, and spies in place of kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparsek_kernels.common import recording as recording_module
from sparsek_kernels.paged import replay as replay_module
from tests.kernels.spied import STREAM, Note, SpiedKernel

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Note]]:
    """What is launched, on a Hopper GPU that is not there."""
    from aot import KERNELS
    from hardware import simulated

    found: list[Note] = []
    for name, module in KERNELS.items():
        arg_names = getattr(module, name).arg_names
        monkeypatch.setattr(module, name, SpiedKernel(name, arg_names, found))
    monkeypatch.setattr(replay_module, "current_device", lambda: -1)  # of CPU tensors
    monkeypatch.setattr(recording_module, "current_stream", lambda _device: STREAM)
    monkeypatch.setattr(replay_module, "take_turns", lambda _device: STREAM)
    with simulated(90, 132):
        yield found


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as those of the current GPU."""
    monkeypatch.setattr(replay_module, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
