"""Launching the paged Triton kernels: shapes to configurations, grids, strides and scratch.

Nothing here reads a device value: every grid follows from shapes and from the host bounds of the
batch, so each call can be captured in a CUDA graph and replayed with other lengths.
"""

from __future__ import annotations

from functools import cache

import torch

from .batch import PagedBatch
from .config import (
    LaunchConfig,
    decode_config,
    is_hopper,
    logits_config,
    next_power_of_2,
    prefill_config,
    score_config,
)
from .kernels_attend import attend_kernel
from .kernels_select import decode_logits_kernel, top_blocks_kernel
from .kernels_tile_scores import tile_scores_kernel, tile_scores_once_kernel
from .kernels_write import write_kv_kernel
from .policy import CELL_SIZE, SelectionPolicy, ceil_div

_LOG2E = 1.4426950408889634
_SCRATCH_ELEMENTS = 1 << 24
"""Most float32 elements (64 MiB) of one scratch tensor of scores; larger steps go in batches."""

_PARKED_ELEMENTS = 1 << 27
"""Most fp16 elements (256 MiB) that single-pass scoring may park."""

_DENSE_TILE = 64


@cache
def device_traits(index: int) -> tuple[int, int]:
    """``(compute capability as major * 10 + minor, multiprocessors)`` of a CUDA device."""
    if not torch.cuda.is_available():
        return 80, 4
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def _traits(device: torch.device) -> tuple[int, int]:
    return device_traits(device.index or 0)


def _overlap(device: torch.device) -> dict[str, bool]:
    """Compile and launch options that let a kernel start while its predecessor drains."""
    use = device.type == "cuda" and is_hopper(_traits(device)[0])
    return {"OVERLAP": True, "launch_pdl": True} if use else {"OVERLAP": False}


_workspaces: dict[tuple[torch.device, str, int], torch.Tensor] = {}


