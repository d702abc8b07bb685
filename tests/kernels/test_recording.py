"""A replay calls what Triton's launcher would call: the same function with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from sparsek_kernels.common import recording as recording_module
from sparsek_kernels.common.descriptors import describe_matrix
from sparsek_kernels.common.recording import Replay, Tensors, compiling, recording, run
from tests.kernels.spied import STREAM, Note, SpiedKernel, taken

HEAD = (STREAM, "kernel", "metadata", None, None, None)
"""What launchers take between the grid and a kernel's own arguments."""
SCRATCH = [f"{kind}_scratch_{what}" for kind in ("global", "profile") for what in ("size", "align")]
LATER = {"gsan_enabled": False, "arg_annotations": (), "kernel_signature": b""}
"""What later launchers of Triton have."""


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Note]:
    """What is launched."""
    monkeypatch.setattr(recording_module, "current_stream", lambda _device: STREAM)
    return []


def spied(launcher: Any, *arg_names: str) -> SpiedKernel:
    """A kernel that ``launcher`` launches."""
    kernel = SpiedKernel("kernel", [*arg_names, "SIZE"], [])
    kernel.run = launcher  # type: ignore[method-assign]
    return kernel


def recorded(tensors: Tensors, kernel: SpiedKernel, *args: Any, **options: Any) -> Replay:
    """A launch on a grid of two programs, to be replayed on other tensors."""
    with recording(tensors) as record:
        run(kernel, (2,), *args, **options)
    replay = record.finish()
    assert replay is not None
    return replay


def test_an_argument_between_two_tensors_is_not_guessed(notes: list[Note]) -> None:
    both = torch.zeros(64)
    keys, values = both[:16], both[16:32]
    kernel = SpiedKernel("kernel", ["x"], notes)
    with recording((keys, values)) as record:
        run(kernel, (1,), both[32:])
    assert record.finish() is None
    replay = recorded((keys,), kernel, both[32:])
    other = torch.zeros(64)
    taken(notes)
    replay((other[:16],), 0)
    assert taken(notes) == [("kernel", (2, 1, 1), [other[32:].data_ptr()])]


class Launcher:
    """As Triton's launchers are: Python that calls a function in C."""

    def __init__(self, notes: list[Any], scratch: int = 0, nested: bool = False) -> None:
        self.launch: Callable[..., None] = lambda *args: notes.append(args)
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.nested, self.calls = nested, [0]

    def __call__(self, x: int, y: int, z: int, stream: int, kernel: Any, *args: Any) -> None:
        self.calls[0] += 1
        if self.nested:
            self.launch(x, y, z, stream, kernel, *args[:4], args[4:])
        else:
            self.launch(x, y, z, stream, kernel, "pdl", *args)


@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("kind", ["flat", "nested", "scratch"])
def test_a_replay_calls_what_the_launcher_would_call(kind: str) -> None:
    seen: list[Any] = []
    launcher = Launcher(seen, scratch=int(kind == "scratch"), nested=kind == "nested")
    x, other = torch.zeros(8), torch.zeros(8)
    replay = recorded((x,), spied(launcher, "x"), x, SIZE=3)
    assert not seen  # nothing is launched to find out
    before = launcher.calls[0]
    replay((other,), 0)
    assert launcher.calls[0] - before == (kind == "scratch")
    own = (other.data_ptr(), 3)
    tail = (*HEAD[2:], own) if kind == "nested" else ("pdl", *HEAD[2:], *own)
    assert seen == [(2, 1, 1, *HEAD[:2], *tail)]


def cuda_launcher(launch: Callable[..., None]) -> Any:
    """Triton's own launcher, over another function than the one in C."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    launcher = object.__new__(driver.CudaLauncher)
    given = {"launch_cooperative_grid": False, "launch_pdl": True, "num_ctas": 1}
    vars(launcher).update(launch=launch, **given, **dict.fromkeys(SCRATCH, 0), **LATER)
    return launcher


@pytest.mark.usefixtures("encoded", "notes")
def test_a_replay_ends_in_the_call_that_tritons_launcher_makes() -> None:
    seen: list[Any] = []
    launcher = cuda_launcher(lambda *args: seen.append(args))
    x, other = torch.zeros(8), torch.zeros(8)
    recorded((x,), spied(launcher, "x"), x, SIZE=3)((other,), 0)
    launcher(2, 1, 1, *HEAD, other.data_ptr(), 3)
    assert len(seen) == 2
    assert seen[0] == seen[1]


class Map:
    """What a matrix is encoded as: an object of its own, with all that it is encoded from."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Map) and other.parts == self.parts


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the matrices that Triton encodes, on a driver that is not there."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    found: list[int] = []

    def encode(address: int, *parts: Any) -> Map:
        found.append(address)
        return Map(address, *(tuple(x) if isinstance(x, list) else x for x in parts))

    names = ("fill_tma_descriptor", "fill_tma_descriptor_tiled")  # the latter from Triton 3.7 on
    active = SimpleNamespace(utils=SimpleNamespace(**dict.fromkeys(names, encode)))
    monkeypatch.setattr(driver.triton.runtime, "driver", SimpleNamespace(active=active))
    return found


