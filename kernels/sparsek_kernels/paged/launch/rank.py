"""Launching the second step of a tile's selection: candidates, ranked by exact masses.

Each key is read once, and programs share lists until four of them run on every multiprocessor.
"""

from __future__ import annotations

import torch

from sparsek_kernels.common.device import device_arch, multiprocessors
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.config import (
    TileConfig,
    largest_part,
    listed_config,
    listed_shares,
    next_power_of_2,
    rank_rows,
)
from sparsek_kernels.paged.kernels.rank import listed_masses_kernel, rank_blocks_kernel
from sparsek_kernels.paged.launch.scratch import overlap_options, workspace
from sparsek_kernels.paged.launch.selection import Selection, Step
from sparsek_kernels.paged.places import head_places
from sparsek_kernels.paged.policy import ceil_div


def list_config(call: Selection) -> tuple[TileConfig, int]:
    """Tile sizes of the kernel of masses, and the keys of a unit: a block or a part of it."""
    config = listed_config(
        rows=call.rows,
        head_dim=call.q.shape[2],
        itemsize=call.q.element_size(),
        arch=device_arch(call.q.device),
    )
    return config, largest_part(call.policy.sel_block_size, config.block_n)


def mass_elements(call: Selection) -> int:
    """Elements that the masses of one tile take."""
    _, unit = list_config(call)
    return call.heads * call.list_places * (call.policy.sel_block_size // unit) * call.rows


def rank_blocks(call: Selection, step: Step, candidates: torch.Tensor) -> None:
    """Select the best of a step's candidates, by exact masses of the tiles' samples.

    Args:
        candidates: ``[step.count, Hkv, listed_blocks]`` int32 of ``top_blocks_kernel``.
    """
    q, k_cache, batch, policy = call.q, call.k_cache, call.batch, call.policy
    _, heads, page_size, dim = k_cache.shape
    config, unit = list_config(call)
    numel = step.count * mass_elements(call)
    masses = workspace(q.device, "masses of lists", numel, torch.float32)
    programs = step.count * ceil_div(call.rows, config.block_m)
    pieces = ceil_div(call.list_places * policy.sel_block_size, config.block_n)
    shares = listed_shares(programs * heads, pieces, multiprocessors(q.device))
    shape = call.tile_keys() | {
        "GROUP_PAD": next_power_of_2(call.group),
        "UNIT": unit,
        "SAMPLES": policy.ranking_samples,
        "STRIDE": policy.ranking_stride,
        "LOCAL_BLOCKS": policy.local_blocks,
        "LISTED_BLOCKS": policy.listed_blocks,
        "MIN_MASS": policy.min_mass > 0,
    }
    run(
        listed_masses_kernel,
        (programs, heads, shares),
        masses,
        q,
        k_cache,
        candidates,
        call.tiles,
        batch.block_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        call.qk_scale,
        policy.dense_below,
        step.first,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        batch.block_table.stride(0),
        HEAD_DIM=dim,
        BLOCK_D=next_power_of_2(dim),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PAGE_SIZE=page_size,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        **shape,
        **overlap_options(q.device),
    )
    places = head_places(policy, q.device)
    run(
        rank_blocks_kernel,
        (step.count, heads),
        call.out,
        masses,
        candidates,
        batch.seq_lens if places is None else places,
        batch.seq_lens if call.left_out is None else call.left_out,
        call.tiles,
        batch.seq_lens,
        batch.cu_seqlens_q,
        policy.dense_below,
        step.first,
        policy.min_mass,
        batch.passing,
        *call.out.stride()[:2],
        HEAD_PLACES=places is not None,
        LEFT_OUT=call.left_out is not None,
        BLOCK_R=rank_rows(call.list_places, call.rows),
        num_warps=4 if call.list_places <= 1024 else 8,
        **shape,
        **overlap_options(q.device),
    )
