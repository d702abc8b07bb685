"""Launching the paged Triton kernels: shapes to configurations, grids, strides and scratch.

Nothing here reads a device value: every grid follows from shapes and from the host bounds of the
batch, so each call can be captured in a CUDA graph and replayed with other lengths.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sparsek_kernels.paged import runtime
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.config import (
    LaunchConfig,
    decode_config,
    next_power_of_2,
    prefill_config,
    row_config,
)
from sparsek_kernels.paged.kernels.attend import attend_kernel
from sparsek_kernels.paged.kernels.write import write_kv_kernel
from sparsek_kernels.paged.launch_select import select_blocks as select_blocks
from sparsek_kernels.paged.launch_sm90 import attend_fits, attend_hopper
from sparsek_kernels.paged.launch_tiles import prefill_tiles
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy, ceil_div
from sparsek_kernels.paged.runtime import LOG2E, overlap_options, workspace

_DENSE_TILE = 64

_ROW_ELEMENTS = 1 << 24
"""Most elements (64 MiB) of a scratch tensor of a step that is attended token by token."""
_MOST_ROWS = 1 << 15
"""Tokens of one launch; a grid's third dimension ends at 65535."""


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    score_kind: str = "cell_mean",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store new rows and refresh the summaries of the cells they touch: one kernel."""
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    _, heads, page_size, dim = k_cache.shape
    block_d = next_power_of_2(dim)
    block_h = max(1, min(next_power_of_2(heads), 256 // block_d))
    summary = k_cache if k_summary is None else k_summary
    write_kv_kernel[(tokens, ceil_div(heads, block_h))](
        k_cache,
        v_cache,
        summary,
        key,
        value,
        slot_mapping,
        1.0 / k_scale,
        1.0 / v_scale,
        tokens,
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *summary.stride()[:3],
        *key.stride()[:2],
        *value.stride()[:2],
        NUM_HEADS=heads,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        BLOCK_H=block_h,
        PAGE_SIZE=page_size,
        CELL=2 * CELL_SIZE if score_kind == "min_max" else CELL_SIZE,
        HAS_SUMMARY=k_summary is not None,
        MIN_MAX=score_kind == "min_max",
        num_warps=4,
    )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    softmax_scale: float,
    k_summary: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    batch_invariant: bool = False,
) -> None:
    """Triton form of :func:`sparsek_kernels.paged.paged_attention`; writes ``out``."""
    if batch_invariant:
        _attend_by_token(
            q,
            k_cache,
            v_cache,
            batch,
            policy,
            softmax_scale,
            k_summary,
            sinks,
            out,
            k_scale,
            v_scale,
        )
        return
    selected = _selected(q, k_summary, batch, policy, softmax_scale, k_cache.shape[2], k_scale)
    scales = (softmax_scale * k_scale * LOG2E, v_scale)
    if batch.num_decodes:
        attend(q, k_cache, v_cache, batch, policy.per_token(), selected, sinks, out, scales, True)
    if batch.num_prefills:
        attend(q, k_cache, v_cache, batch, policy, selected, sinks, out, scales, False)


def _selected(
    q: torch.Tensor,
    k_summary: torch.Tensor | None,
    batch: PagedBatch,
    policy: SelectionPolicy,
    softmax_scale: float,
    page_size: int,
    k_scale: float,
) -> torch.Tensor | None:
    """The blocks that a policy chooses by score, or ``None`` where it chooses none."""
    if not policy.selects_blocks:
        return None
    if k_summary is None:
        raise ValueError("k_summary: expected page summaries for block selection, got None")
    return select_blocks(
        q,
        k_summary,
        batch,
        policy,
        softmax_scale=softmax_scale,
        page_size=page_size,
        k_scale=k_scale,
    )


def _attend_by_token(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    softmax_scale: float,
    k_summary: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Every query token as a decode of its own, through kernels that no batch reconfigures.

    What decides how a row is added up (programs per row, keys per iteration, warps, the width of
    the softmax over blocks) follows from the layer's shapes and the width of the block table.
    """
    heads, page_size, dim = k_cache.shape[1:]
    group = q.shape[1] // heads
    rule = policy.per_token()
    batch = replace(batch, max_seq_len=batch.block_table.shape[1] * page_size)
    config = row_config(
        group=group,
        head_dim=dim,
        sel_block=rule.sel_block_size if rule.selects_blocks else _DENSE_TILE,
        arch=runtime.traits(q.device)[0],
    )

    scales = (softmax_scale * k_scale * LOG2E, v_scale)

    def attend_decodes(part: PagedBatch, rows: slice) -> None:
        mine = q[rows]
        selected = _selected(mine, k_summary, part, rule, softmax_scale, page_size, k_scale)
        attend(mine, k_cache, v_cache, part, rule, selected, sinks, out[rows], scales, True, config)

    if not batch.num_prefills and batch.decode_query_len == 1:
        attend_decodes(batch, slice(None))  # as it is: a CUDA graph may hold this step
        return
    widest = batch.block_table.shape[1]
    if rule.selects_blocks:
        blocks = ceil_div(batch.max_seq_len, rule.sel_block_size)
        widest = max(widest, q.shape[1] * (blocks + 16))
    step = min(max(_ROW_ELEMENTS // widest // 16, 1) * 16, _MOST_ROWS)
    for first in range(0, q.shape[0], step):
        last = min(first + step, q.shape[0])
        attend_decodes(batch.by_token(first, last), slice(first, last))


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    selected: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    scales: tuple[float, float],
    decode: bool,
    config: LaunchConfig | None = None,
) -> None:
    """Attend the decodes or the prefills of a batch over selected, windowed or all blocks."""
    _, heads, page_size, dim = k_cache.shape
    group = q.shape[1] // heads
    arch, num_sms = runtime.traits(q.device)
    topk = policy.selects_blocks
    sel_block = policy.sel_block_size if topk else _DENSE_TILE
    tiles: torch.Tensor | None = None
    per_request = 1
    if decode:
        tile = 1 if topk else batch.decode_query_len
        per_request = batch.decode_query_len // tile
        count = batch.num_decodes * per_request
    else:
        tile = policy.query_tile if topk else _DENSE_TILE
        tiles = prefill_tiles(batch, tile, q.shape[0])
        count = tiles.shape[0]
    entries = ceil_div(batch.max_seq_len, sel_block)
    if topk:
        entries = min(entries, max(policy.budget_blocks, policy.dense_below // sel_block))
    elif policy.window_size is not None:
        attended = policy.num_sink + policy.window_size + (0 if decode else tile)
        entries = min(entries, max(attended, policy.dense_below) // sel_block + 2)
    if config is None:
        if decode:
            config = decode_config(
                tiles=count,
                num_kv_heads=heads,
                group=group,
                head_dim=dim,
                queries=tile,
                entries=entries,
                sel_block=sel_block,
                arch=arch,
                num_sms=num_sms,
            )
        else:
            config = prefill_config(
                tiles=count,
                num_kv_heads=heads,
                group=group,
                head_dim=dim,
                tile=tile,
                entries=entries,
                sel_block=sel_block,
                itemsize=q.element_size(),
                arch=arch,
                num_sms=num_sms,
            )
    if (
        config.hopper
        and config.splits == 1
        and selected is not None
        and tiles is not None
        and attend_fits(q, k_cache, v_cache, policy)
    ):
        attend_hopper(q, k_cache, v_cache, batch, policy, selected, sinks, out, scales, tiles)
        return
    chunks = ceil_div(group, config.block_h) * ceil_div(tile, config.queries)
    block_d = next_power_of_2(dim)
    places = count * heads * chunks if config.splits > 1 else 1
    rows = places * config.splits * config.block_m
    part = workspace(q.device, "parts", rows * block_d, torch.float32)
    state = workspace(q.device, "part state", rows * 2, torch.float32)
    ticket = workspace(q.device, "tickets", places, torch.int32)
    indices = batch.seq_lens if selected is None else selected
    attend_kernel[(count * chunks, heads, config.splits)](
        out,
        part,
        state,
        ticket,
        q,
        k_cache,
        v_cache,
        q if sinks is None else sinks,
        indices,
        batch.seq_lens if tiles is None else tiles,
        batch.block_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        *scales,
        policy.window_size or 0,
        policy.num_sink,
        policy.dense_below,
        batch.num_decode_tokens,
        *out.stride()[:2],
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *(selected.stride()[:2] if selected is not None else (0, 0)),
        batch.block_table.stride(0),
        MODE=0 if policy.is_dense else 2 if topk else 1,
        FROM_TABLE=tiles is not None,
        TILES_PER_REQUEST=per_request,
        NUM_KV_HEADS=heads,
        GROUP=group,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        TILE=tile,
        POLICY_TILE=policy.query_tile if topk else 1,
        QUERIES=config.queries,
        BLOCK_H=config.block_h,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SEL_BLOCK=sel_block,
        SINK_BLOCKS=ceil_div(policy.num_sink, sel_block),
        REACH_BLOCKS=ceil_div((policy.window_size or 1) - 1, sel_block),
        SCORED_BLOCKS=policy.scored_blocks if topk else 0,
        PAGE_SIZE=page_size,
        SPLITS=config.splits,
        HAS_SINKS=sinks is not None,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers or None,
        **(overlap_options(q.device) if topk else {"OVERLAP": False}),
    )
