"""Paged attention in plain torch: gathered blocks and SDPA, no loop over tokens.

This is the CPU path, and what any device without a Triton kernel can run.  Decoded tokens are
handled together, whatever their sequences; a prefill is handled in groups of query tiles.  Index
tensors that depend on the batch alone are built once per step and shared by all layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparsek_kernels.paged.attend.cpu_parts import attend_blocks, blocks_and_logs
from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.cpu.gather import block_reader, join_kv, read_sequence
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.cpu.plan import TileGroup, plan_decodes, plan_prefill
from sparsek_kernels.paged.merge import merge_shards
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy

_DENSE_ROWS = 512
"""Queries that a dense prefill with a prefix handles at once: bounds its mask."""


def attend_gathered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """SDPA over gathered keys, with learned sinks as one more key of value zero.

    Args:
        q: ``[T, Hkv, G, Q, D]``; k, v: ``[T, Hkv, n, D]``.
        bias: additive, broadcastable to ``[T, Hkv, Q, n]``, or ``None``.
        sinks: ``[Hq]`` logits, or ``None``.

    Returns:
        ``[T, Hkv, G, Q, Dv]``.
    """
    tiles, heads, group, rows, dim = q.shape
    if bias is not None:
        bias = bias.to(q.dtype)
        if rows > 1 and bias.shape[-2] > 1:
            bias = bias.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)
    if sinks is not None:
        k = torch.cat([k, k.new_zeros(*k.shape[:2], 1, k.shape[3])], dim=2)
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], dim=2)
        column = sinks.to(q.dtype).view(1, heads, group, 1, 1)
        column = column.expand(-1, -1, -1, rows, -1).reshape(1, heads, group * rows, 1)
        keys = q.new_zeros(1) if bias is None else bias
        keys = keys.expand(tiles, heads, group * rows, k.shape[2] - 1)
        bias = torch.cat([keys, column.expand(tiles, -1, -1, -1)], dim=-1)
    flat = q.reshape(tiles, heads, group * rows, dim)
    out = F.scaled_dot_product_attention(flat, k, v, attn_mask=bias, scale=softmax_scale)
    return out.view(tiles, heads, group, rows, v.shape[-1])


def attend_tiles(
    q: torch.Tensor,
    operands: PagedOperands,
    group: TileGroup,
    chosen: Chosen | None,
    policy: SelectionPolicy,
) -> torch.Tensor:
    """Attention of tiles over their selected, sink and local blocks.

    Args:
        q: ``[T, Hkv, G, Q, D]``.
        chosen: of these tiles, or ``None``.
    """
    if chosen is not None and policy.alignment:
        out, lse = attend_blocks(q.squeeze(3), operands, group, chosen, policy)
        sinks = None if operands.sinks is None else operands.sinks.view(lse.shape[1:])
        return merge_shards(out[None], lse[None], sinks).to(q.dtype).unsqueeze(3)
    selected, logs = None, None
    if chosen is not None:
        selected, logs = blocks_and_logs(chosen.indices)
    joined = join_kv(operands.k_cache, operands.v_cache)
    caches = (operands.k_cache, operands.v_cache) if joined is None else (joined,)
    gathered = []
    for cache in caches:
        reader = block_reader(cache, policy.sel_block_size)
        rows = reader.read(group.names(reader, selected, policy.sel_block_size)).flatten(2, 3)
        rows = rows[:, :, : group.num_keys]
        if group.stale is not None:
            rows[:, :, -group.stale.shape[2] :].masked_fill_(group.stale, 0.0)
        gathered.append(rows)
    k, v = gathered if joined is None else gathered[0].chunk(2, dim=-1)
    bias = group.bias_as(q.dtype)
    if logs is not None and logs.any():
        logs = logs.repeat_interleave(policy.sel_block_size, dim=-1).unsqueeze(2)
        logs = F.pad(logs, (0, group.num_keys - logs.shape[-1])).to(q.dtype)
        bias = logs if bias is None else bias + logs
    return attend_gathered(q, k, v, bias, operands.softmax_scale, operands.sinks)


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of the last ``n`` queries of a sequence over all of it.

    Args:
        q: ``[n, Hkv, G, D]``; k, v: ``[Hkv, N, D]`` with ``N >= n``.

    Returns:
        ``[n, Hkv, G, Dv]``.
    """
    count, heads, group, dim = q.shape
    length = k.shape[1]
    if count == length and sinks is None:
        out = F.scaled_dot_product_attention(
            q.view(count, heads * group, dim).transpose(0, 1).unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            is_causal=True,
            scale=softmax_scale,
            enable_gqa=group > 1,
        )
        return out[0].transpose(0, 1).reshape(count, heads, group, -1)
    parts = []
    for begin in range(0, count, _DENSE_ROWS):
        end = min(begin + _DENSE_ROWS, count)
        keys = length - count + end
        bias = None
        if end - begin > 1:
            future = torch.ones(end - begin, keys, dtype=torch.bool).triu_(keys - end + begin + 1)
            bias = torch.zeros(future.shape).masked_fill_(future, float("-inf"))[None, None]
        rows = q[begin:end].permute(1, 2, 0, 3).unsqueeze(0)
        out = attend_gathered(
            rows, k[None, :, :keys], v[None, :, :keys], bias, softmax_scale, sinks
        )
        parts.append(out[0].permute(2, 0, 1, 3))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_sequence(
    q: torch.Tensor, operands: PagedOperands, pages: torch.Tensor, length: int
) -> torch.Tensor:
    """:func:`attend_dense` over the first ``length`` keys of the sequence with these pages."""
    joined = join_kv(operands.k_cache, operands.v_cache)
    if joined is None:
        k, v = (read_sequence(x, pages, length) for x in (operands.k_cache, operands.v_cache))
    else:
        k, v = read_sequence(joined, pages, length).chunk(2, dim=-1)
    return attend_dense(q, k, v, operands.softmax_scale, operands.sinks)


