"""A call that is replayed allocates, runs and launches what it did, on other tensors."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from sparsek_kernels.common import recording as recording_module
from sparsek_kernels.common import tape as tape_module
from sparsek_kernels.common import tape_replay
from sparsek_kernels.common.block import Need, offsets_in_block
from sparsek_kernels.common.recording import compiling, run
from sparsek_kernels.common.tape import recorded, replayed
from tests.kernels.spied import STREAM, Note, SpiedKernel, taken

NOTES: list[Note] = []
KERNEL = SpiedKernel("kernel", ["x", "y", "SIZE"], NOTES)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches on a stream of no GPU."""
    for module in (recording_module, tape_replay):
        monkeypatch.setattr(module, "current_stream", lambda _device: STREAM)
    NOTES.clear()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> dict[Hashable, Any]:
    """What is remembered; tensors of the CPU are replayed too."""
    found: dict[Hashable, Any] = {}
    monkeypatch.setattr(tape_module, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tape_module, "_replays", found)
    return found


def doubled_sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums of rows and columns of ``2 x + y``, by views, scratch and operations in place."""
    both = torch.empty(2, *x.shape).zero_()
    first, second = both.unbind()
    first.add_(x, alpha=2)
    run(KERNEL, (3,), second, x[1:], SIZE=16)
    ordered, places = torch.sort(y, dim=1, stable=True)
    first.scatter_add_(1, places, ordered)
    run(KERNEL, (1,), first, ordered[0], SIZE=16)
    return torch.cat([first, second]).sum(1), first.t().contiguous()[0:]


def test_a_replay_computes_from_the_tensors_that_it_is_given() -> None:
    one, other = ([torch.randn(4, 4), torch.randn(4, 4)] for _ in range(2))
    results, replay = recorded(one, lambda: doubled_sums(*one))
    assert replay is not None
    taken(NOTES)
    wanted = doubled_sums(*other)
    taken(NOTES)
    again = replay(other, 0)
    assert all(torch.equal(x, y) for x, y in zip(again, wanted, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(again, results, strict=True))
    first, second = taken(NOTES)
    assert (first[1], first[2][1:]) == ((3, 1, 1), [other[0][1:].data_ptr(), 16])
    assert first[2][0] - second[2][0] == other[0].nbytes, "two halves of one allocation"


def test_scratch_lives_as_long_as_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8)
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def compute() -> tuple[torch.Tensor, ...]:
        scratch = x + 1
        view = scratch[2:]
        doubled = view * 2
        return (doubled - 1,)

    _, replay = recorded([x], compute)
    assert replay is not None

    def watched(function: object) -> object:
        def call(*args: torch.Tensor, **options: object) -> torch.Tensor:
            found = function(*args, **options)  # type: ignore[operator]
            seen.append(weakref.ref(found))
            alive.append(sum(ref() is not None for ref in seen))
            return found

        return call

    steps = [step._replace(action=step.action._replace(function=watched(step.action.function)))
             for step in replay.steps]  # fmt: skip
    monkeypatch.setattr(replay, "steps", steps)
    (found,) = replay([x], 0)
    assert torch.equal(found, (x[2:] + 1) * 2 - 1)
    assert alive == [1, 2, 3, 2], "a view keeps what it is of; then the double and the result"


def test_scratch_of_kernels_is_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed at different times lies at the same place; zeros are another allocation."""
    x = torch.ones(300)

    def compute() -> tuple[torch.Tensor, ...]:
        first, second, last = (torch.empty(400).detach() for _ in range(3))
        counts, more = torch.zeros(3, dtype=torch.int32), x.new_zeros(2)
        torch.empty(7)  # of use to nobody
        out = torch.empty_like(x).detach()
        run(KERNEL, (1,), first, x, SIZE=16)
        run(KERNEL, (1,), second, first, SIZE=16)
        run(KERNEL, (1,), last[8:], second, SIZE=16)
        run(KERNEL, (1,), counts, more, SIZE=16)
        run(KERNEL, (1,), out, last, SIZE=16)
        return (out,)

    _, replay = recorded([x], compute)
    assert replay is not None
    taken(NOTES)
    made: list[torch.Tensor] = []
    monkeypatch.setattr(
        replay,
        "_blocks",
        [b._replace(make=lambda *a, m=b.make, **o: made.append(m(*a, **o)) or made[-1])
         for b in replay._blocks],
    )  # fmt: skip
    (out,) = replay([x], 0)
    scratch, zeros = sorted(made, key=lambda block: -block.nbytes)
    start, behind = scratch.data_ptr(), scratch.data_ptr() + 2048  # 1600 bytes, aligned
    assert (scratch.nbytes, zeros.nbytes) == (2048 + 1600, 512 + 8)
    assert not zeros.any()
    addresses = [args[:2] for _, _, args in taken(NOTES)]
    assert addresses[0][1] == x.data_ptr()
    assert addresses[4][0] == out.data_ptr()
    first, second, last = (addresses[i][0] for i in range(3))
    assert {first, second} == {start, behind}
    assert first == last - 32 == addresses[4][1]
    assert addresses[3] == [zeros.data_ptr(), zeros.data_ptr() + 512]
    assert out.shape == x.shape