def launcher_of_matrices(count: int, seen: list[Any]) -> Any:
    """Triton's launcher of a kernel with so many matrices, then two arguments of other kinds."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    types = ["tensordesc<fp32[8, 8]>"] * count + ["*fp32", "i32"]
    signature = dict(enumerate(types))
    meta = {"elem_size": 4, "elem_type": 7, "block_size": [8, 8], "fp4_padded": False}
    metas = [{"swizzle": index, **meta} for index in range(count)]
    if not hasattr(driver, "make_tensordesc_arg"):
        pytest.skip("a Triton that passes descriptors on otherwise")

    def note(*args: Any) -> None:  # later versions end with a list or a tuple
        seen.append((*args[:-1], *args[-1]) if isinstance(args[-1], list | tuple) else args)

    return cuda_launcher(driver.wrap_handle_tensordesc(note, signature, metas))


def described_matrix(x: torch.Tensor, columns: int = 8) -> Any:
    return describe_matrix(x, (x.shape[0], x.shape[1]), x.stride(0), (8, columns))


@pytest.mark.usefixtures("notes")
def test_matrices_are_encoded_once_for_each_address(encoded: list[int]) -> None:
    seen: list[Any] = []
    launcher = launcher_of_matrices(2, seen)
    kernel = spied(launcher, "moved", "fixed", "x")
    fixed, layers = torch.zeros(16, 16), [torch.zeros(32, 16) for _ in range(3)]

    def launch(x: torch.Tensor) -> tuple[Any, ...]:
        return described_matrix(x[16:]), described_matrix(fixed), x

    def through_triton(x: torch.Tensor) -> tuple[Any, ...]:
        launcher(2, 1, 1, *HEAD, *launch(x)[:2], x.data_ptr(), 3)
        found: tuple[Any, ...] = seen.pop()
        return found

    def record(x: torch.Tensor) -> Replay:
        return recorded((x,), kernel, *launch(x), SIZE=3)

    replay = record(layers[0])
    assert not seen  # nothing is launched to find out
    for x in layers:
        replay((x,), 0)
    replayed = seen.copy()
    wanted = [through_triton(x) for x in layers]
    assert replayed == wanted
    seen.clear()
    encoded.clear()
    for again in (replay, record(layers[1])):  # other steps find them too
        for x in layers:
            again((x,), 0)
    assert not encoded
    assert seen == wanted * 2
    narrow = [torch.zeros(32, 24)[:, :16] for _ in range(2)]
    for x, like in (narrow, (torch.zeros(32, 8), torch.zeros(32, 8))):
        seen.clear()
        record(x)((like,), 0)
        assert seen.pop() == through_triton(like)


@pytest.mark.usefixtures("notes")
def test_a_matrix_at_an_old_address_with_another_shape_is_encoded_anew(encoded: list[int]) -> None:
    seen: list[Any] = []
    launcher = launcher_of_matrices(1, seen)
    kernel = spied(launcher, "moved", "x")
    storage = torch.zeros(1024)
    shapes: list[tuple[torch.Tensor, int]] = [
        (storage.view(32, 32), 8),
        (storage.view(64, 16), 8),  # shape and stride
        (storage.view(32, 32)[:16], 8),  # rows alone
        (storage.view(32, 32)[:, :16], 8),  # columns alone
        (storage.view(32, 32), 16),  # box
    ]
    for x, box in shapes:
        own = described_matrix(x, box)
        before = len(encoded)
        recorded((x,), kernel, own, x, SIZE=3)((x,), 0)
        assert len(encoded) > before
        launcher(2, 1, 1, *HEAD, own, x.data_ptr(), 3)
        assert seen.pop() == seen.pop()


@pytest.mark.usefixtures("encoded", "notes")
def test_a_launcher_that_does_more_with_matrices_stays() -> None:
    seen: list[Any] = []
    launcher = object.__new__(
        type("Other", (), {"__call__": lambda self, *args: self.launch(*args)})
    )

    def passed_on(launch: Callable[..., None]) -> Callable[..., None]:
        launcher = launch

        def inner(*args: Any) -> None:
            launcher(*args[:-3], args[-3].base.data_ptr(), args[-2], args[-1], "more")

        return inner

    launcher.launch = passed_on(lambda *args: seen.append(args))
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    first, other = torch.zeros(32, 16), torch.zeros(32, 16)
    replay = recorded(
        (first,), spied(launcher, "moved", "x"), described_matrix(first), first, SIZE=3
    )
    for x in (other, first):
        replay((x,), 0)
        assert seen.pop()[-4:] == (x.data_ptr(), x.data_ptr(), 3, "more")


def test_what_is_only_compiled_is_not_launched() -> None:
    kernel = mock.MagicMock()
    with compiling(2):
        run(kernel, (3,), 1, SIZE=2, num_warps=4)
    kernel.warmup.assert_called_once_with(1, grid=(3,), SIZE=2, num_warps=4)
    kernel.__getitem__.assert_not_called()
    with pytest.raises(KeyError), compiling(2):
        raise KeyError
    run(kernel, (3,), 1, SIZE=2)
    kernel.__getitem__.assert_called_once_with((3,))
