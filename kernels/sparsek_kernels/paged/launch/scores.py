"""Launching the scores of prefill tiles: means of cells, then what the samples give to blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparsek_kernels.common.descriptors import describe_matrix
from sparsek_kernels.common.device import device_arch, multiprocessors
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.config import TileConfig, has_wgmma, next_power_of_2, score_config
from sparsek_kernels.paged.kernels.tile_scores import (
    add_parts_kernel,
    gather_samples_kernel,
    part_scores_kernel,
    pool_means_kernel,
)
from sparsek_kernels.paged.kernels.tile_scores_sm90 import tile_scores_sm90_kernel
from sparsek_kernels.paged.launch.scratch import workspace
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy, ceil_div

_MEANS_ELEMENTS = 1 << 27
"""Most elements (256 MiB of 16 bits) of the scratch of means; more requests go in batches."""
_PARTS_ELEMENTS = 1 << 26
"""Most elements of the scratch of parts (256 MiB), and of the samples that the kernel for Hopper
reads; more tiles go in batches."""
_KEPT_ELEMENTS = 1 << 27
"""Most fp16 elements (256 MiB) that the kernel for Hopper may keep."""

_POOLED_CELLS = 8
_ADDED_BLOCKS = 256
_TOGETHER = 32
_ROWS = 64
_HEADS = 4
_TILES = 4


@dataclass(frozen=True)
class _Step:
    """Arguments that all launches of one call share.

    Args:
        q: ``[T, Hq, D]``.
        batch: the requests of the step.
        policy: the rule.
        tiles: the table of the step's tiles.
        qk_scale: from products to base-2 logits.
        heads: KV heads.
        width: blocks in a row of scores.
    """

    q: torch.Tensor
    batch: PagedBatch
    policy: SelectionPolicy
    tiles: torch.Tensor
    qk_scale: float
    heads: int
    width: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.heads

    @property
    def dim(self) -> int:
        """Columns of a head."""
        return self.q.shape[2]

    @property
    def rows(self) -> int:
        """Rows of means of one request and KV head."""
        cells = self.policy.sel_block_size // CELL_SIZE
        return ceil_div(self.width, _TOGETHER) * _TOGETHER * cells

    @property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where the kernels find the positions of a tile."""
        return self.tiles, self.batch.seq_lens, self.batch.cu_seqlens_q

    @property
    def rule(self) -> dict[str, int]:
        """The policy, as the kernels take it."""
        return {
            "TILE": self.policy.query_tile,
            "SEL_BLOCK": self.policy.sel_block_size,
            "SINK_BLOCKS": self.policy.sink_blocks,
            "REACH_BLOCKS": self.policy.reach_blocks,
            "SCORED_BLOCKS": self.policy.scored_blocks,
        }

    @property
    def sampling(self) -> dict[str, int]:
        """Which of a tile's queries score, as the kernels take it."""
        return {"SAMPLES": self.policy.samples, "STRIDE": self.policy.sample_stride}

    def config(self, count: int) -> TileConfig:
        """How the kernel for every GPU scores ``count`` tiles."""
        return score_config(
            tiles=count,
            num_kv_heads=self.heads,
            group=self.group,
            head_dim=self.dim,
            samples=self.policy.samples,
            blocks=self.width,
            itemsize=self.q.element_size(),
            arch=device_arch(self.q.device),
            num_sms=multiprocessors(self.q.device),
        )


