"""Measured limits of the device: bandwidth of memory, rate of matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsek_backend.bench.timing import make_timed, time_interleaved


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of the device: TB/s of a large copy (reads plus writes) and of a large read,
    TFLOP/s of a large matmul per dtype name."""

    copy_tb_s: float
    read_tb_s: float
    matmul_tflops: dict[str, float]

    def roofline_ms(self, flops: float, num_bytes: float, dtype: str, *, reads_only: bool) -> float:
        """The least time the measured limits allow."""
        bandwidth = self.read_tb_s if reads_only else self.copy_tb_s
        return max(flops / self.matmul_tflops[dtype], num_bytes / bandwidth) / 1e9


def measure_ceilings(device: torch.device, dtypes: list[torch.dtype]) -> Ceilings:
    """Measure copy and read bandwidth and the matmul rate of each dtype, on random data."""
    is_cuda = device.type == "cuda"

    def ms(fn: Callable[[], object]) -> float:
        timed = make_timed(fn, timing="cold", device=device, graph=False)
        return time_interleaved([timed], device=device, budget_ms=60)[0].median_ms

    source = torch.randn(1 << (28 if is_cuda else 22), device=device)
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    copy_tb_s = 2 * num_bytes / ms(functools.partial(target.copy_, source)) / 1e9
    matrix, vector = source.view(1 << 12, -1), source[: source.numel() >> 12]
    read_ms = min(ms(source.sum), ms(functools.partial(torch.mv, matrix, vector)))
    read_tb_s = num_bytes / read_ms / 1e9
    del source, target, matrix, vector
    rates = {}
    side = 8192 if is_cuda else 512
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        elapsed = ms(functools.partial(torch.mm, a, b))
        rates[str(dtype).removeprefix("torch.")] = 2 * side**3 / elapsed / 1e9
    return Ceilings(copy_tb_s, max(read_tb_s, copy_tb_s), rates)
