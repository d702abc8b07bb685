"""Launching the scores of prefill tiles: means of cells, then what the samples give to blocks."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.common.descriptors import describe_matrix
from sparsek_kernels.common.device import device_arch, multiprocessors
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.config import TileConfig, has_wgmma, next_power_of_2
from sparsek_kernels.paged.index.cell_means.config import score_config
from sparsek_kernels.paged.index.cell_means.kernels import tile_scores_sm90 as sm90
from sparsek_kernels.paged.index.cell_means.kernels.tile_scores import (
    add_parts_kernel,
    gather_samples_kernel,
    part_scores_kernel,
    pool_means_kernel,
)
from sparsek_kernels.paged.index.problem import Selection
from sparsek_kernels.paged.policy import CELL_SIZE, ceil_div
from sparsek_kernels.paged.scratch import workspace

_MEANS_ELEMENTS = 1 << 27
"""Most elements (256 MiB of 16 bits) of the scratch of means; more requests go in batches."""
_PARTS_ELEMENTS = 1 << 26
"""Most elements of the scratch of parts (256 MiB), and of the samples that the kernel for Hopper
reads; more tiles go in batches."""
_KEPT_ELEMENTS = 1 << 27
"""Most fp16 elements (256 MiB) that the kernel for Hopper may keep."""

_POOLED_CELLS = 8
_ADDED_BLOCKS = 256
_BLOCKS: int = sm90.BLOCKS.value
_ROWS: int = sm90.ROWS.value
_TILES: int = sm90.TILES.value
_HEADS = 4


def mean_rows(call: Selection) -> int:
    """Rows of means of one request and KV head."""
    cells = call.policy.sel_block_size // CELL_SIZE
    return ceil_div(call.width, _BLOCKS) * _BLOCKS * cells


def score_tiles(scores: torch.Tensor, call: Selection, first: int, count: int) -> None:
    """Scores of ``count`` tiles from ``first`` on, by means of keys: ``[count, Hkv, width]``.

    Blocks before a tile's first query are scored.  The rest of a row, and the rows of tiles that
    see everything, are left as they are.
    """
    q, batch, policy, heads, width = call.q, call.batch, call.policy, call.heads, call.width
    dim, rows = q.shape[2], mean_rows(call)
    config = score_config(
        tiles=count,
        num_kv_heads=heads,
        group=call.group,
        head_dim=dim,
        samples=policy.samples,
        blocks=width,
        itemsize=q.element_size(),
        arch=device_arch(q.device),
        num_sms=multiprocessors(q.device),
    )
    hopper = config.hopper and config.splits == 1 and scores_fit(call)
    queries, block_h = (policy.samples, _HEADS) if hopper else (config.queries, config.block_h)
    head_parts = ceil_div(call.group, block_h)
    num_parts = head_parts * ceil_div(policy.samples, queries)
    each = max(width, _ROWS * dim if hopper else 0)
    at_once = even_step(count, _PARTS_ELEMENTS // (heads * num_parts * each))
    pooled = even_step(batch.num_prefills, _MEANS_ELEMENTS // (heads * rows * dim))
    parts = workspace(q.device, "parts", at_once * heads * num_parts * width, torch.float32)
    means = workspace(q.device, f"means {q.dtype}", pooled * heads * rows * dim, q.dtype)
    for request in range(batch.num_decodes, batch.num_requests, pooled):
        requests = (request, min(pooled, batch.num_requests - request))
        _pool_means(means, call, requests)
        for tile in range(first, first + count, at_once):
            here = min(at_once, first + count - tile)
            if hopper:
                _score_sm90(parts, means, call, (tile, here), requests)
            else:
                _score(parts, means, call, (tile, here), requests, config)
            run(
                add_parts_kernel, (here, heads, ceil_div(width, _ADDED_BLOCKS)),
                scores.view(-1)[(tile - first) * heads * width :], parts, *call.lengths,
                policy.dense_below, tile, *requests, width,
                QUERIES=queries, HEAD_PARTS=head_parts, PARTS=num_parts,
                STRIDE=policy.sample_stride, BLOCK=_ADDED_BLOCKS, **call.tile_rule(),
            )  # fmt: skip


def even_step(count: int, room: int) -> int:
    """Items of a batch, at most ``room`` (at least 1), so that batches are of nearly one size."""
    return ceil_div(count, ceil_div(count, max(room, 1)))


def scores_fit(call: Selection) -> bool:
    """Whether the kernel for Hopper scores these tiles, if there are enough of them."""
    q, policy = call.q, call.policy
    return (
        has_wgmma(device_arch(q.device))
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[2] in (64, 128)
        and call.group > 1  # a lone query head would leave three of four rows idle
        and policy.sel_block_size == _ROWS
        and policy.query_tile % _ROWS == 0
        and multiprocessors(q.device) * kept_elements(call.width) <= _KEPT_ELEMENTS
    )


def kept_elements(width: int) -> int:
    """Elements that one program of the kernel for Hopper keeps for ``width`` blocks."""
    return _TILES * _ROWS * ceil_div(width, _BLOCKS) * _BLOCKS


def _pool_means(means: torch.Tensor, call: Selection, requests: tuple[int, int]) -> None:
    batch, policy, k_cache = call.batch, call.policy, call.k_cache
    heads, page_size, dim = k_cache.shape[1:]
    rows = mean_rows(call)
    cells = ceil_div(batch.max_seq_len, CELL_SIZE)
    run(
        pool_means_kernel, (ceil_div(cells, _POOLED_CELLS), heads, requests[1]),
        means, k_cache, batch.block_table, batch.seq_lens, batch.cu_seqlens_q, policy.dense_below,
        requests[0], heads * rows * dim, rows * dim,
        *k_cache.stride()[:3], batch.block_table.stride(0),
        HEAD_DIM=dim, BLOCK_D=next_power_of_2(dim), BLOCK_C=_POOLED_CELLS, PAGE_SIZE=page_size,
        **call.tile_rule(),
    )  # fmt: skip


def _score(
    parts: torch.Tensor,
    means: torch.Tensor,
    call: Selection,
    tiles: tuple[int, int],
    requests: tuple[int, int],
    config: TileConfig,
) -> None:
    q, policy, heads = call.q, call.policy, call.heads
    dim, rows = q.shape[2], mean_rows(call)
    per_head = ceil_div(policy.samples, config.queries)
    programs = tiles[1] * ceil_div(call.group, config.block_h) * per_head
    size = programs * heads * config.splits * 2 * config.block_m
    state = workspace(q.device, "score state", size, torch.float32)
    options: dict[str, Any] = {
        "GROUP": call.group,
        "HEAD_DIM": dim,
        "BLOCK_D": next_power_of_2(dim),
        "QUERIES": config.queries,
        "BLOCK_H": config.block_h,
        "BLOCK_M": config.block_m,
        "BLOCK_B": config.block_n,
        "NUM_STAGES": config.num_stages,
        "SAMPLES": policy.samples,
        "STRIDE": policy.sample_stride,
        "num_warps": config.num_warps,
        **call.tile_rule(),
    }
    for second_pass in (False, True):
        run(
            part_scores_kernel, (programs, heads, config.splits),
            parts, state, q, means, *call.lengths, call.qk_scale, policy.dense_below, tiles[0],
            *requests, call.width,
            *q.stride()[:2],
            heads * rows * dim, rows * dim,
            SECOND_PASS=second_pass, **options,
        )  # fmt: skip


def _score_sm90(
    parts: torch.Tensor,
    means: torch.Tensor,
    call: Selection,
    tiles: tuple[int, int],
    requests: tuple[int, int],
) -> None:
    q, policy, heads, device = call.q, call.policy, call.heads, call.q.device
    dim, mean_count = q.shape[2], mean_rows(call)
    fours = ceil_div(call.group, _HEADS)
    rows = tiles[1] * heads * fours * _ROWS
    samples = workspace(device, f"samples {q.dtype}", rows * dim, q.dtype)
    seen = workspace(device, "seen blocks", rows, torch.int32)
    plan = workspace(device, "scored tiles", 3 * tiles[1], torch.int32)
    run(
        gather_samples_kernel, (tiles[1], heads * fours),
        samples, seen, plan, q, *call.lengths, policy.dense_below, tiles[0], *requests, call.width,
        *q.stride()[:2],
        GROUP=call.group, HEADS=_HEADS, HEAD_DIM=dim, **call.tile_rule(), SAMPLES=policy.samples,
        STRIDE=policy.sample_stride,
    )  # fmt: skip
    work = ceil_div(tiles[1], _TILES) * heads * fours
    programs = min(work, multiprocessors(device))
    size = programs * kept_elements(call.width)
    run(
        sm90.tile_scores_sm90_kernel, (programs,),
        parts, workspace(device, "kept weights", size, torch.float16),
        workspace(device, "kept maxima", size // _BLOCKS, torch.float32), seen,
        describe_matrix(samples, (rows, dim), dim, (_ROWS, 64)),
        describe_matrix(means, (requests[1] * heads * mean_count, dim), dim, (4 * _BLOCKS, 64)),
        plan, call.qk_scale, tiles[1], work, mean_count // (4 * _BLOCKS), call.width,
        NUM_KV_HEADS=heads, FOURS=fours, HEAD_DIM=dim, STAGES=3, num_warps=4,
    )  # fmt: skip
