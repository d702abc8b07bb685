"""The inverse of a selection: for each block, the queries that chose it.

Built with sorting and prefix sums on the device; the host never learns a count.  Rows of q are cut
into a few chunks, so that the scratch of one chunk stays small.  The queries of a (KV head, block)
pair of a chunk are cut into items of at most ``item_entries``; one program serves one item.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sparsek_kernels.nsa.selected.kernels.index import (
    nsa_index_items_kernel,
    nsa_index_keys_kernel,
)
from sparsek_kernels.nsa.selected.problem import SelectedProblem

_BLOCK = 512
_ALIGNED = 64


@dataclass(frozen=True)
class InverseIndex:
    """Queries by block.

    Key ``(chunk * Hkv + kv_head) * num_blocks + block`` numbers a pair of a chunk; blocks are
    numbered through all sequences of the batch.  Entries are sorted by key, rows ascending; slots
    that hold -1 come last.  Tensors are int32.
    """

    entries: torch.Tensor  # [B * N * Hkv * S], the slot of each: a place in ``block_indices``
    entry_rows: torch.Tensor  # the row of q, within its batch, of each entry
    entry_offsets: torch.Tensor  # [keys + 1], where a key's entries start
    item_offsets: torch.Tensor  # [keys + 1], where a key's items start
    item_keys: torch.Tensor  # [items], the key of each item (an upper bound of items)
    block_seq: torch.Tensor  # [num_blocks], the sequence of each block
    cu_blocks: torch.Tensor  # [sequences + 1], the first block of each sequence
    chunk_rows: int  # rows of [B * N] in a chunk
    num_chunks: int
    num_blocks: int  # of the batch (an upper bound when packed)
    chunk_items: int  # an upper bound of the items of one chunk
    item_entries: int  # most entries of an item


def _block_tables(problem: SelectedProblem) -> tuple[torch.Tensor, torch.Tensor, int]:
    """``cu_blocks``, ``block_seq`` and the number of blocks."""
    cu_seqlens, sel_block_size = problem.cu_seqlens, problem.sel_block_size
    batch, num_k, device = problem.shape.batch, problem.shape.num_k, problem.q.device
    if cu_seqlens is None:
        per_seq = -(-num_k // sel_block_size)
        cu_blocks = torch.arange(batch + 1, dtype=torch.int32, device=device) * per_seq
        block = torch.arange(per_seq * batch, dtype=torch.int32, device=device)
        return cu_blocks, block // max(per_seq, 1), per_seq * batch
    counts = -(-(cu_seqlens[1:] - cu_seqlens[:-1]) // sel_block_size)
    cu_blocks = torch.zeros_like(cu_seqlens)
    cu_blocks[1:] = torch.cumsum(counts, 0, dtype=torch.int32)
    num_blocks = num_k // sel_block_size + cu_seqlens.shape[0] - 1
    block = torch.arange(num_blocks, dtype=torch.int32, device=device)
    seq = torch.searchsorted(cu_blocks[1:], block, right=True, out_int32=True)
    return cu_blocks, seq.clamp_(max=cu_blocks.shape[0] - 2), num_blocks


def _keys(
    problem: SelectedProblem,
    chunk_rows: int,
    far_only: bool,
    cu_blocks: torch.Tensor,
    num_blocks: int,
    num_keys: int,
) -> torch.Tensor:
    """The key of each place in ``block_indices``; ``num_keys`` where the index has none."""
    batch, num_q, num_kv_heads, top_n = problem.block_indices.shape
    cu_seqlens, device, rows = problem.cu_seqlens, problem.q.device, batch * num_q
    row = torch.arange(rows, dtype=torch.int32, device=device)
    if cu_seqlens is None:
        seq = row // num_q
        pos = row % num_q + problem.offset
    else:
        seq = torch.searchsorted(cu_seqlens[1:], row, right=True, out_int32=True)
        pos = row - cu_seqlens[seq]
    head = torch.arange(num_kv_heads, dtype=torch.int32, device=device)
    base = (row // chunk_rows * num_kv_heads)[:, None] + head  # [rows, Hkv]
    base = base * num_blocks + cu_blocks[seq][:, None]
    chosen = problem.block_indices.view(rows, num_kv_heads, top_n)
    listed = chosen >= 0
    if far_only:
        own = pos // problem.sel_block_size
        listed = (chosen > 0) & (chosen < (own - 1)[:, None, None])
    return torch.where(listed, base[..., None] + chosen, num_keys).view(-1)


def build_index(
    problem: SelectedProblem,
    chunk_rows: int,
    item_entries: int,
    far_only: bool = False,
    keys: torch.Tensor | None = None,
) -> InverseIndex:
    """Invert the selection of ``problem``; deterministic, no synchronisation.

    Args:
        problem: whose ``block_indices`` are inverted.
        chunk_rows: rows of ``[B * N]`` that a chunk has.
        item_entries: most queries that an item has.
        far_only: leave out blocks that are near to their query: its own, the one before and the
            first of the sequence (and blocks of the future).
        keys: of all places in ``block_indices``, int32, where a kernel has written them.
    """
    batch, num_q, num_kv_heads, top_n = problem.block_indices.shape
    device = problem.q.device
    cu_blocks, block_seq, num_blocks = _block_tables(problem)
    rows = batch * num_q
    num_chunks = -(-rows // chunk_rows)
    num_keys = num_chunks * num_kv_heads * num_blocks
    if keys is None:
        keys = _keys(problem, chunk_rows, far_only, cu_blocks, num_blocks, num_keys)
    ordered, places = torch.sort(keys, stable=True)
    count, per_row = keys.numel(), num_kv_heads * top_n
    chunk_entries = min(chunk_rows, rows) * per_row
    chunk_items = chunk_entries // item_entries + min(num_kv_heads * num_blocks, chunk_entries)
    sizes = (count, count, num_keys + 1, num_keys, num_keys + 1, num_chunks * chunk_items)
    widths = [triton.cdiv(size, _ALIGNED) * _ALIGNED for size in sizes]
    tensors = torch.empty(sum(widths), dtype=torch.int32, device=device).split(widths)
    entries, entry_rows, entry_offsets, items, item_offsets, item_keys = (
        x[:size] for x, size in zip(tensors, sizes, strict=True)
    )
    nsa_index_keys_kernel[(triton.cdiv(max(count, num_keys + 1), _BLOCK),)](
        entries, entry_rows, entry_offsets, items, item_offsets, ordered, places,
        count, num_keys, item_entries, per_row, num_q,
        STEPS=count.bit_length(), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    torch.cumsum(items, 0, dtype=torch.int32, out=item_offsets[1:])
    nsa_index_items_kernel[(triton.cdiv(item_keys.numel(), _BLOCK),)](
        item_keys, item_offsets,
        item_keys.numel(), num_keys,
        STEPS=num_keys.bit_length(), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return InverseIndex(
        entries=entries,
        entry_rows=entry_rows,
        entry_offsets=entry_offsets,
        item_offsets=item_offsets,
        item_keys=item_keys,
        block_seq=block_seq,
        cu_blocks=cu_blocks,
        chunk_rows=chunk_rows,
        num_chunks=num_chunks,
        num_blocks=num_blocks,
        chunk_items=chunk_items,
        item_entries=item_entries,
    )