def workspace(device: torch.device, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Flat zero-initialised scratch of at least ``numel`` elements, kept for later calls.

    Sizes are rounded up to powers of two and never freed, so that captured graphs keep valid
    addresses.  A first use under capture belongs to that graph alone.
    """
    size = next_power_of_2(max(numel, 1024))
    key = (device, name, size)
    found = _workspaces.get(key)
    if found is None:
        found = torch.zeros(size, device=device, dtype=dtype)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _workspaces[key] = found
    return found


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


def prefill_tiles(batch: PagedBatch, tile: int, num_tokens: int) -> torch.Tensor:
    """Device table of the prefills' tiles: ``[bound, 2]`` int32, request (or -1) and base."""
    bound = (num_tokens - batch.num_decode_tokens) // tile + 2 * batch.num_prefills

    def build() -> torch.Tensor:
        first = batch.num_decodes
        cu = batch.cu_seqlens_q[first:].to(torch.int64)
        counts = cu[1:] - cu[:-1]
        lens = batch.seq_lens[first:].to(torch.int64)
        first_tile = (lens - counts).clamp(min=0) // tile
        tiles = torch.where(counts > 0, (lens - 1).clamp(min=0) // tile - first_tile + 1, 0)
        ends = tiles.cumsum(0)
        index = torch.arange(bound, device=cu.device)
        owner = torch.searchsorted(ends, index, right=True)
        known = owner < lens.shape[0]
        owner = owner.clamp(max=lens.shape[0] - 1)
        base = (first_tile[owner] + index - (ends - tiles)[owner]) * tile
        request = torch.where(known, owner + first, -1)
        return torch.stack([request, base], dim=1).to(torch.int32).contiguous()

    return batch.derived(("prefill tiles", tile, bound), build)


def _max_blocks(batch: PagedBatch, sel_block: int) -> int:
    return max(ceil_div(batch.max_seq_len, sel_block), 1)


def _cells(policy: SelectionPolicy) -> int:
    width = 2 * CELL_SIZE if policy.score_kind == "min_max" else CELL_SIZE
    return policy.sel_block_size // width


def select_blocks(
    q: torch.Tensor,
    k_summary: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    softmax_scale: float,
    page_size: int,
    k_scale: float = 1.0,
) -> torch.Tensor:
    """Selected blocks ``[tiles, Hkv, scored_blocks]`` int32; -1 where a tile sees everything.

    Row ``t`` of the decodes is query token ``t``; the prefills' tiles follow in order.
    """
    heads = k_summary.shape[1]
    tiles: torch.Tensor | None = None
    count = batch.num_decode_tokens
    if batch.num_prefills:
        tiles = prefill_tiles(batch, policy.query_tile, q.shape[0])
        count += tiles.shape[0]
    out = torch.empty(count, heads, policy.scored_blocks, dtype=torch.int32, device=q.device)
    if policy.scored_blocks == 0:
        return out
    scale = softmax_scale * k_scale * _LOG2E
    if batch.num_decodes:
        _select_decodes(out, q, k_summary, batch, policy, scale, page_size)
    if tiles is not None:
        _select_tiles(out, q, k_summary, batch, policy, tiles, scale, page_size)
    return out


def _select_decodes(
    out: torch.Tensor,
    q: torch.Tensor,
    k_summary: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    qk_scale: float,
    page_size: int,
) -> None:
    heads = k_summary.shape[1]
    num_heads, dim = q.shape[1:]
    group = num_heads // heads
    max_blocks = _max_blocks(batch, policy.sel_block_size)
    width = ceil_div(max_blocks, 16) * 16
    length = batch.decode_query_len
    per_request = length * num_heads * width
    step = max(min(_SCRATCH_ELEMENTS // per_request, batch.num_decodes), 1)
    logits = workspace(q.device, "logits", step * per_request, torch.float32)
    config = logits_config(group=group, head_dim=dim, queries=length, cells=_cells(policy))
    chunks = ceil_div(max_blocks, config.block_n)
    for first in range(0, batch.num_decodes, step):
        requests = min(step, batch.num_decodes - first)
        decode_logits_kernel[(chunks, heads, requests)](
            logits,
            q,
            k_summary,
            batch.block_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            qk_scale,
            batch.block_table.shape[1],
            policy.dense_below,
            first,
            num_heads * width,
            width,
            *q.stride()[:2],
            *k_summary.stride()[:3],
            batch.block_table.stride(0),
            NUM_KV_HEADS=heads,
            GROUP=group,
            QUERY_LEN=length,
            HEAD_DIM=dim,
            BLOCK_D=next_power_of_2(dim),
            BLOCK_H=config.block_h,
            BLOCK_M=config.block_m,
            BLOCK_B=config.block_n,
            PAGE_SIZE=page_size,
            SEL_BLOCK=policy.sel_block_size,
            SINK_BLOCKS=policy.sink_blocks,
            REACH_BLOCKS=policy.reach_blocks,
            SCORED_BLOCKS=policy.scored_blocks,
            MIN_MAX=policy.score_kind == "min_max",
            num_warps=config.num_warps,
            **_overlap(q.device),
        )
        _top_blocks(
            out,
            logits,
            None,
            batch,
            policy,
            (requests * length, heads),
            first * length,
            0,
            (num_heads * width, group * width, width),
            group,
            max_blocks,
        )


def _top_blocks(
    out: torch.Tensor,
    scores: torch.Tensor,
    tiles: torch.Tensor | None,
    batch: PagedBatch,
    policy: SelectionPolicy,
    grid: tuple[int, int],
    first_tile: int,
    out_tile: int,
    strides: tuple[int, int, int],
    group: int,
    max_blocks: int,
) -> None:
    top_blocks_kernel[grid](
        out,
        scores,
        batch.seq_lens if tiles is None else tiles,
        batch.seq_lens,
        batch.cu_seqlens_q,
        policy.dense_below,
        first_tile,
        out_tile,
        *out.stride()[:2],
        *strides,
        FROM_TABLE=tiles is not None,
        TILES_PER_REQUEST=1 if tiles is not None else batch.decode_query_len,
        POLICY_TILE=1 if tiles is None else policy.query_tile,
        GROUP=group,
        SEL_BLOCK=policy.sel_block_size,
        SINK_BLOCKS=policy.sink_blocks,
        REACH_BLOCKS=policy.reach_blocks,
        SCORED_BLOCKS=policy.scored_blocks,
        MAX_BLOCKS=next_power_of_2(max(max_blocks, 16)),
        num_warps=8 if max_blocks <= 4096 else 16,
        **_overlap(out.device),
    )


def _select_tiles(
    out: torch.Tensor,
    q: torch.Tensor,
    k_summary: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    tiles: torch.Tensor,
    qk_scale: float,
    page_size: int,
) -> None:
    heads = k_summary.shape[1]
    num_heads, dim = q.shape[1:]
    group = num_heads // heads
    max_blocks = _max_blocks(batch, policy.sel_block_size)
    width = ceil_div(max_blocks, 16) * 16
    arch, num_sms = _traits(q.device)
    count = tiles.shape[0]
    step = max(min(_SCRATCH_ELEMENTS // (heads * width), count), 1)
    config = score_config(
        tiles=step,
        num_kv_heads=heads,
        group=group,
        head_dim=dim,
        tile=policy.query_tile,
        cells=_cells(policy),
        max_blocks=max_blocks,
        arch=arch,
        num_sms=num_sms,
    )
    scores = workspace(q.device, "scores", step * heads * width, torch.float32)
    for first in range(0, count, step):
        here = min(step, count - first)
        _score_tiles(
            scores,
            q,
            k_summary,
            batch,
            policy,
            tiles,
            qk_scale,
            page_size,
            first,
            here,
            width,
            config,
        )
        _top_blocks(
            out,
            scores,
            tiles,
            batch,
            policy,
            (here, heads),
            first,
            batch.num_decode_tokens,
            (heads * width, width, 0),
            group,
            max_blocks,
        )


def _score_tiles(
    scores: torch.Tensor,
    q: torch.Tensor,
    k_summary: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    tiles: torch.Tensor,
    qk_scale: float,
    page_size: int,
    first: int,
    count: int,
    width: int,
    config: LaunchConfig,
) -> None:
    heads = k_summary.shape[1]
    num_heads, dim = q.shape[1:]
    group = num_heads // heads
    strides = (
        *q.stride()[:2],
        *k_summary.stride()[:3],
        batch.block_table.stride(0),
        heads * width,
        width,
    )
    shape = {
        "NUM_KV_HEADS": heads,
        "GROUP": group,
        "HEAD_DIM": dim,
        "BLOCK_D": next_power_of_2(dim),
        "POLICY_TILE": policy.query_tile,
        "QUERIES": config.queries,
        "BLOCK_H": config.block_h,
        "BLOCK_M": config.block_m,
        "BLOCK_B": config.block_n,
        "PAGE_SIZE": page_size,
        "SEL_BLOCK": policy.sel_block_size,
        "SINK_BLOCKS": policy.sink_blocks,
        "REACH_BLOCKS": policy.reach_blocks,
        "SCORED_BLOCKS": policy.scored_blocks,
        "MIN_MAX": policy.score_kind == "min_max",
        "NUM_STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }
    where = (tiles, batch.block_table, batch.seq_lens, batch.cu_seqlens_q)
    _, num_sms = _traits(q.device)
    programs = min(num_sms, count * heads)
    steps = ceil_div(width, config.block_n)
    parked_size = programs * steps * config.block_m * config.block_n
    if config.splits == 1 and parked_size <= _PARKED_ELEMENTS:
        parked = workspace(q.device, "parked", parked_size, torch.float16)
        maxima = workspace(
            q.device, "parked maxima", programs * steps * config.block_m, torch.float32
        )
        tile_scores_once_kernel[(programs,)](
            scores,
            parked,
            maxima,
            q,
            k_summary,
            *where,
            qk_scale,
            policy.dense_below,
            first,
            count,
            steps,
            *strides,
            **shape,
        )
        return
    chunks = ceil_div(group, config.block_h) * ceil_div(policy.query_tile, config.queries)
    state_size = count * heads * chunks * config.splits * 2 * config.block_m
    state = workspace(q.device, "score state", state_size, torch.float32)
    for second_pass in (False, True):
        tile_scores_kernel[(count, heads, config.splits)](
            scores,
            state,
            q,
            k_summary,
            *where,
            qk_scale,
            policy.dense_below,
            first,
            *strides,
            SPLITS=config.splits,
            SECOND_PASS=second_pass,
            **shape,
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
) -> None:
    """Triton form of :func:`sparsek_kernels.paged.paged_attention`; writes ``out``."""
    selected: torch.Tensor | None = None
    if policy.selects_blocks:
        if k_summary is None:
            raise ValueError("k_summary: expected page summaries for block selection, got None")
        selected = select_blocks(
            q,
            k_summary,
            batch,
            policy,
            softmax_scale=softmax_scale,
            page_size=k_cache.shape[2],
            k_scale=k_scale,
        )
    scales = (softmax_scale * k_scale * _LOG2E, v_scale)
    if batch.num_decodes:
        attend(q, k_cache, v_cache, batch, policy.per_token(), selected, sinks, out, scales, True)
    if batch.num_prefills:
        attend(q, k_cache, v_cache, batch, policy, selected, sinks, out, scales, False)


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
    arch, num_sms = _traits(q.device)
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
                arch=arch,
                num_sms=num_sms,
            )
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
        POLICY_TILE=policy.query_tile,
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
        **(_overlap(q.device) if topk else {"OVERLAP": False}),
    )