def score_tiles(
    scores: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    tiles: torch.Tensor,
    qk_scale: float,
    first: int,
    count: int,
    width: int,
) -> None:
    """Scores of ``count`` tiles from ``first`` on, by means of keys: ``[count, Hkv, width]``.

    Blocks before a tile's first query are scored.  The rest of a row, and the rows of tiles that
    see everything, are left as they are.
    """
    heads = k_cache.shape[1]
    step = _Step(q, batch, policy, tiles, qk_scale, heads, width)
    config = step.config(count)
    hopper = config.hopper and config.splits == 1 and scores_fit(q, heads, policy, width)
    queries, block_h = (policy.samples, _HEADS) if hopper else (config.queries, config.block_h)
    head_parts = ceil_div(step.group, block_h)
    num_parts = head_parts * ceil_div(policy.samples, queries)
    each = max(width, _ROWS * step.dim if hopper else 0)
    at_once = even_step(count, _PARTS_ELEMENTS // (heads * num_parts * each))
    pooled = even_step(batch.num_prefills, _MEANS_ELEMENTS // (heads * step.rows * step.dim))
    parts = workspace(q.device, "parts", at_once * heads * num_parts * width, torch.float32)
    means = workspace(q.device, f"means {q.dtype}", pooled * heads * step.rows * step.dim, q.dtype)
    for request in range(batch.num_decodes, batch.num_requests, pooled):
        requests = (request, min(pooled, batch.num_requests - request))
        _pool_means(means, k_cache, step, requests)
        for tile in range(first, first + count, at_once):
            here = min(at_once, first + count - tile)
            if hopper:
                _score_sm90(parts, means, step, (tile, here), requests)
            else:
                _score(parts, means, step, (tile, here), requests, config)
            run(
                add_parts_kernel,
                (here, heads, ceil_div(width, _ADDED_BLOCKS)),
                scores.view(-1)[(tile - first) * heads * width :],
                parts,
                *step.lengths,
                policy.dense_below,
                tile,
                *requests,
                width,
                QUERIES=queries,
                HEAD_PARTS=head_parts,
                PARTS=num_parts,
                STRIDE=policy.sample_stride,
                BLOCK=_ADDED_BLOCKS,
                **step.rule,
            )


def even_step(count: int, room: int) -> int:
    """Items of a batch, at most ``room`` (at least 1), so that batches are of nearly one size."""
    return ceil_div(count, ceil_div(count, max(room, 1)))


def scores_fit(q: torch.Tensor, heads: int, policy: SelectionPolicy, width: int) -> bool:
    """Whether the kernel for Hopper scores these tiles, if there are enough of them."""
    return (
        has_wgmma(device_arch(q.device))
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[2] in (64, 128)
        and q.shape[1] > heads  # a lone query head would leave three of four rows idle
        and policy.sel_block_size == _ROWS
        and policy.query_tile % _ROWS == 0
        and multiprocessors(q.device) * kept_elements(width) <= _KEPT_ELEMENTS
    )


def kept_elements(width: int) -> int:
    """Elements that one program of the kernel for Hopper keeps for ``width`` blocks."""
    return _TILES * _ROWS * ceil_div(width, _TOGETHER) * _TOGETHER


def _pool_means(
    means: torch.Tensor, k_cache: torch.Tensor, step: _Step, requests: tuple[int, int]
) -> None:
    heads, page_size, dim = k_cache.shape[1:]
    batch = step.batch
    cells = ceil_div(batch.max_seq_len, CELL_SIZE)
    run(
        pool_means_kernel,
        (ceil_div(cells, _POOLED_CELLS), heads, requests[1]),
        means,
        k_cache,
        batch.block_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        step.policy.dense_below,
        requests[0],
        heads * step.rows * dim,
        step.rows * dim,
        *k_cache.stride()[:3],
        batch.block_table.stride(0),
        HEAD_DIM=dim,
        BLOCK_D=next_power_of_2(dim),
        BLOCK_C=_POOLED_CELLS,
        PAGE_SIZE=page_size,
        **step.rule,
    )


def _score(
    parts: torch.Tensor,
    means: torch.Tensor,
    step: _Step,
    tiles: tuple[int, int],
    requests: tuple[int, int],
    config: TileConfig,
) -> None:
    per_head = ceil_div(step.policy.samples, config.queries)
    programs = tiles[1] * ceil_div(step.group, config.block_h) * per_head
    size = programs * step.heads * config.splits * 2 * config.block_m
    state = workspace(step.q.device, "score state", size, torch.float32)
    options: dict[str, Any] = {
        "GROUP": step.group,
        "HEAD_DIM": step.dim,
        "BLOCK_D": next_power_of_2(step.dim),
        "QUERIES": config.queries,
        "BLOCK_H": config.block_h,
        "BLOCK_M": config.block_m,
        "BLOCK_B": config.block_n,
        "SPLITS": config.splits,
        "NUM_STAGES": config.num_stages,
        "num_warps": config.num_warps,
        **step.rule,
        **step.sampling,
    }
    for second_pass in (False, True):
        run(
            part_scores_kernel,
            (programs, step.heads, config.splits),
            parts,
            state,
            step.q,
            means,
            *step.lengths,
            step.qk_scale,
            step.policy.dense_below,
            tiles[0],
            *requests,
            step.width,
            *step.q.stride()[:2],
            step.heads * step.rows * step.dim,
            step.rows * step.dim,
            SECOND_PASS=second_pass,
            **options,
        )


def _score_sm90(
    parts: torch.Tensor,
    means: torch.Tensor,
    step: _Step,
    tiles: tuple[int, int],
    requests: tuple[int, int],
) -> None:
    q, heads, device = step.q, step.heads, step.q.device
    fours = ceil_div(step.group, _HEADS)
    rows = tiles[1] * heads * fours * _ROWS
    samples = workspace(device, f"samples {q.dtype}", rows * step.dim, q.dtype)
    seen = workspace(device, "seen blocks", rows, torch.int32)
    plan = workspace(device, "scored tiles", 3 * tiles[1], torch.int32)
    run(
        gather_samples_kernel,
        (tiles[1], heads * fours),
        samples,
        seen,
        plan,
        q,
        *step.lengths,
        step.policy.dense_below,
        tiles[0],
        *requests,
        *q.stride()[:2],
        GROUP=step.group,
        HEADS=_HEADS,
        HEAD_DIM=step.dim,
        **step.rule,
        **step.sampling,
    )
    work = ceil_div(tiles[1], _TILES) * heads * fours
    programs = min(work, multiprocessors(device))
    size = programs * kept_elements(step.width)
    run(
        tile_scores_sm90_kernel,
        (programs,),
        parts,
        workspace(device, "kept weights", size, torch.float16),
        workspace(device, "kept maxima", size // _TOGETHER, torch.float32),
        seen,
        describe_matrix(samples, (rows, step.dim), step.dim, (_ROWS, 64)),
        describe_matrix(
            means, (requests[1] * heads * step.rows, step.dim), step.dim, (4 * _TOGETHER, 64)
        ),
        plan,
        step.qk_scale,
        tiles[1],
        work,
        step.rows // (4 * _TOGETHER),
        step.width,
        NUM_KV_HEADS=heads,
        FOURS=fours,
        HEAD_DIM=step.dim,
        STAGES=3,
        num_warps=4,
    )
