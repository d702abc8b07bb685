"""Launching attention over pages: shapes to configurations, grids, strides and scratch.

Nothing here reads a device value: every grid follows from shapes and from what the host knows of
the batch, so decodes can be captured in a CUDA graph and replayed with other lengths.
"""

from __future__ import annotations

import torch

from sparsek_kernels.common.device import device_arch, multiprocessors
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.attend.config import decode_config, prefill_config, row_config
from sparsek_kernels.paged.attend.kernels.constants import Rule, Shape, Tiling
from sparsek_kernels.paged.attend.kernels.fwd import attend_kernel
from sparsek_kernels.paged.attend.launch_sm90 import attend_fits, attend_hopper
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.config import most_splits, next_power_of_2
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import ceil_div
from sparsek_kernels.paged.prefill_tiles import prefill_tiles
from sparsek_kernels.paged.scratch import overlap_options, workspace

_DENSE_TILE = 64
_MOST_ROWS = 64
"""Tokens of a request times heads that attend its cells together."""


def attend_segment(operands: PagedOperands, segment: Segment, chosen: Chosen | None) -> None:
    """Triton form of :func:`sparsek_kernels.paged.attend.attend`."""
    indices = None if chosen is None else chosen.indices
    batch, policy, decode = segment.batch, segment.policy, segment.decodes
    q, k_cache, v_cache, out = operands.q, operands.k_cache, operands.v_cache, operands.out
    _, heads, page_size, dim = k_cache.shape
    group = q.shape[1] // heads
    topk = policy.selects_blocks
    sel_block = policy.sel_block_size if topk else _DENSE_TILE
    run_keys = policy.alignment or sel_block  # that lie side by side wherever none are chosen
    tiles: torch.Tensor | None = None
    per_request = 1
    if decode:
        tile = 1 if topk and not segment.by_request else batch.decode_query_len
        per_request = batch.decode_query_len // tile
        count = batch.num_decodes * per_request
    else:
        tile = policy.query_tile if topk else _DENSE_TILE
        tiles = prefill_tiles(batch, tile, q.shape[0])
        count = tiles.shape[0]
    blocks = ceil_div(batch.max_seq_len, run_keys)
    if topk:
        budget = ceil_div(policy.deepest_budget * sel_block, run_keys)
        blocks = min(blocks, max(budget, policy.dense_below // run_keys))
    elif policy.window_size is not None:
        attended = policy.num_sink + policy.window_size + (0 if decode else tile)
        blocks = min(blocks, max(attended, policy.dense_below) // sel_block + 2)
    fits_hopper = topk and not decode and attend_fits(operands, policy)
    if segment.fixed_order:
        config = row_config(
            group=group, head_dim=dim, sel_block=run_keys, arch=device_arch(q.device)
        )
    else:
        sizes = {
            "tiles": count,
            "num_kv_heads": heads,
            "group": group,
            "head_dim": dim,
            "blocks": blocks,
            "sel_block": run_keys,
            "arch": device_arch(q.device),
            "num_sms": multiprocessors(q.device),
        }
        if decode:
            most = max(_MOST_ROWS // next_power_of_2(group), 1)
            config = decode_config(**sizes, queries=min(tile, most) if topk else tile)
        else:
            itemsize = q.element_size()
            config = prefill_config(**sizes, tile=tile, itemsize=itemsize, fits_hopper=fits_hopper)
    whole = fits_hopper and config.hopper and config.splits == 1
    if whole and indices is not None and tiles is not None:
        attend_hopper(operands, batch, policy, indices, tiles)
        return
    chunks = ceil_div(group, config.block_h) * ceil_div(tile, config.queries)
    block_d = next_power_of_2(dim)
    places = count * heads * chunks if config.splits > 1 else 1
    rows = places * config.splits * config.block_m
    part = workspace(q.device, "parts", rows * block_d, torch.float32)
    state = workspace(q.device, "part state", rows * 2, torch.float32)
    ticket = workspace(q.device, "tickets", places, torch.int32)
    run(
        attend_kernel, (count * chunks, heads, config.splits),
        out, out if operands.lse is None else operands.lse, part, state, ticket,
        q, k_cache, v_cache, q if operands.sinks is None else operands.sinks,
        batch.seq_lens if indices is None else indices,
        batch.seq_lens if tiles is None else tiles,
        batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
        operands.softmax_scale * operands.k_scale * LOG2E.value, operands.v_scale,
        (policy.window_size or 0, policy.num_sink, policy.dense_below), config.splits,
        out.stride()[:2], q.stride()[:2], k_cache.stride()[:3], v_cache.stride()[:3],
        indices.stride()[:2] if indices is not None else (0, 0), batch.block_table.stride(0),
        RULE=Rule(
            MODE=0 if policy.is_dense else 2 if topk else 1,
            TILE=tile,
            POLICY_TILE=policy.query_tile if topk else 1,
            SEL_BLOCK=sel_block,
            SINK_BLOCKS=policy.sink_blocks if topk else ceil_div(policy.num_sink, sel_block),
            REACH_BLOCKS=policy.reach_blocks if topk else 0,
            SCORED_BLOCKS=policy.shallow_blocks if topk else 0,
            GROWTH=policy.growth,
            ALIGN=policy.segment_blocks if topk else 1,
            SAMPLE=policy.alignment > 0,
            BY_REQUEST=segment.by_request,
        ),
        SHAPE=Shape(
            FROM_TABLE=tiles is not None,
            TILES_PER_REQUEST=per_request,
            NUM_KV_HEADS=heads,
            GROUP=group,
            HEAD_DIM=dim,
            BLOCK_D=block_d,
            PAGE_SIZE=page_size,
            HAS_SINKS=operands.sinks is not None,
            SHARDED=operands.lse is not None,
            JOINED=k_cache.stride() == v_cache.stride(),
            UNIT=unit_of(k_cache, v_cache),
        ),
        TILING=Tiling(
            QUERIES=config.queries,
            BLOCK_H=config.block_h,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            MOST_SPLITS=most_splits(config.splits),
            NUM_STAGES=config.num_stages,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers or None,
        # Sinks and window are read while the kernel before this one is at work.  That must be one
        # that chooses, which has waited for the keys: the one before may be writing them.
        **overlap_options(q.device, segment.chooses(page_size)),
    )  # fmt: skip


def unit_of(*caches: torch.Tensor) -> int:
    """Elements of 16 bytes, if all rows begin at multiples of them that 32 bits count; else 1."""
    unit = 16 // caches[0].element_size()
    strides = [stride for cache in caches for stride in cache.stride()[:-1]]
    largest = max(cache.shape[0] * cache.stride(0) for cache in caches)
    return unit if all(x % unit == 0 for x in strides) and largest < unit << 31 else 1
