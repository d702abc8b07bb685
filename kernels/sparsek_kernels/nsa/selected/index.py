"""The inverse of a selection: for each block, the queries that chose it.

Built by one sort on the device; the host never learns a count.  Rows of q are cut into a few
chunks, so that the scratch of one chunk stays small.  The queries of a (KV head, block) pair of a
chunk are cut into items of at most ``item_entries``; one program serves one item.

Forward and backward share the sort.  Forward serves far entries, by chunks of its own; backward all
of them, in the order of their rows, by chunks of ``together`` of those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.common.operators import pointers
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import cdiv
from sparsek_kernels.nsa.selected.kernels.index import (
    nsa_index_keys_kernel,
    nsa_index_merge_kernel,
    nsa_index_order_kernel,
)
from sparsek_kernels.nsa.selected.problem import (
    ALIGNED,
    MAX_CHUNKS,
    SelectedProblem,
    key_dtype,
)

_BLOCK = 512


@dataclass(frozen=True)
class InverseIndex:
    """Queries by block.

    Key ``(chunk * Hkv + kv_head) * num_blocks + block`` numbers a pair of a chunk; blocks are
    numbered through all sequences of the batch (``locate_block``), items through all keys
    (``first_item``).  Entries are sorted by key, rows ascending.  Tensors are int32.
    """

    entries: torch.Tensor  # [B * N * Hkv * S], the slot of each: a place in ``block_indices``
    entry_rows: torch.Tensor  # the row of q, within its batch, of each entry
    entry_offsets: torch.Tensor  # [keys + 1], where a key's entries start
    item_keys: torch.Tensor  # the key of each item, -1 for none
    block_seq: torch.Tensor  # [num_blocks], the packed sequence of each block
    chunk_rows: int  # rows of [B * N] in a chunk
    num_chunks: int
    num_blocks: int  # of the batch (an upper bound when packed)
    chunk_items: int  # an upper bound of the items of one chunk
    item_entries: int  # most entries of an item


def _new_index(
    problem: SelectedProblem,
    chunk_rows: int,
    item_entries: int,
    sorted_: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> InverseIndex:
    """An index to be filled; ``sorted_`` are its entries and offsets, where they have a place."""
    shape, num_blocks = problem.shape, problem.num_blocks
    rows, count = shape.batch * shape.num_q, problem.block_indices.numel()
    num_chunks, chunk_keys = -(-rows // chunk_rows), shape.num_kv_heads * num_blocks
    num_keys = num_chunks * chunk_keys
    sizes = [count, count // item_entries + num_keys, num_blocks]
    if sorted_ is None:
        sizes += [count, num_keys + 1]
    widths = [cdiv(size, ALIGNED) * ALIGNED for size in sizes]
    tensors = torch.empty(sum(widths), dtype=torch.int32, device=problem.q.device).split(widths)
    entry_rows, item_keys, block_seq, *rest = tensors
    entries, entry_offsets = sorted_ or rest
    chunk_entries = min(chunk_rows, rows) * shape.num_kv_heads * problem.top_n
    return InverseIndex(
        entries=entries,
        entry_rows=entry_rows,
        entry_offsets=entry_offsets,
        item_keys=item_keys,
        block_seq=block_seq,
        chunk_rows=chunk_rows,
        num_chunks=num_chunks,
        num_blocks=num_blocks,
        chunk_items=chunk_entries // item_entries + 1 + chunk_keys,
        item_entries=item_entries,
    )


def _grid(*counts: int) -> tuple[int]:
    return (cdiv(max(counts), _BLOCK),)


def sort_selection(
    problem: SelectedProblem, kept: torch.Tensor, keys: torch.Tensor | None = None
) -> InverseIndex:
    """The index of far entries by chunks of ``index_rows``; deterministic, no synchronisation.

    An entry is near where its block is its query's own, the one before, the first of the sequence
    or one of the future.

    Args:
        problem: whose ``block_indices`` are inverted.
        kept: ``problem.new_index()``, filled for :func:`merge_selection`.
        keys: of all places in ``block_indices``, where a kernel has written them.  Keys of entries
            that the index leaves out come behind all others, in the same order; a place
            without a block has the highest.

    Raises:
        ValueError: launch parameters of more chunks than ``kept`` has room for.
    """
    shape, config, device = problem.shape, problem.config, problem.q.device
    count, num_blocks = problem.block_indices.numel(), problem.num_blocks
    least = cdiv(shape.batch * shape.num_q, MAX_CHUNKS)
    if config.index_rows < least:
        raise ValueError(f"tuned: expected index_rows of {least} or more, got {config.index_rows}")
    index = _new_index(problem, config.index_rows, config.item_entries, problem.split_index(kept))
    num_keys = index.num_chunks * shape.num_kv_heads * num_blocks
    cu_seqlens = pointers(problem.q, problem.cu_seqlens)
    if keys is None:
        keys = torch.empty(count, dtype=key_dtype(num_keys), device=device)
        run(
            nsa_index_keys_kernel, _grid(count),
            keys, problem.block_indices, *cu_seqlens,
            count, num_keys, shape.num_q, shape.num_k, problem.offset, index.chunk_rows, num_blocks,
            problem.num_seqs, shape.num_kv_heads,
            TOP_N=problem.top_n, SEL_BLOCK=problem.sel_block_size, **problem.sequence_rules,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    ordered, places = torch.sort(keys, stable=True)
    run(
        nsa_index_order_kernel, _grid(count, 2 * num_keys + 1),
        index.entries, index.entry_rows, index.entry_offsets, index.item_keys, index.block_seq,
        ordered, places, *cu_seqlens,
        count, num_keys, shape.num_q, num_blocks, problem.num_seqs, index.item_entries,
        PER_ROW=shape.num_kv_heads * problem.top_n, SEL_BLOCK=problem.sel_block_size,
        **problem.sequence_rules, STEPS=count.bit_length(), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return index


def merge_selection(problem: SelectedProblem, kept: torch.Tensor) -> InverseIndex:
    """The index of all entries by chunks of about ``chunk_rows_bwd``, from ``sort_selection``."""
    shape, config = problem.shape, problem.config
    entries, offsets = problem.split_index(kept)
    rows, step = shape.batch * shape.num_q, config.index_rows
    num_chunks = -(-rows // step)
    together = max(round(config.chunk_rows_bwd / step), 1)
    if config.chunk_rows_bwd >= rows:
        together = num_chunks
    index = _new_index(problem, together * step, config.item_entries_bwd)
    chunk_keys = shape.num_kv_heads * index.num_blocks
    num_keys, num_merged = num_chunks * chunk_keys, index.num_chunks * chunk_keys
    count = entries.numel()
    run(
        nsa_index_merge_kernel, _grid(count, num_merged + 1),
        index.entries, index.entry_rows, index.entry_offsets, index.item_keys, index.block_seq,
        entries, offsets, *pointers(problem.q, problem.cu_seqlens),
        num_keys, shape.num_q, index.num_blocks, problem.num_seqs, index.item_entries, num_merged,
        chunk_keys, together,
        PER_ROW=shape.num_kv_heads * problem.top_n, SEL_BLOCK=problem.sel_block_size,
        **problem.sequence_rules, STEPS=(2 * num_keys).bit_length(),
        RUN_STEPS=min(step, rows).bit_length(), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return index
