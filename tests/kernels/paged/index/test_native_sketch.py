"""The sketch that C writes: byte for byte that of the torch path."""

from __future__ import annotations

import pytest
import torch

from sparsek_kernels.paged import summary_bytes, write_kv
from sparsek_kernels.paged.cpu.native import build
from sparsek_kernels.paged.index.key_means import native as native_sketch

pytestmark = pytest.mark.skipif(
    build.library() is None, reason="no C compiler: the torch path writes the sketch"
)

PAGES, HEADS, PAGE = 6, 3, 32


def written(
    keys: torch.Tensor,
    slots: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    *,
    in_c: bool,
    pieces: tuple[int, ...] = (),
) -> torch.Tensor:
    """The sketch after a write in pieces; K lies beside V, tokens outside heads, other rows NaN."""
    tokens, heads, dim = keys.shape
    pages = int(slots.max()) // PAGE + 1
    cache = torch.full((pages, PAGE, heads, 2 * dim), float("nan")).to(keys.dtype).transpose(1, 2)
    layers = torch.full((pages, 2, heads, summary_bytes(PAGE, dim)), 255, dtype=torch.uint8)
    summary = layers[:, 1]
    assert native_sketch.supports(cache[..., :dim], summary)
    with monkeypatch.context() as patch:
        if not in_c:
            patch.setattr(build, "library", lambda: None)
        for some in torch.arange(tokens).tensor_split(pieces):
            write_kv(
                keys[some], keys[some], cache[..., :dim], cache[..., dim:], summary, slots[some]
            )
    assert (layers[:, 0] == 255).all()
    return summary


def shuffled_slots(length: int) -> torch.Tensor:
    position = torch.arange(length)
    return torch.randperm(PAGES)[position // PAGE] * PAGE + position % PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
def test_the_bytes_of_the_torch_path(
    dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outlier channels, keys far apart in size, padding, and vectors that are not full."""
    torch.manual_seed(dim)
    keys = torch.randn(157, HEADS, dim) * torch.rand(157, HEADS, 1).mul(12).sub(9).exp()
    keys[..., dim // 3] *= 30.0
    keys[40:48] = 0.0
    keys, slots = keys.to(dtype), shuffled_slots(157)
    slots[60:64] = -1
    expected = written(keys, slots, monkeypatch, in_c=False)
    assert torch.equal(written(keys, slots, monkeypatch, in_c=True), expected)
    in_pieces = written(keys, slots, monkeypatch, in_c=True, pieces=(1, 2, 9, 41, 42, 130))
    assert torch.equal(in_pieces, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_least_and_the_largest_keys(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = torch.finfo(dtype)
    sizes = [limits.smallest_normal / 8, limits.smallest_normal, 1.0, limits.max / 64]
    keys = torch.stack([torch.randn(HEADS, 64) * size for size in sizes]).repeat_interleave(4, 0)
    keys = keys.clamp(-limits.max / 16, limits.max / 16).to(dtype)
    slots = torch.arange(len(keys))
    expected = written(keys, slots, monkeypatch, in_c=False)
    assert torch.equal(written(keys, slots, monkeypatch, in_c=True), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_write_what_one_does(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, slots = torch.randn(PAGES * PAGE - 2, 4, 64), shuffled_slots(PAGES * PAGE - 2)
    expected = written(keys, slots, monkeypatch, in_c=False)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = written(keys, slots, monkeypatch, in_c=True)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)


def test_other_strides_take_the_torch_path() -> None:
    keys = torch.zeros(1, HEADS, 64, PAGE).transpose(2, 3)
    assert not native_sketch.supports(keys, torch.zeros(1, HEADS, 16, dtype=torch.uint8))
    assert not native_sketch.supports(keys.double().contiguous(), torch.zeros(1, HEADS, 16))
