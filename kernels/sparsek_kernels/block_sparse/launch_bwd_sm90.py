"""Launches of the Hopper backward kernels: descriptors, and a plan that evens out columns."""

from __future__ import annotations

import torch
import triton

from sparsek_kernels.block_sparse.config import HopperBackward, ProblemShape
from sparsek_kernels.block_sparse.kernels.bwd_dkdv_sm90 import block_sparse_hopper_dkdv_kernel
from sparsek_kernels.block_sparse.kernels.bwd_dq_sm90 import block_sparse_hopper_dq_kernel
from sparsek_kernels.block_sparse.kernels.bwd_parts import block_sparse_bwd_parts_kernel
from sparsek_kernels.block_sparse.problem import BlockSparseProblem
from sparsek_kernels.common.descriptors import describe_boxes
from sparsek_kernels.common.device import multiprocessors

_TILE = 64
_PART_ROWS = 32
_PART_ELEMENTS = 1 << 29
"""Most fp32 elements (2 GiB) of the sums of cut columns."""


def most_entries(
    shape: ProblemShape, batch: int, num_blocks: int, config: HopperBackward, num_sms: int
) -> int:
    """Query blocks that a program for keys takes at most."""
    kv_heads = max(shape.pattern_heads // shape.group, 1)
    even: int = triton.cdiv(num_blocks * kv_heads * batch, config.shares * num_sms)
    return max(even, config.least_entries)


def most_parts(num_columns: int, num_blocks: int, most: int, all_in_parts: bool) -> int:
    """Parts that may be needed; ``num_columns`` and ``num_blocks`` are of all patterns together."""
    return num_columns + num_blocks // most if all_in_parts else 2 * (num_blocks // most)


def fits(problem: BlockSparseProblem, config: HopperBackward) -> bool:
    """Whether the sums of cut columns find room: 2 GiB.

    Where query heads of a group have patterns of their own, every column is summed up from parts.
    """
    shape, batch = problem.shape, problem.q.shape[0]
    columns = shape.num_patterns * (problem.ccol_indices.shape[1] - 1)
    num_blocks, num_sms = problem.row_indices.shape[0], multiprocessors(problem.q.device)
    most = most_entries(shape, batch, num_blocks, config, num_sms)
    parts = most_parts(columns, num_blocks, most, shape.group > shape.pattern_heads)
    copies = max(shape.pattern_heads // shape.group, 1) * batch
    return parts * copies * 2 * shape.block_size * shape.head_dim <= _PART_ELEMENTS


def plan_columns(
    ccol_indices: torch.Tensor, num_blocks: int, most: int, all_in_parts: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Cut the columns of every pattern, ``num_blocks`` entries, into slots of up to ``most``.

    The first column of every pattern comes first, then the second of every pattern, and so on:
    under causality the first columns have the longest lists.  A column without entries has one
    slot too.

    Returns ``(ends, columns, num_parts)``, int32: ``ends [2, columns * patterns]`` where the slots
    of ``column * patterns + pattern`` end, and its parts, which are the slots of a column that has
    several or, with ``all_in_parts``, of any; that number for each slot, of which there are as
    many as may be needed, with one past the last for those in excess; and parts that may be needed.
    """
    lengths = ccol_indices.diff(dim=1).t().flatten()
    slots = ((lengths + (most - 1)) // most).clamp_(min=1)
    parts = slots if all_in_parts else slots * (slots > 1)
    ends = torch.stack((slots, parts)).cumsum(1, dtype=torch.int32)
    num_slots = slots.numel() + num_blocks // most
    every = torch.arange(num_slots, dtype=torch.int32, device=ends.device)
    columns = torch.searchsorted(ends[0], every, right=True, out_int32=True)
    return ends, columns, most_parts(slots.numel(), num_blocks, most, all_in_parts)


def backward(
    problem: BlockSparseProblem,
    config: HopperBackward,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> None:
    """Fill ``dq, dk, dv`` of boxable inputs; ``dk`` and ``dv`` have the same strides."""
    q, k, shape, scale = problem.q, problem.k, problem.shape, problem.softmax_scale
    dq, dk, dv = grads
    batch, num_q = q.shape[:2]
    rules = {
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "CAUSAL": problem.causal,
        "BLOCK": shape.block_size,
        "num_warps": 4,
    }
    boxes = [describe_boxes(x, _TILE, 1, shape.head_dim) for x in (q, dout, k, problem.v)]
    num_rows = problem.crow_indices.shape[1] - 1
    members = triton.cdiv(shape.group, 128 // shape.block_size)
    num_items = batch * num_rows * shape.num_kv_heads * members
    block_sparse_hopper_dq_kernel[(min(num_items, multiprocessors(q.device)),)](
        dq, *boxes, lse, delta, problem.crow_indices, problem.col_indices, scale,
        *dq.stride()[:3], num_q, shape.num_k, num_rows, shape.num_kv_heads, num_items,
        shape.pattern_heads, **rules, STAGES=config.dq_stages,
    )  # fmt: skip

    num_patterns, num_cols = shape.num_patterns, problem.ccol_indices.shape[1] - 1
    lists = max(shape.group // shape.pattern_heads, 1)
    pattern_kv_heads = max(shape.pattern_heads // shape.group, 1)
    num_blocks = problem.row_indices.shape[0]
    most = most_entries(shape, batch, num_blocks, config, multiprocessors(q.device))
    ends, columns, num_parts = plan_columns(problem.ccol_indices, num_blocks, most, lists > 1)
    copies, num_slots = pattern_kv_heads * batch, columns.shape[0]
    size = (max(num_parts * copies, 1), 2, shape.block_size, shape.head_dim)
    part = torch.empty(size, dtype=torch.float32, device=q.device)
    block_sparse_hopper_dkdv_kernel[(num_slots * copies,)](
        dk, dv, part, *boxes, lse, delta, problem.ccol_indices, problem.row_indices, ends, columns,
        scale, *dk.stride()[:3], num_q, shape.num_k, shape.num_heads, num_cols, num_patterns,
        num_slots, num_parts, shape.pattern_heads, pattern_kv_heads,
        **rules, HEADS=min(shape.group, shape.pattern_heads), STAGES=config.dkdv_stages,
        HELD=config.dkdv_held,
    )  # fmt: skip
    if num_parts:
        shares = shape.block_size // _PART_ROWS
        block_sparse_bwd_parts_kernel[(num_cols * shares, shape.num_kv_heads, batch)](
            dk, dv, part, ends[1], scale, *dk.stride()[:3], num_patterns, num_parts,
            pattern_kv_heads, LISTS=lists, BLOCK=shape.block_size, HEAD_DIM=shape.head_dim,
            ROWS=_PART_ROWS, num_warps=4,
        )  # fmt: skip
