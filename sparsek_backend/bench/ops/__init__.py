"""The ops that `sparsek bench kernels` measures."""

from __future__ import annotations

from sparsek_backend.bench.ops import block_sparse, nsa_decode, paged, sink_window
from sparsek_backend.bench.registry import BenchOp

OPS: dict[str, BenchOp] = {
    op.name: op for op in (*block_sparse.OPS, *nsa_decode.OPS, *paged.OPS, *sink_window.OPS)
}
"""By the name that workloads give them."""
