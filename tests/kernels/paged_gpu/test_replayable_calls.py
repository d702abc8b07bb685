"""Which calls may be replayed, what tells them apart, and what is said of the others.

The spies of ``test_replay.py`` stand for compiled kernels here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from replays import TOP_K, call_of, layer
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsek_kernels.common.recording import Tensors, run
from sparsek_kernels.paged import InfLLM, PageRecords, Seer
from sparsek_kernels.paged import replay as replay_module
from sparsek_kernels.paged.api import _replayable_segment
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.replay import (
    ReplayableCall,
    Replays,
    launched_counts,
    locate,
    replayable,
)
from tests.kernels.paged.gate_cases import make_gates
from tests.kernels.spied import Note, SpiedKernel


def test_calls_of_one_key_lie_alike(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.zeros(4, 8), torch.zeros(4, 8)

    def found(tensors: Tensors, rule: str) -> ReplayableCall:
        located = locate(tensors)
        assert located is not None
        call = replayable(located, rule)
        assert call is not None
        return call

    call = found((q, None), "rule")
    assert found((k, None), "rule").key == call.key
    others: list[tuple[Tensors, str]] = [
        ((q, k), "rule"),
        ((q.t(), None), "rule"),
        ((q.double(), None), "rule"),
        ((q[:3], None), "rule"),
        ((q, None), "another rule"),
    ]
    for tensors, rule in others:
        assert found(tensors, rule).key != call.key
    assert locate((q.view(-1)[1:], None)) is None  # not aligned
    assert locate((q, "k")) is None  # type: ignore[arg-type]
    for where, name, value in (
        (replay_module, "has_launch_hook", True),
        (torch.cuda, "is_current_stream_capturing", True),
        (replay_module, "current_device", 0),
    ):
        with mock.patch.object(where, name, return_value=value):
            assert replayable(call.located, "rule") is None
    with mock.patch.object(replay_module, "current_device", return_value=0):
        assert locate((q, None)) is None


def test_segments_of_a_layer_look_at_its_tensors_once(on_cpu: None) -> None:
    problem = layer(1)
    operands = problem.operands(torch.empty_like(problem.q))
    segment = Segment(problem.batch.part(0, 2), TOP_K)
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        first, again = (_replayable_segment(operands, segment, None) for _ in range(2))
        rows = _replayable_segment(operands.of_rows(slice(2, None)), segment, None)
        other = replace(operands, out=torch.empty_like(problem.q))
        moved = _replayable_segment(other, segment, None)
        operands.out = other.out
        changed = _replayable_segment(operands, segment, None)
    assert first is not None
    assert again is not None
    assert rows is not None
    assert moved is not None
    assert changed is not None
    assert changed.located.addresses == moved.located.addresses
    assert again.located is first.located
    assert rows.located.addresses[3] == operands.q[2:].data_ptr() != first.located.addresses[3]
    assert moved.located.addresses[4] == other.out.data_ptr() != first.located.addresses[4]


def test_fake_tensors_are_not_asked_for_addresses(on_cpu: None) -> None:
    call = replayable(call_of((torch.zeros(4, 8),), "rule", {}).located, "rule")
    assert call is not None
    with FakeTensorMode() as mode:
        assert locate((mode.from_tensor(torch.zeros(4, 8)),)) is None
        assert replayable(call.located, "rule") is None


def test_pages_that_are_known_are_not_looked_at(on_cpu: None) -> None:
    pages, others = [tuple(torch.zeros(8, 16) for _ in range(3)) for _ in range(2)]
    q = torch.zeros(4, 8)
    known = locate(pages)
    assert known is not None
    whole = locate((*pages, q, None))
    asked: list[torch.Tensor] = []

    def spied(tensor: torch.Tensor, stride: Callable[..., Any] = torch.Tensor.stride) -> Any:
        asked.append(tensor)
        return stride(tensor)

    with mock.patch.object(torch.Tensor, "stride", spied):
        found = locate((*pages, q, None), known)
        assert len(asked) == 1
        assert asked[0] is q
        moved = locate((*pages[:2], others[2], q, None), known)  # one of them is another
        assert len(asked) == 5
        with mock.patch.object(replay_module, "current_device", return_value=0):
            assert locate((*pages, q, None), known) is None
    assert found is not None
    assert whole is not None
    assert moved is not None
    assert (found.key, found.addresses) == (whole.key, whole.addresses)
    assert moved.addresses[2] == others[2].data_ptr()


def test_layers_with_other_indexers_have_other_replays(on_cpu: None) -> None:
    problem, rule = layer(1), TOP_K.per_token(sel_block_size=32)
    gates = [make_gates(4, 2, 64, norms=norms) for norms in (True, False)]
    operands = problem.operands(torch.empty_like(problem.q))
    segment = Segment(problem.batch.part(0, 2), rule)
    keys = set()
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        for index in (None, PageRecords(), InfLLM(), *map(Seer, gates)):
            call = _replayable_segment(operands, segment, index)
            assert call is not None
            keys.add(call.key)
    assert len(keys) == 5


def test_what_cannot_be_replayed_is_launched_every_time() -> None:
    class Interpreted:
        arg_names = ("x",)
        launches = 0

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(x: torch.Tensor) -> None:
                self.launches += 1

            return launch

    kernel, replays = Interpreted(), Replays()
    x = torch.zeros(8)
    for _ in range(3):
        call = call_of((x,), "rule", replays)
        assert not call.replay()
        with call.recorded():
            run(kernel, (1,), x)
    assert kernel.launches == 3


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of the test that are not replayed."""
    found: Counter[str] = Counter()
    monkeypatch.setattr(replay_module, "_launched", found)
    return found


