"""Launch of the Hopper kernel: tensor descriptors and a persistent grid."""

from __future__ import annotations

import torch
import triton

from sparsek_kernels.block_sparse.config import HopperForward
from sparsek_kernels.block_sparse.kernels.fwd_sm90 import block_sparse_hopper_fwd_kernel
from sparsek_kernels.block_sparse.kernels.item_queue import block_sparse_queue_kernel
from sparsek_kernels.block_sparse.problem import BlockSparseProblem
from sparsek_kernels.common.descriptors import describe, describe_boxes
from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.kernels.softmax import LOG2E


def forward(
    problem: BlockSparseProblem, config: HopperForward, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Run the warp-specialised forward kernel."""
    q, k, v, shape = problem.q, problem.k, problem.v, problem.shape
    num_rows = problem.crow_indices.shape[1] - 1
    heads = 128 // shape.block_size
    num_items = q.shape[0] * num_rows * shape.num_kv_heads * triton.cdiv(shape.group, heads)
    q_desc, q_rows, q_cols = describe(q, 64, 64)
    k_desc, k_rows, k_cols = describe(k, shape.block_size, 64)
    v_desc, v_rows, v_cols = describe(v, shape.block_size, 64)
    patterns = problem.crow_indices.shape[0]
    queue = torch.empty(1 + patterns * num_rows, dtype=torch.int32, device=q.device)
    block_sparse_queue_kernel[(triton.cdiv(num_rows, 64), patterns)](
        queue, problem.crow_indices, num_rows, ROWS=64, SCAN=128, num_warps=4
    )
    block_sparse_hopper_fwd_kernel[(min(num_items, multiprocessors(q.device)),)](
        lse, describe_boxes(out, 64, 1, 64), q_desc, k_desc, v_desc, problem.crow_indices,
        problem.col_indices, queue, problem.softmax_scale * LOG2E.value,
        q_rows, k_rows, v_rows, q_cols, k_cols, v_cols, q.shape[1], shape.num_k, num_rows,
        shape.num_kv_heads, num_items, shape.pattern_heads,
        GROUP=shape.group, HEAD_DIM=shape.head_dim, CAUSAL=problem.causal, BLOCK=shape.block_size,
        STAGES=config.stages, TURNS=config.turns, POLYNOMIAL=config.polynomial, num_warps=4,
    )  # fmt: skip