def attend_segment(operands: PagedOperands, segment: Segment, chosen: Chosen | None) -> None:
    """Torch form of :func:`sparsek_kernels.paged.attend.attend`."""
    batch, policy = segment.batch, segment.policy
    _, counts = host_lengths(batch)
    if segment.decodes:
        decodes = operands.of_rows(slice(sum(counts)))
        if chosen is None and native_decode.supports(decodes, batch):
            native_decode.decode(decodes, batch, policy)
        else:
            _decode(decodes, batch, policy, chosen)
        return
    token, tile = int(batch.cu_seqlens_q[0]), 0
    for request, (length, count) in enumerate(zip(*host_lengths(batch), strict=True)):
        rows = slice(token, token + count)
        tiles = policy.num_tiles(length - count, length)
        if count:
            mine = None if chosen is None else chosen.of_tiles(slice(tile, tile + tiles))
            _prefill(operands.of_rows(rows), batch, request, policy, mine)
        token, tile = rows.stop, tile + tiles


def _decode(
    operands: PagedOperands, batch: PagedBatch, rule: SelectionPolicy, chosen: Chosen | None
) -> None:
    heads, page_size = operands.heads, operands.page_size
    q, out = (x.unflatten(1, (heads, -1)) for x in (operands.q, operands.out))
    plan = plan_decodes(batch, rule, page_size)
    for request, begin, end, length in plan.dense:
        pages = batch.block_table[request].long()
        out[begin:end] = _attend_sequence(q[begin:end], operands, pages, length)
    if plan.group is None:
        return
    every = plan.rows.numel() == q.shape[0]
    rows = q if every else q.index_select(0, plan.rows)
    mine = None if chosen is None else chosen.of_tiles(plan.lists)
    attended = attend_tiles(rows.unsqueeze(3), operands, plan.group, mine, rule).squeeze(3)
    if every:
        out.copy_(attended)
    else:
        out[plan.rows] = attended


def _prefill(
    operands: PagedOperands,
    batch: PagedBatch,
    request: int,
    policy: SelectionPolicy,
    chosen: Chosen | None,
) -> None:
    q, out = (x.unflatten(1, (operands.heads, -1)) for x in (operands.q, operands.out))
    plan = plan_prefill(batch, request, policy, operands.k_cache)
    lengths, _ = host_lengths(batch)
    length = lengths[request]
    start = length - q.shape[0]
    if plan.dense_end > start:
        count = plan.dense_end - start
        pages = batch.block_table[request].long()
        out[:count] = _attend_sequence(q[:count], operands, pages, plan.dense_end)
    for first, tiles, group in plan.groups:
        begin = max(first, plan.dense_end, start)
        end = min(first + tiles * plan.tile, length)
        row = first // plan.tile - start // plan.tile
        mine = None
        if chosen is not None:
            here = slice(row, row + tiles)
            mine = Chosen(chosen.indices[here, :, : policy.places(first)])
        padded = q.new_zeros(tiles * plan.tile, *q.shape[1:])
        padded[begin - first : end - first] = q[begin - start : end - start]
        padded = padded.unflatten(0, (tiles, plan.tile)).permute(0, 2, 3, 1, 4)
        attended = attend_tiles(padded, operands, group, mine, policy)
        attended = attended.permute(0, 3, 1, 2, 4).flatten(0, 1)
        out[begin - start : end - start] = attended[begin - first : end - first]
