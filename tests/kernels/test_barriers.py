"""The check that compiled kernels keep their barriers: what it lets pass and what it finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sparsek_kernels
from tests.kernels.barriers import require_lasting_barriers, short_lived_barriers

KEPT = """
    %full = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared1, #smem, mutable>
    %0 = ttg.memdesc_index %full[%c0_i32] : !ttg.memdesc<2x1xi64, #shared1, #smem, mutable>
    ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64, #shared1, #smem, mutable>
    ttg.warp_specialize(%out_ptr, %full) attributes {requestedRegisters = array<i32: 24>}
"""
FORGOTTEN = """
    %spare = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared1, #smem, mutable>
    ttng.init_barrier %spare, 1 : !ttg.memdesc<1xi64, #shared1, #smem, mutable>
"""
INVALIDATED = "    ttng.inval_barrier %spare : !ttg.memdesc<1xi64, #shared1, #smem, mutable>\n"


def test_barriers_of_the_partitions_last() -> None:
    assert short_lived_barriers(KEPT) == []
    assert short_lived_barriers("%x = ttg.local_alloc : () -> !ttg.memdesc<64x64xbf16>") == []


def test_other_64_bit_data_is_no_barrier() -> None:
    assert short_lived_barriers("%x = ttg.local_alloc : () -> !ttg.memdesc<16x4xi64>") == []


def test_a_forgotten_barrier_is_found() -> None:
    assert short_lived_barriers(FORGOTTEN + KEPT) == ["%spare"]
    assert short_lived_barriers(FORGOTTEN + KEPT + INVALIDATED) == []
    with pytest.raises(RuntimeError, match="some_kernel: %spare may share memory"):
        require_lasting_barriers("some_kernel", FORGOTTEN + KEPT)


def test_text_without_allocations_is_refused() -> None:
    with pytest.raises(ValueError, match="expected barriers to be allocated"):
        short_lived_barriers("ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64>")


def test_kernels_take_names_that_versions_of_triton_differ_in_from_one_place() -> None:
    place = "common/kernels/gluon_names.py"
    differing = re.compile(
        r"gl\.(thread_)?barrier\b|\.async_copy_\w+_to_|\b(tma|async_copy)\.async_|\._?reinterpret\b"
    )
    root = Path(sparsek_kernels.__file__).parent
    users = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if differing.search(path.read_text(encoding="utf-8"))
    ]
    assert users == [place]
