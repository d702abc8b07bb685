"""The inverse of a selection: for each block, the queries that chose it.

Built with sorting and prefix sums on the device; the host never learns a count.  Rows of q are cut
into a few chunks, so that the scratch of one chunk stays small.  The queries of a (KV head, block)
pair of a chunk are cut into items of at most ``item_entries``; one program serves one item.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.nsa.selected.problem import SelectedProblem


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
        num_blocks = per_seq * batch
    else:
        counts = -(-(cu_seqlens[1:] - cu_seqlens[:-1]) // sel_block_size)
        cu_blocks = torch.zeros_like(cu_seqlens)
        cu_blocks[1:] = torch.cumsum(counts, 0, dtype=torch.int32)
        num_blocks = num_k // sel_block_size + cu_seqlens.shape[0] - 1
    block = torch.arange(num_blocks, dtype=torch.int32, device=device)
    seq = torch.searchsorted(cu_blocks[1:], block, right=True, out_int32=True)
    return cu_blocks, seq.clamp_(max=cu_blocks.shape[0] - 2), num_blocks


def build_index(
    problem: SelectedProblem, chunk_rows: int, item_entries: int, far_only: bool = False
) -> InverseIndex:
    """Invert the selection of ``problem``; deterministic, no synchronisation.

    Args:
        problem: whose ``block_indices`` are inverted.
        chunk_rows: rows of ``[B * N]`` that a chunk has.
        item_entries: most queries that an item has.
        far_only: leave out blocks that are near to their query: its own, the one before and the
            first of the sequence (and blocks of the future).
    """
    batch, num_q, num_kv_heads, top_n = problem.block_indices.shape
    cu_seqlens, device = problem.cu_seqlens, problem.q.device
    cu_blocks, block_seq, num_blocks = _block_tables(problem)
    rows = batch * num_q
    num_chunks = -(-rows // chunk_rows)
    num_keys = num_chunks * num_kv_heads * num_blocks
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
    keys = torch.where(listed, base[..., None] + chosen, num_keys).view(-1)
    ordered, entries = torch.sort(keys, stable=True)
    edges = torch.arange(num_keys + 1, dtype=torch.int32, device=device)
    entry_offsets = torch.searchsorted(ordered, edges, out_int32=True)
    counts = entry_offsets[1:] - entry_offsets[:-1]
    item_offsets = torch.zeros_like(entry_offsets)
    item_offsets[1:] = torch.cumsum(-(-counts // item_entries), 0, dtype=torch.int32)
    chunk_entries = min(chunk_rows, rows) * num_kv_heads * top_n
    chunk_items = chunk_entries // item_entries + min(num_kv_heads * num_blocks, chunk_entries)
    item = torch.arange(num_chunks * chunk_items, dtype=torch.int32, device=device)
    item_keys = torch.searchsorted(item_offsets[1:], item, right=True, out_int32=True)
    entries = entries.to(torch.int32)
    entry_rows = entries // (num_kv_heads * top_n)
    return InverseIndex(
        entries=entries,
        entry_rows=entry_rows if batch == 1 else entry_rows % num_q,
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
