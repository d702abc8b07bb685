"""Forward launches of selected attention.

Few tokens are served token-major: programs walk the blocks of their tokens.  Many are served
block-major: the inverse index lists the queries of each block, one kernel writes their parts of the
output block by block, another attends to the near blocks of each token and adds its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparsek_kernels.common.alignment import boxable
from sparsek_kernels.common.descriptors import describe_boxes, tile_layout
from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.grids import tile_grid
from sparsek_kernels.common.operators import pointers
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import next_power_of_2, octet_strides
from sparsek_kernels.nsa.config import BOX_GROUPS, TileConfig
from sparsek_kernels.nsa.gate import launch as launch_gate
from sparsek_kernels.nsa.selected.index import sort_selection
from sparsek_kernels.nsa.selected.kernels.fwd_combine import nsa_selected_combine_kernel
from sparsek_kernels.nsa.selected.kernels.fwd_combine_sm90 import nsa_selected_hopper_combine_kernel
from sparsek_kernels.nsa.selected.kernels.fwd_parts import nsa_selected_part_kernel
from sparsek_kernels.nsa.selected.kernels.fwd_parts_sm90 import nsa_selected_hopper_part_kernel
from sparsek_kernels.nsa.selected.kernels.fwd_parts_tma_sm90 import (
    nsa_selected_hopper_tma_part_kernel,
)
from sparsek_kernels.nsa.selected.kernels.fwd_tokens import nsa_selected_tokens_kernel
from sparsek_kernels.nsa.selected.plan import Chunk, LaunchPlan
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.selected.share import Shared, share_blocks

_MASK_BITS = 32  # one word marks which blocks of a token have parts
_REGISTERS = 128  # of a thread in the kernel of parts: two programs share a multiprocessor


def forward(problem: SelectedProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill contiguous ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]``.

    Many tokens have ``problem.index`` filled too; few have backward sort them.
    """
    if out.numel() == 0:
        return
    if problem.top_n == 0:
        out.zero_()
        lse.fill_(float("-inf"))
        return
    if problem.config.token_major:
        _forward_tokens(problem, out, lse)
    else:
        _forward_blocks(problem, out, lse)


def forward_gated(
    problem: SelectedProblem,
    out: torch.Tensor,
    others: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
) -> None:
    """Fill ``out`` with the gated sum of the compressed, the selected and the sliding branch.

    ``out`` and ``others``, the outputs of the compressed and the sliding branch, are contiguous
    ``[B, N, Hq, D]``; the three ``gates`` are ``[B, N, Hq]``.
    """
    gates = [x.contiguous() for x in gates]
    if out.numel() and problem.top_n and not problem.config.token_major:
        _forward_blocks(problem, out, None, (*others, *gates))
        return
    batch, num_q, num_heads, _ = out.shape
    out_slc = torch.empty_like(out)
    lse = torch.empty((batch, num_heads, num_q), dtype=torch.float32, device=out.device)
    forward(problem, out_slc, lse)
    launch_gate.forward(out, (others[0], out_slc, others[1]), gates)