def test_addresses_that_are_not_aligned_are_counted_and_logged_once(
    on_cpu: None, counted: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert locate((torch.zeros(8), torch.zeros(8)[1:])) is None
    assert list(counted.values()) == list(launched_counts().values()) == [3]
    assert ["multiple of 16" in message for message in caplog.messages] == [True]


def test_a_refused_replay_goes_through_the_jit(
    on_cpu: None,
    notes: list[Note],
    counted: Counter[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_module, "_refused", [])
    kernel, x = SpiedKernel("kernel", ["x"], notes), torch.zeros(8)
    replays: Replays = {}

    def refuse(*_: Any) -> None:
        raise TypeError("an integer is required")

    monkeypatch.setattr(kernel, "run", refuse)
    located = locate((x,))
    assert located is not None
    call = replayable(located, "rule", replays)
    assert call is not None
    with call.recorded():
        run(kernel, (1,), x)
    assert not call.replay()
    with call.recorded():
        run(kernel, (1,), x)
    assert len(notes) == 2
    assert replayable(located, "rule", replays) is None
    assert counted == {"Triton says an integer is required": 2}
    assert len(caplog.messages) == 1
    assert "an integer is required" in caplog.text


def test_tensors_that_cannot_be_told_apart_are_counted_and_logged_once(
    notes: list[Note], counted: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    both = torch.zeros(64)
    tensors = (both[:16], both[16:32])
    replays: Replays = {}
    call = call_of(tensors, "rule", replays)
    for calls in (1, 2, 3):  # recorded once: what was in vain is not tried again
        assert not call.replay()
        with call.recorded():
            run(SpiedKernel("kernel", ["x"], notes), (1,), both[32:])
        assert list(counted.values()) == [calls]
    assert ["share an address or a storage" in message for message in caplog.messages] == [True]


def test_where_nothing_is_launched_a_later_call_is_recorded(notes: list[Note]) -> None:
    """As where kernels are compiled alone, at the start of a server."""
    replays: Replays = {}
    call = call_of((torch.zeros(8),), "rule", replays)
    with call.recorded():
        pass
    assert not replays
    with call.recorded():
        run(SpiedKernel("kernel", ["x"], notes), (1,), torch.zeros(8))
    assert call.replay()


def test_a_recording_ends_with_an_error(notes: list[Note]) -> None:
    replays: Replays = {}
    call = call_of((torch.zeros(8),), "rule", replays)
    with pytest.raises(ValueError, match="broken"), call.recorded():
        raise ValueError("broken")
    assert not replays
    run(SpiedKernel("kernel", ["x"], notes), (1,), torch.zeros(8))  # into no recording
    assert len(notes) == 1
