"""Launching the second step of a tile's selection: candidates, ranked by exact masses.

A program reads each key once for all its rows; programs share lists until they fill the device.
"""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.common.device import device_arch, multiprocessors
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.cache_sm90 import describe_cache, is_matrix, tensor_cores_take
from sparsek_kernels.paged.config import TileConfig, largest_part, next_power_of_2
from sparsek_kernels.paged.index.problem import Selection, Step
from sparsek_kernels.paged.index.two_step.config import listed_config, listed_shares, rank_rows
from sparsek_kernels.paged.index.two_step.kernels import probabilities_sm90 as sm90
from sparsek_kernels.paged.index.two_step.kernels.probabilities import (
    listed_masses_kernel,
    rank_blocks_kernel,
)
from sparsek_kernels.paged.policy import ceil_div
from sparsek_kernels.paged.scratch import overlap_options, workspace

_BLOCK, _STREAMS = sm90.BLOCK.value, sm90.STREAMS.value
_ROWS = 2 * sm90.ROWS.value
"""Rows of a stream of the kernel for Hopper: two warpgroups multiply them."""


def list_config(call: Selection) -> tuple[TileConfig, int]:
    """Tile sizes of the kernel of masses, and the keys of a unit: a block or a part of it."""
    config = listed_config(
        rows=call.rows,
        head_dim=call.q.shape[2],
        itemsize=call.q.element_size(),
        arch=device_arch(call.q.device),
    )
    return config, largest_part(call.policy.sel_block_size, config.block_n)


def tiles_ranked(call: Selection, elements: int) -> int:
    """Tiles of one step: as many as ``elements`` of scratch hold, in whole waves of programs."""
    config, unit = list_config(call)
    parts = call.policy.sel_block_size // unit
    tiles = max(elements // (call.heads * call.list_slots * parts * call.rows), 1)
    if config.hopper and masses_fit(call):
        programs = multiprocessors(call.q.device) // call.heads
        wave = programs * _STREAMS // (call.rows // _ROWS)
        if 0 < wave < tiles:
            tiles -= tiles % wave
    return tiles


def rank_blocks(call: Selection, step: Step, candidates: torch.Tensor) -> None:
    """Draw a sample of a step's candidates, by exact masses of the tiles' samples.

    Args:
        candidates: ``[step.count, Hkv, listed_blocks]`` int32 entries of ``top_blocks_kernel``,
            which has waited for the step before: the masses of both lie in the same scratch.
    """
    policy = call.policy
    config, unit = list_config(call)
    parts = policy.sel_block_size // unit
    numel = step.count * call.heads * call.list_slots * parts * call.rows
    masses = workspace(call.q.device, "masses of lists", numel, torch.float32)
    shape = call.tile_keys() | {
        "GROUP_PAD": next_power_of_2(call.group),
        "UNIT": unit,
        "SAMPLES": policy.ranking_samples,
        "STRIDE": policy.ranking_stride,
        "LOCAL_BLOCKS": policy.local_blocks,
        "GROWTH": policy.growth,
        "LISTED_BLOCKS": policy.listed_blocks,
    }
    if config.hopper and masses_fit(call):
        _list_masses_sm90(call, step, candidates, masses, shape)
    else:
        _list_masses(call, step, candidates, masses, shape, config)
    run(
        rank_blocks_kernel, (step.count, call.heads),
        call.out, masses, candidates, *call.lengths, policy.dense_below, step.first, call.width,
        *call.out.stride()[:2],
        BLOCK_R=rank_rows(call.list_slots, call.rows),
        COUNT=policy.scored_blocks, num_warps=4 if call.list_slots <= 1024 else 8, **shape,
        **overlap_options(call.q.device),
    )  # fmt: skip


def _list_masses(
    call: Selection,
    step: Step,
    candidates: torch.Tensor,
    masses: torch.Tensor,
    shape: dict[str, Any],
    config: TileConfig,
) -> None:
    """Write the masses of a step's lists by the kernel for every GPU."""
    q, k_cache, batch, policy = call.q, call.k_cache, call.batch, call.policy
    _, heads, page_size, dim = k_cache.shape
    programs = step.count * ceil_div(call.rows, config.block_m)
    pieces = ceil_div(call.list_slots * policy.sel_block_size, config.block_n)
    shares = listed_shares(programs * heads, pieces, 4 * multiprocessors(q.device))
    run(
        listed_masses_kernel, (programs, heads, shares),
        masses, q, k_cache, candidates, call.tiles, batch.block_table, batch.seq_lens,
        batch.cu_seqlens_q, call.qk_scale, policy.dense_below, step.first, call.width,
        *q.stride()[:2], *k_cache.stride()[:3], batch.block_table.stride(0),
        HEAD_DIM=dim, BLOCK_D=next_power_of_2(dim), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        PAGE_SIZE=page_size, NUM_STAGES=config.num_stages, num_warps=config.num_warps, **shape,
        **overlap_options(q.device),
    )  # fmt: skip


def masses_fit(call: Selection) -> bool:
    """Whether the Hopper kernel can write the masses of a call's lists."""
    return (
        tensor_cores_take(call.q, call.k_cache, call.k_cache.shape[2])
        and call.policy.sel_block_size == _BLOCK
        and call.rows % _ROWS == 0
        and is_matrix(call.k_cache)
    )


def _list_masses_sm90(
    call: Selection,
    step: Step,
    candidates: torch.Tensor,
    masses: torch.Tensor,
    shape: dict[str, Any],
) -> None:
    """Write the masses of a step's lists by the kernel for Hopper."""
    q, batch, policy = call.q, call.batch, call.policy
    work = step.count * (call.rows // _ROWS)
    programs = ceil_div(work, _STREAMS)
    shares = listed_shares(programs * call.heads, call.list_slots, multiprocessors(q.device))
    k_desc, *distances = describe_cache(call.k_cache)
    unused = ("FROM_TABLE", "TILES_PER_REQUEST", "SEL_BLOCK", "UNIT")
    run(
        sm90.listed_masses_sm90_kernel, (programs, call.heads, shares),
        masses, q, k_desc, candidates, call.tiles, batch.block_table, batch.seq_lens,
        batch.cu_seqlens_q, call.qk_scale, policy.dense_below, step.first, work, call.width,
        *q.stride()[:2],
        *distances,
        batch.block_table.stride(0),
        HEAD_DIM=q.shape[2], PAGE_SIZE=call.k_cache.shape[2], STAGES=256 // q.shape[2], num_warps=4,
        **{name: value for name, value in shape.items() if name not in unused},
    )  # fmt: skip
