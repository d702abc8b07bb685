"""Records of segments: their bytes, how near they come, and writing them on a CPU in any order."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import PageRecords, SelectionPolicy, write_index, write_kv
from sparsek_kernels.paged.index.page_records import write_records as write
from sparsek_kernels.paged.record import (
    encode,
    page_bytes,
    read_means,
    read_variances,
    read_vectors,
    record_bytes,
    view_records,
)
from sparsek_kernels.paged.record_reference import e5m2_reference, short_float_reference
from tests.kernels.paged.record_cases import (
    KINDS,
    check_decoded,
    make_pages,
    redraft,
    segments,
    write_in_pieces,
)

POLICY = SelectionPolicy(num_sink=64, window_size=64, top_k=4).by_records(64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [8, 32, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_records_equal_the_oracle(kind: str, dim: int, dtype: torch.dtype) -> None:
    keys = segments(kind, (3, 2), dim, dtype)
    records = encode(keys)
    assert records.shape == (3, 2, record_bytes(dim))
    check_decoded(records, keys)


def short_float(code: int) -> float:
    return (1 + (code & 15) / 16) * 2.0 ** ((code >> 4) - 8) if code else 0.0


def decoded_by_hand(record: bytes, dim: int) -> tuple[list[list[float]], list[float]]:
    """Vectors and variances of a record, byte by byte as the table says."""
    half, quarter = dim // 2, dim // 4
    center = struct.unpack(f"<{dim}e", record[8 * dim : 10 * dim])
    base = record[43 * quarter + 32]
    sizes = []
    for pair in range(half):
        code = base - (record[21 * half + pair % quarter] >> (4 * (pair // quarter)) & 15)
        sizes.append((1.5 if code % 2 else 1.0) * 2.0 ** (code // 2 - 64))
    vectors = []
    for vector in range(32):
        scale = short_float(record[43 * quarter + vector])
        row = []
        for channel in range(dim):
            byte, plane = record[vector * quarter + channel % quarter], channel // quarter
            level = (1, 3, -3, -1)[byte >> (6 - 2 * plane) & 3]
            row.append(center[channel] + scale * level * sizes[channel % half])
        vectors.append(row)
    variances = []
    for code in record[10 * dim : 10 * dim + half]:
        exponent, fraction = code >> 2, code & 3
        variances.append(
            (1 + fraction / 4) * 2.0 ** (exponent - 15) if exponent else fraction / 65536
        )
    return vectors, variances


@pytest.mark.parametrize("kind", ["normal", "massive"])
@pytest.mark.parametrize("dim", [8, 80, 128])
def test_bytes_lie_where_the_table_says(dim: int, kind: str) -> None:
    record = encode(segments(kind, (), dim, torch.bfloat16))
    vectors, variances = decoded_by_hand(bytes(record.tolist()), dim)
    torch.testing.assert_close(read_vectors(record, dim), torch.tensor(vectors))
    torch.testing.assert_close(read_variances(record, dim), torch.tensor(variances))
    assert (record[43 * dim // 4 + 33 :] == 0).all()


@pytest.mark.parametrize(("kind", "most"), [("normal", 0.4), ("massive", 0.6), ("offset", 0.4)])
def test_two_bits_keep_most_of_a_vector(kind: str, most: float) -> None:
    """Of what a vector has beside its segment's mean, pair by pair."""
    keys = segments(kind, (16,), 128, torch.bfloat16)
    records = encode(keys)
    exact = keys.double().unflatten(1, (32, 2)).mean(2)
    rest = (exact - read_means(records, 128).double()[:, None]).square().sum((0, 1))
    error = (read_vectors(records, 128).double() - exact).square().sum((0, 1))
    assert error.sum() <= most**2 * rest.sum()
    if kind != "massive":  # there the other channel is far below its pair's size
        assert (error <= (1.5 * most) ** 2 * rest).all()


