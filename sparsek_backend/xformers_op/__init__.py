"""SparseK's kernels behind xFormers' ``memory_efficient_attention``.

Needs the ``xformers`` extra.  docs/drop_ins.md shows each name in use.
"""

from __future__ import annotations

from sparsek_backend.xformers_op.biases import BlockSparseMask, SinkWindowMask
from sparsek_backend.xformers_op.install import Installation, install, installed, uninstall
from sparsek_backend.xformers_op.legacy import AttentionMask, SparseKAttention
from sparsek_backend.xformers_op.op import BwOp, FwOp

__all__ = [
    "AttentionMask",
    "BlockSparseMask",
    "BwOp",
    "FwOp",
    "Installation",
    "SinkWindowMask",
    "SparseKAttention",
    "install",
    "installed",
    "uninstall",
]