def _forward_tokens(problem: SelectedProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    shape, tile = problem.shape, problem.config.tokens
    block_t = problem.tile_tokens(tile.block_m)
    grid, tiles = tile_grid(
        problem.cu_seqlens, shape.num_q, block_t, shape.num_kv_heads, shape.batch
    )
    run(
        nsa_selected_tokens_kernel, grid,
        out, lse, problem.q, problem.k, problem.v, problem.block_indices,
        *pointers(problem.q, problem.cu_seqlens, tiles), problem.softmax_scale,
        *problem.q.stride(), *problem.k.stride(), *problem.v.stride(),
        shape.num_q, shape.num_k, problem.offset, shape.num_kv_heads,
        **problem.portable_rules, TOP_N=problem.top_n, BLOCK_T=block_t,
        BLOCK_S=next_power_of_2(problem.top_n), num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


def _combine_tile(problem: SelectedProblem) -> TileConfig | None:
    """Tile of Hopper's kernel that adds the parts up, where it can."""
    if next_power_of_2(problem.top_n) > _MASK_BITS:
        return None
    return problem.sm90_tile(problem.config.combine_hopper, problem.q, problem.k, problem.v)


def _forward_blocks(
    problem: SelectedProblem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    gated: Sequence[torch.Tensor] = (),
) -> None:
    """Fill ``out`` and ``lse``, or, without ``lse``, fill ``out`` with the gated sum of branches.

    ``gated``: the outputs of the compressed and the sliding branch, then the three gates.
    """
    config = problem.config
    together = -(-config.chunk_rows // config.index_rows)
    tile = _combine_tile(problem)
    shared = None if tile is None else share_blocks(problem, tile, together)
    keys = None if shared is None else shared.keys
    kept = problem.new_index() if problem.index is None else problem.index
    index = sort_selection(problem, kept, keys)
    plan = LaunchPlan(problem, index, together)
    part = torch.empty(plan.part_shape, dtype=out.dtype, device=out.device)
    part_lse = torch.empty(plan.part_shape[:2], dtype=torch.float32, device=out.device)
    write_parts = _part_writer(plan, part, part_lse)
    combine = _combiner(plan, part, part_lse, out, lse, gated, tile, shared)
    for chunk in plan.chunks():
        write_parts(chunk)
        combine(chunk)


def _part_writer(
    plan: LaunchPlan, part: torch.Tensor, part_lse: torch.Tensor
) -> Callable[[Chunk], None]:
    """The launch of the kernel that writes the parts of a chunk."""
    problem, config, group = plan.problem, plan.problem.config, plan.problem.shape.group
    q, k, v = problem.q, problem.k, problem.v
    kernel: Any
    tensors: tuple[Any, ...] = (part, q, k, v)
    strides: tuple[int, ...] = ()
    boxes = config.selected_boxes
    whole = problem.sel_block_size == 64 and group in BOX_GROUPS
    if boxes is not None and whole and boxable(q, k, v):
        kernel = nsa_selected_hopper_tma_part_kernel
        rows = (describe_boxes(x, 1, group, 64) for x in (part[None], q))
        keys = (describe_boxes(x, 64, 1, problem.shape.head_dim) for x in (k, v))
        tensors = (*rows, *keys)
        options = plan.sm90_options(boxes, boxes.max_registers)
    elif (tile := problem.sm90_tile(config.selected_hopper, q, k, v)) is not None:
        kernel, strides = nsa_selected_hopper_part_kernel, octet_strides(q, k, v)
        options = {**plan.sm90_options(tile, _REGISTERS), "BLOCK_G": problem.shape.padded_group}
    else:
        kernel, strides = nsa_selected_part_kernel, (*q.stride(), *k.stride(), *v.stride())
        options = plan.portable_options(config.selected)

    def launch(chunk: Chunk) -> None:
        run(
            kernel, (chunk.items,),
            tensors[0], part_lse, *tensors[1:], *plan.item_tensors, problem.softmax_scale,
            *strides, *plan.item_sizes(chunk),
            **options,
        )  # fmt: skip

    return launch


def _combiner(
    plan: LaunchPlan,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    gated: Sequence[torch.Tensor],
    sm90: TileConfig | None,
    shared: Shared | None,
) -> Callable[[Chunk], None]:
    """The launch of the kernel that attends to near blocks and adds the parts of a chunk.

    ``sm90`` is the tile of Hopper's kernel, which attends to ``shared`` blocks too.
    """
    problem, config, shape = plan.problem, plan.problem.config, plan.problem.shape
    q, k, v = problem.q, problem.k, problem.v
    cu_first = problem.cu_seqlens
    if cu_first is None and shape.batch > 1:
        cu_first = torch.arange(shape.batch + 1, dtype=torch.int32, device=q.device) * shape.num_q
    kernel: Any
    options: dict[str, Any] = {"TOP_N": problem.top_n, "MAPPED": cu_first is not None}
    block_s = next_power_of_2(problem.top_n)
    boxes = shared is not None and boxable(k, v)
    keys: Any = (k, v)
    if boxes:
        keys = [describe_boxes(x, 64, 1, shape.head_dim) for x in keys]
    if sm90 is not None:
        kernel, strides = nsa_selected_hopper_combine_kernel, octet_strides(q, k, v)
        block_t = sm90.block_m // shape.padded_group
        options |= {
            **problem.rules,
            "BLOCK_G": shape.padded_group,
            "Q_LAYOUT": tile_layout(sm90.block_m, shape.head_dim, q.dtype),
            "BLOCK_S": max(block_s, 16),
            "SHARED": shared is not None,
            "BOXES": boxes,
            "MOST": 1 if shared is None else shared.lists.shape[2],
            "STAGES": sm90.num_stages,
            "num_warps": sm90.num_warps,
            "maxnreg": sm90.max_registers,
        }
    else:
        tile = config.combine
        kernel, strides = nsa_selected_combine_kernel, (*q.stride(), *k.stride(), *v.stride())
        block_t = problem.tile_tokens(tile.block_m)
        options |= {
            **problem.portable_rules,
            "BLOCK_T": block_t,
            "BLOCK_S": block_s,
            "NUM_STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
        }

    def launch(chunk: Chunk) -> None:
        last_row = chunk.first_row + chunk.num_rows
        cu_rows = None if cu_first is None else cu_first.clamp(chunk.first_row, last_row)
        grid, tiles = tile_grid(cu_rows, chunk.num_rows, block_t, shape.num_kv_heads, 1)
        counts: tuple[int, ...] = ()
        tables: tuple[Any, ...] = ()
        if sm90 is not None:  # persistent programs
            tables, first_tile = (q,) * 3, 0
            if shared is not None:
                tables = (shared.far, shared.lists, shared.counts)
                first_tile = shared.first_tile(chunk.first_row)
            tables = (*tables, *keys)
            counts = (grid[0], grid[0] * grid[1], first_tile)
            grid = (min(counts[1], 2 * multiprocessors(q.device)), 1, 1)
        run(
            kernel, grid,
            out, out if lse is None else lse, part, part_lse, q, k, v, *(gated or (q,) * 5),
            problem.block_indices, *pointers(problem.q, cu_rows, cu_first, tiles),
            *tables, problem.softmax_scale,
            *strides,
            chunk.first_row, chunk.num_rows, shape.num_q, shape.num_k, problem.offset,
            shape.num_kv_heads, *counts,
            GATED=lse is None, **options,
        )  # fmt: skip

    return launch
