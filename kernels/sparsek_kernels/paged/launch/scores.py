"""Launching the scores of prefill tiles: exact attention masses of a few queries per tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.common.alignment import copyable
from sparsek_kernels.common.descriptors import describe_matrix
from sparsek_kernels.common.device import device_arch, multiprocessors
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.config import has_wgmma, mass_config, next_power_of_2, score_columns
from sparsek_kernels.paged.kernels.block_mass import (
    block_mass_kernel,
    sample_rows_kernel,
    tile_scores_kernel,
)
from sparsek_kernels.paged.kernels.block_mass_sm90 import block_mass_sm90_kernel
from sparsek_kernels.paged.launch.attend_sm90 import describe_cache, is_matrix
from sparsek_kernels.paged.launch.scratch import workspace
from sparsek_kernels.paged.launch.tiles import prefill_tiles
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div

_MASS_ELEMENTS = 1 << 26
"""Most fp32 elements (256 MiB) of the scratch of masses; larger steps go in batches of tiles."""

SPAN = 4096
"""Keys of one piece of work."""

_ROWS = 256
_SLICE = 64


@dataclass(frozen=True)
class Strips:
    """How the tiles of a step are laid out in strips (``kernels/block_mass.py``).

    Args:
        samples: queries that each tile is scored by.
        stride: positions that each of them stands for.
        group_pad: rows of a sample, a power of two.
        rows: rows of a strip.
        table: ``[strips, 2]`` int32, request (or -1) and first position of every strip.
        of_tile: ``[tiles]`` int32, the strip that holds each tile.
    """

    samples: int
    stride: int
    group_pad: int
    rows: int
    table: torch.Tensor
    of_tile: torch.Tensor

    @property
    def tiles(self) -> int:
        """Tiles in one strip."""
        return self.rows // (self.samples * self.group_pad)


def plan_strips(
    batch: PagedBatch, policy: SelectionPolicy, tiles: torch.Tensor, group: int, num_tokens: int
) -> Strips:
    """The strips of a step's prefill tiles, made once for all layers of one group size."""
    samples, stride = policy.samples, policy.sample_stride
    group_pad = next_power_of_2(group)
    rows = max(_ROWS, next_power_of_2(samples * group_pad))
    tokens = rows // (samples * group_pad) * policy.query_tile

    def build() -> Strips:
        table = prefill_tiles(batch, tokens, num_tokens)
        request, base = tiles.long().unbind(1)
        owner = table[:, 0].long()
        known = owner >= 0
        ordered = torch.where(known, owner, batch.num_requests).contiguous()
        first = torch.searchsorted(ordered, request.clamp(min=0))
        first = first.clamp(max=table.shape[0] - 1)
        strip = first + base // tokens - table[first, 1].long() // tokens
        last = (known.sum() - 1).clamp(min=0)
        of_tile = torch.where(request >= 0, strip, last).to(torch.int32).contiguous()
        return Strips(samples, stride, group_pad, rows, table, of_tile)

    return batch.derived(("strips", policy.query_tile, group, tiles.shape[0]), build)


