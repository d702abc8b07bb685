"""Launching the paged Triton kernels: shapes to configurations, grids, strides and scratch.

Nothing here reads a device value: every grid follows from shapes and from the host bounds of the
batch, so each call can be captured in a CUDA graph and replayed with other lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sparsek_kernels.common.device import device_arch, multiprocessors
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.config import (
    TileConfig,
    decode_config,
    next_power_of_2,
    prefill_config,
    row_config,
)
from sparsek_kernels.paged.kernels.attend import attend_kernel
from sparsek_kernels.paged.kernels.write import write_kv_kernel
from sparsek_kernels.paged.launch.attend_sm90 import attend_fits, attend_hopper
from sparsek_kernels.paged.launch.scratch import overlap_options, rows_per_step, workspace
from sparsek_kernels.paged.launch.select import select_blocks as select_blocks
from sparsek_kernels.paged.launch.tiles import prefill_tiles
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div
from sparsek_kernels.paged.sketch import VECTOR_SIZE, rotation_size

_DENSE_TILE = 64


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store new rows and refresh the sketch of the keys they touch: one kernel."""
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    _, heads, page_size, dim = k_cache.shape
    block_d = next_power_of_2(dim)
    block_h = max(1, min(next_power_of_2(heads), 256 // block_d))
    summary = k_cache if k_summary is None else k_summary
    run(
        write_kv_kernel,
        (tokens, ceil_div(heads, block_h)),
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
        *summary.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        NUM_HEADS=heads,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        BLOCK_H=block_h,
        PAGE_SIZE=page_size,
        ROTATION=rotation_size(dim),
        VECTOR=VECTOR_SIZE,
        HAS_SUMMARY=k_summary is not None,
        num_warps=4,
    )


def paged_attention(
    operands: PagedOperands,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    batch_invariant: bool = False,
) -> None:
    """Triton form of :func:`sparsek_kernels.paged.paged_attention`; writes ``operands.out``."""
    if batch_invariant:
        _attend_by_token(operands, batch, policy)
        return
    decodes, prefills = selected_blocks(operands, batch, policy)
    if batch.num_decodes:
        attend(operands, batch, policy.per_token(), decodes, decode=True)
    if batch.num_prefills:
        attend(operands, batch, policy, prefills, decode=False)


def selected_blocks(
    operands: PagedOperands,
    batch: PagedBatch,
    policy: SelectionPolicy,
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The blocks that decodes and prefills choose by score, or ``None`` where none are chosen.

    ``largest`` is that of :func:`select_blocks`.
    """
    if not policy.selects_blocks:
        return None, None
    return select_blocks(
        operands.q,
        operands.k_cache,
        batch,
        policy,
        k_summary=operands.k_summary,
        softmax_scale=operands.softmax_scale,
        k_scale=operands.k_scale,
        lists=operands.lists,
        largest=largest,
        gates=operands.gates if policy.ranking == "seer" else None,
    )


def _attend_by_token(operands: PagedOperands, batch: PagedBatch, policy: SelectionPolicy) -> None:
    """Every query token as a decode of its own, through kernels that no batch reconfigures.

    The layer's shapes and the width of the block table decide how a row is added up: programs per
    row, keys per iteration, warps, the width of the softmax over blocks.
    """
    tokens, num_heads, dim = operands.q.shape
    rule = policy.per_token()
    width = batch.block_table.shape[1]
    batch = replace(batch, max_seq_len=width * operands.k_cache.shape[2])
    config = row_config(
        group=operands.group,
        head_dim=dim,
        sel_block=rule.sel_block_size if rule.selects_blocks else _DENSE_TILE,
        arch=device_arch(operands.q.device),
    )

    def attend_decodes(mine: PagedOperands, part: PagedBatch) -> None:
        decodes, _ = selected_blocks(mine, part, rule)
        attend(mine, part, rule, decodes, decode=True, config=config)

    if not batch.num_prefills and batch.decode_query_len == 1:
        attend_decodes(operands, batch)  # as it is: a CUDA graph may hold this step
        return
    widest = width
    if rule.selects_blocks:
        blocks = ceil_div(batch.max_seq_len, rule.sel_block_size)
        widest = max(widest, num_heads * (blocks + 16))
    step = rows_per_step(widest)
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        attend_decodes(operands.of_rows(slice(first, last)), batch.by_token(first, last))


def attend(
    operands: PagedOperands,
    batch: PagedBatch,
    policy: SelectionPolicy,
    selected: torch.Tensor | None,
    *,
    decode: bool,
    config: TileConfig | None = None,
) -> None:
    """Attend the decodes or the prefills of a batch over selected, windowed or all blocks.

    Args:
        selected: ``[tiles, Hkv, scored_blocks]`` int32 of :func:`select_blocks` for the decodes or
            for the prefills, or ``None``.
        decode: attend the decodes, under a policy per token; else the prefills.
        config: how the kernel is launched; chosen from the shapes where ``None``.
    """
    q, k_cache, v_cache, out = operands.q, operands.k_cache, operands.v_cache, operands.out
    _, heads, page_size, dim = k_cache.shape
    group = q.shape[1] // heads
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
    blocks = ceil_div(batch.max_seq_len, sel_block)
    if topk:
        blocks = min(blocks, max(policy.budget_blocks, policy.dense_below // sel_block))
    elif policy.window_size is not None:
        attended = policy.num_sink + policy.window_size + (0 if decode else tile)
        blocks = min(blocks, max(attended, policy.dense_below) // sel_block + 2)
    if config is None:
        sizes = {
            "tiles": count,
            "num_kv_heads": heads,
            "group": group,
            "head_dim": dim,
            "blocks": blocks,
            "sel_block": sel_block,
            "arch": device_arch(q.device),
            "num_sms": multiprocessors(q.device),
        }
        if decode:
            config = decode_config(**sizes, queries=tile)
        else:
            config = prefill_config(**sizes, tile=tile, itemsize=q.element_size())
    if (
        config.hopper
        and config.splits == 1
        and selected is not None
        and tiles is not None
        and attend_fits(operands, policy)
    ):
        attend_hopper(operands, batch, policy, selected, tiles)
        return
    chunks = ceil_div(group, config.block_h) * ceil_div(tile, config.queries)
    block_d = next_power_of_2(dim)
    places = count * heads * chunks if config.splits > 1 else 1
    rows = places * config.splits * config.block_m
    part = workspace(q.device, "parts", rows * block_d, torch.float32)
    state = workspace(q.device, "part state", rows * 2, torch.float32)
    ticket = workspace(q.device, "tickets", places, torch.int32)
    indices = batch.seq_lens if selected is None else selected
    run(
        attend_kernel,
        (count * chunks, heads, config.splits),
        out,
        out if operands.lse is None else operands.lse,
        part,
        state,
        ticket,
        q,
        k_cache,
        v_cache,
        q if operands.sinks is None else operands.sinks,
        indices,
        batch.seq_lens if tiles is None else tiles,
        batch.block_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        operands.softmax_scale * operands.k_scale * LOG2E.value,
        operands.v_scale,
        policy.window_size or 0,
        policy.num_sink,
        policy.dense_below,
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
        HAS_SINKS=operands.sinks is not None,
        SHARDED=operands.lse is not None,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers or None,
        **(overlap_options(q.device) if topk else {"OVERLAP": False}),
    )
