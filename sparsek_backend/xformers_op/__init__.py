"""SparseK's kernels behind xFormers' ``memory_efficient_attention``.

Import this with the ``xformers`` extra installed; the names below are all there is to know.
"""

from __future__ import annotations

from sparsek_backend.xformers_op.biases import SinkWindowMask
from sparsek_backend.xformers_op.op import BwOp, FwOp

__all__ = ["BwOp", "FwOp", "SinkWindowMask"]