def test_rounding_of_the_oracle() -> None:
    every = torch.arange(1, 1 << 15, dtype=torch.int16).view(torch.float16).double()
    every = every[every.isfinite()]
    expected = every.clamp(max=57344.0).float().to(torch.float8_e5m2).double()
    assert torch.equal(e5m2_reference(every), expected)
    codes = torch.tensor([short_float(code) for code in range(256)], dtype=torch.float64)
    assert torch.equal(short_float_reference(codes), codes)
    between = (codes[1:-1] + codes[2:]) / 2
    assert torch.equal(short_float_reference(between * 0.9999), codes[1:-1])
    assert torch.equal(short_float_reference(between), codes[2:])


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    page_size=st.sampled_from([64, 128, 192]),
    head_major=st.booleans(),
    cuts=st.lists(st.sampled_from([1, 5, 63, 64, 130]), min_size=1, max_size=4),
)
def test_the_same_records_in_any_order(
    lengths: list[int], page_size: int, head_major: bool, cuts: list[int]
) -> None:
    pages = make_pages(lengths, page_size=page_size, head_major=head_major, seed=sum(lengths))
    write_in_pieces(pages, lengths, cuts, write)
    assert torch.equal(pages.records, pages.expected(lengths))


def test_drafts_that_are_taken_back() -> None:
    pages = make_pages([70, 140])
    pages.step([0, 0], [60, 127], write)
    pages.step([60, 127], [65, 132], write)
    first = pages.expected([65, 132])
    assert torch.equal(pages.records, first)
    redraft(pages, 61, 128)
    pages.step([61, 128], [66, 133], write)
    assert torch.equal(pages.records, pages.expected([66, 133]))
    changed = (pages.records != first).flatten(1).any(1)
    assert changed.nonzero()[:, 0].tolist() == [int(pages.table[0, 0])]


def test_segments_on_pages_of_other_ranks() -> None:
    pages = make_pages([260, 190])
    pages.table[:, 1] = -1
    pages.step([0, 0], [260, 190], write)
    assert torch.equal(pages.records, pages.expected([260, 190]))


def test_bytes_of_a_page() -> None:
    assert record_bytes(128) == 1424
    assert record_bytes(8) == 128
    assert PageRecords().page_bytes(192, 128) == page_bytes(192, 128) == 3 * 1424
    for page_size in (16, 32, 96, 0):
        with pytest.raises(ValueError, match=f"page_size: .* multiple of 64 .*, got {page_size}; "):
            page_bytes(page_size, 128)
    for dim in (68, 520):
        with pytest.raises(NotImplementedError, match="head_dim: selecting blocks needs a mult"):
            page_bytes(64, dim)


def test_what_does_not_fit() -> None:
    pages = make_pages([70])
    rows = pages.keys[0][:1], pages.keys[0][:1]
    k_cache, k_summary = pages.k_cache, pages.k_summary
    v_cache = torch.empty_like(k_cache)
    least, slots = page_bytes(64, 32), torch.tensor([5])
    with pytest.raises(ValueError, match=f"k_summary: expected at least {least} bytes .*, got 16"):
        write_kv(*rows, k_cache, v_cache, k_summary[..., :16], slots)
    moved = torch.zeros(4, 2, least + 8, dtype=torch.uint8)[..., 8:]
    with pytest.raises(ValueError, match=r"k_summary: .* at multiples of 16 bytes, got offset 8"):
        write_kv(*rows, k_cache, v_cache, moved, slots)
    with pytest.raises(ValueError, match=r"v_cache: expected rows as wide as .* 24"):
        write_kv(rows[0], rows[1][..., :24], k_cache, v_cache[..., :24], k_summary, slots)
    with pytest.raises(ValueError, match="page_size: expected a multiple of 64"):
        write_kv(*rows, k_cache[:, :, :32], v_cache[:, :, :32], k_summary, slots)
    with pytest.raises(ValueError, match="policy: expected query_tile = 1 with PageRecords, got"):
        PageRecords().check(SelectionPolicy(window_size=64, top_k=4), k_cache)
    batch = pages.batch([0], [70])
    with pytest.raises(ValueError, match="index: expected one that write_kv does not serve, got P"):
        write_index(k_cache, v_cache, k_summary, batch, POLICY, PageRecords())


def test_padding_writes_nothing() -> None:
    pages = make_pages([64, 64])
    pages.step([0, 0], [64, 63], write)
    write(pages.k_cache, pages.k_summary, torch.tensor([-1, -1]))
    assert torch.equal(pages.records, pages.expected([64, 0]))


def test_more_bytes_than_needed() -> None:
    pages = make_pages([200])
    wide = torch.full((*pages.k_summary.shape[:2], 2000), 255, dtype=torch.uint8)
    pages.k_summary = wide
    pages.step([0], [200], write)
    assert torch.equal(view_records(wide, 64, 32), pages.expected([200]))
    assert (wide[..., page_bytes(64, 32) :] == 255).all()
