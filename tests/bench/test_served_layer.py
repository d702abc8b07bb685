"""benchmarks/served_layer.py: layers are found in what a profiler notes, and told apart."""

from __future__ import annotations

import pytest

from benchmarks.served_layer import Kernel, layers_of, summarise

WRITE, ATTEND, PROJECT = "write_kv_kernel", "attend_kernel", "nvjet_sm90_tst"


def layer(start: float, attend: float) -> list[Kernel]:
    """The kernels of a layer: attention begins while rows are written."""
    write = Kernel(WRITE, start + 5.5, 1.5)
    begin = write.begin + 1.0
    last = Kernel(PROJECT, begin + attend + 0.5, 8.0)
    return [Kernel("rotation", start, 5.0), write, Kernel(ATTEND, begin, attend), last]


def test_a_span_has_its_gaps_and_overlaps() -> None:
    (span, inside), *rest = layers_of(layer(100.0, 10.0))
    assert not rest
    assert span == pytest.approx(12.0)  # 0.5 idle, 1.0 of the write, 10.0, 0.5 idle
    assert [kernel.name for kernel in inside] == [WRITE, ATTEND]
    assert [kernel.begin for kernel in inside] == pytest.approx([0.5, 1.5])


def test_medians_of_layers() -> None:
    kernels = [kernel for i in range(5) for kernel in layer(100.0 * i, 10.0 + i)]
    found = summarise(kernels)
    assert (found["layers"], found["span_us"]) == (5, 14.0)
    assert (found["span_p20_us"], found["span_p80_us"]) == (13.0, 15.0)
    assert found["kernels"][1] == {"name": ATTEND, "begin_us": 1.5, "duration_us": 12.0}


def test_a_layer_that_was_cut_off_is_none() -> None:
    whole = layer(0.0, 10.0)
    assert summarise([*whole, *layer(100.0, 10.0)[:-1]])["layers"] == 1


def test_layers_of_other_kernels_are_left_out() -> None:
    usual = [*layer(0.0, 10.0), *layer(100.0, 10.0)]
    other = [kernel for kernel in layer(200.0, 90.0) if kernel.name != ATTEND]
    found = summarise([*usual, *other])
    assert (found["layers"], found["span_us"]) == (2, 12.0)
    assert len(found["kernels"]) == 2


@pytest.mark.parametrize("kernels", [[], layer(0.0, 1.0)[2:]])
def test_no_layer_is_refused(kernels: list[Kernel]) -> None:
    with pytest.raises(ValueError, match="kernels of whole layers, found none"):
        summarise(kernels)