def test_scratch_is_freed_after_its_last_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(8)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def compute() -> tuple[torch.Tensor, ...]:
        counts, scratch, out = torch.zeros(8), torch.empty(8), torch.empty(8)
        run(KERNEL, (1,), counts, x, SIZE=16)
        run(KERNEL, (1,), scratch, counts, SIZE=16)
        run(KERNEL, (1,), out, scratch, SIZE=16)
        return (out + x, out)

    _, replay = recorded([x], compute)
    assert replay is not None

    def make(function: Any, *args: Any, **options: Any) -> torch.Tensor:
        block = function(*args, **options)
        made.append(weakref.ref(block))
        return block

    def add(*args: Any) -> torch.Tensor:
        alive.extend(ref() is not None for ref in made)
        return torch.add(*args)

    blocks = [block._replace(make=partial(make, block.make)) for block in replay._blocks]
    *steps, last = replay.steps
    monkeypatch.setattr(replay, "_blocks", blocks)
    steps.append(last._replace(action=last.action._replace(function=add)))
    monkeypatch.setattr(replay, "steps", steps)
    replay([x], 0)
    assert alive == [False, False]


def test_tensors_that_are_needed_together_share_no_byte() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        drawn = torch.randint(1, 5000, (12, 3), generator=generator).tolist()
        needs = [Need(size, *sorted((a % 20, b % 20))) for size, a, b in drawn]
        offsets, total = offsets_in_block(needs)
        for i, (one, at) in enumerate(zip(needs, offsets, strict=True)):
            assert at % 512 == 0
            assert at + one.size <= total
            for other, there in zip(needs[:i], offsets[:i], strict=True):
                apart = one.last < other.first or other.last < one.first
                assert apart or at + one.size <= there or there + other.size <= at
    assert offsets_in_block([]) == ([], 0)
    assert offsets_in_block([Need(512, 0, 1), Need(100, 2, 3), Need(512, 1, 2)])[1] == 1024


def test_replays_that_another_thread_has_cleared(replays: dict[Hashable, Any]) -> None:
    """A look-up that finds a kind, which is gone at the next."""

    class Cleared(dict[Hashable, Any]):
        def __contains__(self, _key: object) -> bool:
            return True

    with mock.patch.object(tape_module, "_replays", Cleared(replays)):
        x = torch.ones(4)
        assert replayed([x], None, lambda: (x * 2,))[0].tolist() == [2.0] * 4


def test_what_may_be_a_view_or_a_copy() -> None:
    """``contiguous`` of both kinds; below autograd it comes as the one operation that it is."""
    one, other = ([torch.randn(4, 4), torch.randn(4, 3, 2).unbind(2)[0]] for _ in range(2))

    def compute(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            x, y = x.contiguous(), y.contiguous()
            run(KERNEL, (1,), x, y, SIZE=16)
            return (torch.cat([x, y], 1),)

    _, replay = recorded(one, lambda: compute(*one))
    assert replay is not None
    taken(NOTES)
    (found,) = replay(other, 0)
    assert torch.equal(found, torch.cat(other, 1))
    assert NOTES[0][2][0] == other[0].data_ptr() != NOTES[0][2][1] != other[1].data_ptr()


def test_what_is_not_known_is_not_replayed() -> None:
    """What the host reads, and tensors that were neither given nor made."""
    x, y = torch.ones(3), torch.ones(3)
    results, replay = recorded([x], lambda: (x * float(x.sum()),))
    assert replay is None
    assert torch.equal(results[0], torch.full((3,), 3.0))
    assert recorded([x], lambda: (x + y,))[1] is None

    def launch() -> tuple[torch.Tensor, ...]:
        run(KERNEL, (1,), x, y, SIZE=16)
        return (x + 1,)

    assert recorded([x], launch)[1] is None
    assert recorded([x, y], launch)[1] is not None


def test_an_operator_that_launches_is_replayed_as_one() -> None:
    @torch.library.custom_op("sparsek_test::launches", mutates_args=())
    def launches(x: torch.Tensor) -> torch.Tensor:
        out = x + 1
        run(KERNEL, (1,), out, x, SIZE=16)
        return out

    one, other = torch.ones(4), torch.zeros(4)
    _, replay = recorded([one], lambda: (launches(one),))
    assert replay is not None
    taken(NOTES)
    (found,) = replay([other], 0)
    assert torch.equal(found, other + 1)
    assert [args[:2] for _, _, args in NOTES] == [[found, other]], "through the JIT, once"


def test_operations_without_results_are_replayed() -> None:
    x = torch.ones(3)

    def compute() -> tuple[torch.Tensor, ...]:
        return (x + len(torch.empty(0, 3).unbind()),)

    assert recorded([x], compute)[1] is not None


def test_under_autocast_a_call_is_of_another_kind(replays: dict[Hashable, Any]) -> None:
    x = torch.randn(4, 4)

    def product() -> torch.dtype:
        (found,) = replayed((x,), "product", lambda: (x @ x,))
        return found.dtype

    for _ in range(3):
        assert product() == torch.float32
        with torch.autocast("cpu"):
            assert product() == torch.bfloat16
    assert len(replays) == 2
    assert all(replays.values())


def test_a_recording_that_memory_does_not_suffice_for_is_given_up(
    replays: dict[Hashable, Any],
) -> None:
    """While it lasts all scratch stays alive, which the computation itself does not need."""
    x = torch.ones(3)
    calls = []

    def compute() -> tuple[torch.Tensor, ...]:
        calls.append(x)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return (x + 1,)

    for _ in range(3):
        assert torch.equal(replayed((x,), "sum", compute)[0], x + 1)
    assert len(calls) == 4
    assert [*replays.values()] == [None]


def test_what_is_only_compiled_is_not_recorded(
    replays: dict[Hashable, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpiedKernel, "warmup", lambda *_args, **_options: None, raising=False)
    x = torch.ones(3)

    def compute() -> tuple[torch.Tensor, ...]:
        out = torch.empty_like(x)
        run(KERNEL, (1,), out, x, SIZE=16)
        return (out,)

    with compiling(1):
        replayed((x,), "launch", compute)
    assert not replays
    for _ in range(3):  # seen, recorded, replayed
        replayed((x,), "launch", compute)
        assert len(taken(NOTES)) == 1