def score_tiles(
    scores: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    tiles: torch.Tensor,
    strips: Strips,
    qk_scale: float,
    first: int,
    count: int,
    width: int,
) -> None:
    """Scores of ``count`` tiles from ``first`` on, ``[count, Hkv, width]``."""
    heads, page_size, dim = k_cache.shape[1:]
    group = q.shape[1] // heads
    num_strips = most_strips(batch, strips, count)
    rows = workspace(
        q.device, f"sampled rows {q.dtype}", num_strips * heads * strips.rows * dim, q.dtype
    )
    mass = workspace(q.device, "masses", num_strips * heads * width * strips.rows, torch.float32)
    step = (
        strips.of_tile,
        strips.table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        policy.dense_below,
        first,
        count,
    )
    rule = {
        "TILE": policy.query_tile,
        "SAMPLES": strips.samples,
        "STRIDE": strips.stride,
        "GROUP_PAD": strips.group_pad,
        "SINK_BLOCKS": policy.sink_blocks,
        "REACH_BLOCKS": policy.reach_blocks,
        "SCORED_BLOCKS": policy.scored_blocks,
    }
    sample_rows_kernel[(num_strips, heads, strips.rows // _SLICE)](
        rows,
        q,
        *step,
        *q.stride()[:2],
        NUM_KV_HEADS=heads,
        GROUP=group,
        HEAD_DIM=dim,
        BLOCK_D=next_power_of_2(dim),
        BLOCK_M=_SLICE,
        ROWS=strips.rows,
        SEL_BLOCK=policy.sel_block_size,
        **rule,
    )
    config = mass_config(
        group=group, head_dim=dim, itemsize=q.element_size(), arch=device_arch(q.device)
    )
    if config.hopper and masses_fit(q, k_cache, policy, strips):
        _mass_sm90(mass, rows, k_cache, batch, step, rule, qk_scale, num_strips, width)
    else:
        span = max(SPAN // policy.sel_block_size, 1)
        spans = ceil_div(batch.max_seq_len, span * policy.sel_block_size)
        block_mass_kernel[(num_strips * (strips.rows // config.block_m), heads, spans)](
            mass,
            rows,
            k_cache,
            *step[:2],
            batch.block_table,
            *step[2:4],
            qk_scale,
            *step[4:],
            width,
            *k_cache.stride()[:3],
            batch.block_table.stride(0),
            NUM_KV_HEADS=heads,
            HEAD_DIM=dim,
            BLOCK_D=next_power_of_2(dim),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            ROWS=strips.rows,
            PAGE_SIZE=page_size,
            SEL_BLOCK=policy.sel_block_size,
            SPAN_BLOCKS=span,
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
            **rule,
        )
    tile_scores_kernel[(count, heads)](
        scores,
        mass,
        tiles,
        strips.of_tile,
        batch.seq_lens,
        batch.cu_seqlens_q,
        policy.dense_below,
        first,
        width,
        heads * width,
        width,
        NUM_KV_HEADS=heads,
        GROUP=group,
        ROWS=strips.rows,
        SEL_BLOCK=policy.sel_block_size,
        BLOCK_B=score_columns(strips.samples * strips.group_pad),
        **rule,
    )


def most_strips(batch: PagedBatch, strips: Strips, tiles: int) -> int:
    """An upper bound of the strips that hold ``tiles`` neighbouring tiles."""
    bound = tiles // strips.tiles + 2 * batch.num_prefills
    return max(min(bound, tiles, strips.table.shape[0]), 1)


def most_tiles(batch: PagedBatch, strips: Strips, tiles: int, heads: int, width: int) -> int:
    """Most of ``tiles`` neighbouring tiles whose masses fit in the scratch at once, at least 1."""
    room = max(_MASS_ELEMENTS // (heads * width * strips.rows), 1)
    if most_strips(batch, strips, tiles) <= room:
        return tiles
    return max(room, (room - 2 * batch.num_prefills) * strips.tiles)


def masses_fit(
    q: torch.Tensor, k_cache: torch.Tensor, policy: SelectionPolicy, strips: Strips
) -> bool:
    """Whether the kernel for Hopper takes these inputs."""
    return (
        has_wgmma(device_arch(q.device))
        and q.dtype in (torch.float16, torch.bfloat16)
        and k_cache.dtype == q.dtype
        and q.shape[2] in (64, 128)
        and k_cache.shape[2] % _SLICE == 0
        and policy.sel_block_size == _SLICE
        and strips.rows == _ROWS
        and copyable(k_cache)
        and is_matrix(k_cache)
    )


def _mass_sm90(
    mass: torch.Tensor,
    rows: torch.Tensor,
    k_cache: torch.Tensor,
    batch: PagedBatch,
    step: tuple[object, ...],
    rule: dict[str, int],
    qk_scale: float,
    num_strips: int,
    width: int,
) -> None:
    heads, page_size, dim = k_cache.shape[1:]
    spans = ceil_div(batch.max_seq_len, SPAN)
    work = num_strips * heads * spans
    k_desc, *k_distances = describe_cache(k_cache)
    shape = (num_strips * heads * _ROWS, dim)
    rows_desc = describe_matrix(rows, shape, dim, (_SLICE, _SLICE))
    block_mass_sm90_kernel[(min(work, multiprocessors(rows.device)),)](
        mass,
        rows_desc,
        k_desc,
        *step[:2],
        batch.block_table,
        *step[2:4],
        qk_scale,
        *step[4:],
        num_strips,
        work,
        width,
        *k_distances,
        batch.block_table.stride(0),
        NUM_KV_HEADS=heads,
        HEAD_DIM=dim,
        PAGE_SIZE=page_size,
        SPAN=SPAN,
        STAGES=8,
        num_warps=4,
        **rule,
    )
