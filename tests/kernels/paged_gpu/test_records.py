"""The kernels that write records, and what reads their bytes: interpreted or on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged.index.page_records import launch_write
from sparsek_kernels.paged.index.page_records.launch_write import write_records
from sparsek_kernels.paged.kernels.record import e5m2_code, of_e5m2_code, scale_of, size_of
from sparsek_kernels.paged.record import (
    code_scales,
    code_sizes,
    sections,
)
from sparsek_kernels.paged.write import launch as write_launch
from tests.kernels.paged.record_cases import (
    KINDS,
    UNWRITTEN,
    Pages,
    Write,
    check_decoded,
    make_pages,
    redraft,
    write_in_pieces,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def write_together(k_cache: torch.Tensor, k_summary: torch.Tensor, slots: torch.Tensor) -> None:
    """Rows and records by one launch: the step's rows are poison before."""
    page_size = k_cache.shape[2]
    here = slots >= 0
    at = slots[here] // page_size, slice(None), slots[here] % page_size
    key = k_cache.new_zeros(len(slots), k_cache.shape[1], k_cache.shape[3])
    key[here] = k_cache[at]
    k_cache[at] = float("nan")
    v_cache = torch.zeros_like(k_cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_launch, "TOGETHER", len(slots))
        write_launch.write_kv(key, 2 * key.float(), k_cache, v_cache, k_summary, slots)
    assert torch.equal(k_cache[at].float(), key[here].float())
    assert torch.equal(v_cache[at].float(), (2 * key[here].float()).to(v_cache.dtype).float())


both_writers = pytest.mark.parametrize("write", [write_records, write_together])


def check_bytes(pages: Pages, lengths: list[int], most: float = 1e-3) -> None:
    """Compare with torch's records: as good as all bytes, and what no program may have touched."""
    dim = pages.k_cache.shape[3]
    found, expected = (
        x[..., : sections(dim).end].cpu() for x in (pages.records, pages.expected(lengths))
    )
    written = (expected != UNWRITTEN).any(-1)
    assert torch.equal((found != UNWRITTEN).any(-1), written)
    differ = (found != expected)[written].double()
    assert differ.numel() == 0 or differ.mean() <= most, differ.mean()


@both_writers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (8, torch.bfloat16),
        (32, torch.float16),
        (64, torch.bfloat16),
        (80, torch.float32),
        (96, torch.bfloat16),
        (128, torch.bfloat16),
        (256, torch.float16),
        (512, torch.float32),
    ],
)
def test_the_kernel_writes_what_the_torch_path_writes(
    dim: int, dtype: torch.dtype, kind: str, write: Write
) -> None:
    lengths = [130, 64, 63]
    pages = make_pages(lengths, dim=dim, dtype=dtype, kind=kind, device=DEVICE)
    pages.step([0, 0, 0], lengths, write)
    check_bytes(pages, lengths)
    at = [int(pages.table[0, 0]), int(pages.table[0, 1]), int(pages.table[1, 0])]
    check_decoded(pages.records[at, :, 0].cpu(), pages.k_cache[at].cpu())


@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9), reason="needs sm_89"
)
@both_writers
def test_fp8_cache(write: Write) -> None:
    pages = make_pages([130, 64], dim=64, dtype=torch.float8_e4m3fn, device=DEVICE)
    pages.step([0, 0], [130, 64], write)
    check_bytes(pages, [130, 64])


@settings(deadline=None, max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 260), min_size=1, max_size=3),
    page_size=st.sampled_from([64, 128, 192]),
    head_major=st.booleans(),
    cuts=st.lists(st.sampled_from([5, 64, 130]), min_size=1, max_size=3),
    write=st.sampled_from([write_records, write_together]),
)
def test_the_same_records_in_any_order(
    lengths: list[int], page_size: int, head_major: bool, cuts: list[int], write: Write
) -> None:
    options = {"page_size": page_size, "head_major": head_major, "device": DEVICE}
    pieces, whole = (make_pages(lengths, heads=3, seed=1, **options) for _ in range(2))
    write_in_pieces(pieces, lengths, cuts, write)
    whole.step([0] * len(lengths), lengths, write_records)
    assert torch.equal(pieces.records, whole.records)
    check_bytes(whole, lengths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_both_kernels_write_the_same_bytes(dim: int, dtype: torch.dtype) -> None:
    """A page's record does not tell whether a prompt's chunk or a decoded token completed it."""
    lengths, found = [640, 130], []
    for write in (write_records, write_together):
        pages = make_pages(lengths, dim=dim, dtype=dtype, device=DEVICE)
        pages.step([0, 0], lengths, write)
        found.append(pages.records)
    assert torch.equal(*found)


@both_writers
def test_drafts_that_are_taken_back(write: Write) -> None:
    pages = make_pages([70, 140], device=DEVICE)
    pages.step([0, 0], [60, 127], write)
    pages.step([60, 127], [65, 132], write)
    first = pages.records.clone()
    check_bytes(pages, [65, 132])
    redraft(pages, 61, 128)
    pages.step([61, 128], [66, 133], write)
    check_bytes(pages, [66, 133])
    changed = (pages.records != first).flatten(1).any(1)
    assert changed.nonzero()[:, 0].tolist() == [int(pages.table[0, 0])]


@both_writers
def test_segments_on_pages_of_other_ranks(write: Write) -> None:
    pages = make_pages([260, 190], device=DEVICE)
    pages.table[:, 1] = -1
    pages.step([0, 0], [260, 190], write)
    check_bytes(pages, [260, 190])


@both_writers
def test_padding_writes_nothing(write: Write) -> None:
    pages = make_pages([64, 64], device=DEVICE)
    pages.step([0, 0], [64, 63], write)
    padding = torch.full((3,), -1, device=DEVICE)
    write(pages.k_cache, pages.k_summary, padding)
    check_bytes(pages, [64, 0])


def test_many_tokens_share_a_program() -> None:
    """Requests whose segments end anywhere among 64 neighbouring tokens, several ends of them."""
    lengths = [700, 65, 64, 130, 128]
    pages = make_pages(lengths, heads=1, device=DEVICE)
    before = [0, 60, 60, 60, 120]
    assert sum(lengths) - sum(before) < launch_write.ALONE
    pages.step([0] * 5, before, write_records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_write, "ALONE", 0)
        pages.step(before, lengths, write_records)
    check_bytes(pages, lengths)


@triton.jit
def _convert_kernel(x_ptr, code_ptr, back_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = e5m2_code(tl.minimum(tl.load(x_ptr + offs), 57344.0))
    tl.store(code_ptr + offs, code)
    tl.store(back_ptr + offs, of_e5m2_code(code).to(tl.float32))


def test_conversions_round_as_torch_does() -> None:
    """Every positive float16 number to e5m2, and numbers beside them."""
    halves = torch.arange(0, 31 << 10, dtype=torch.int16).view(torch.float16).float()
    x = torch.cat([halves, halves * 1.0001, halves * 0.9999]).to(DEVICE)
    back, codes = torch.empty_like(x), torch.empty_like(x, dtype=torch.int32)
    _convert_kernel[(len(x) // 512,)](x, codes, back, BLOCK=512)
    expected = x.cpu().clamp(max=57344.0).to(torch.float8_e5m2)
    assert torch.equal(codes.cpu().to(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(back.cpu(), expected.float())


@triton.jit
def _read_kernel(scale_ptr, size_ptr):
    code = tl.arange(0, 256)
    tl.store(scale_ptr + code, scale_of(code))
    tl.store(size_ptr + code, size_of(code))


def test_kernels_read_what_torch_reads() -> None:
    """Every code of a vector's scale and of a pair's size."""
    codes = torch.arange(256, dtype=torch.int32, device=DEVICE)
    scales, sizes = (torch.empty(256, device=DEVICE) for _ in range(2))
    _read_kernel[(1,)](scales, sizes)
    assert torch.equal(scales, code_scales(codes))
    assert torch.equal(sizes, code_sizes(codes))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("together", [False, True])
def test_graph_replay_with_other_slots(together: bool) -> None:
    lengths = [4097, 3000, 130, 64]
    pages = make_pages(lengths, heads=8, dim=128, device=DEVICE)
    pages.step([0] * 4, lengths, write_records)
    check_bytes(pages, lengths)
    slots = torch.full((4,), -1, device=DEVICE)
    key, value = pages.k_cache.new_zeros(4, 8, 128), torch.zeros_like(pages.k_cache)

    def call() -> None:
        if together:
            kept = (pages.k_cache, value, pages.k_summary)
            write_launch.write_kv(key, key, *kept, slots)
        else:
            write_records(pages.k_cache, pages.k_summary, slots)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for others in ([4096, 2944, 128, 64], [64, 1, 0, 63], [4095, 2945, 65, 64]):
        pages.k_summary.fill_(UNWRITTEN)
        for request, length in enumerate(others):
            slots[request] = -1
            if length:
                page, row = pages.slots(request, length - 1, length)
                slots[request] = page[0] * 64 + row[0]
                key[request] = pages.k_cache[page[0], :, row[0]]
        graph.replay()
        whole = pages.expected(others)
        for request, length in enumerate(others):
            for segment in range(length // 64):
                page = int(pages.table[request, segment])
                if (segment + 1) * 64 != length:
                    whole[page] = UNWRITTEN
        end = sections(128).end
        assert (pages.records != whole)[..., :end].double().mean() <= 1e-3
