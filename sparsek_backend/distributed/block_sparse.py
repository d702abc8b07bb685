"""Block-sparse attention over a sharded sequence: each rank has rows of blocks of a pattern.

A rank fetches the key blocks that its rows list, and no others.  Its call sees them in an order of
its own, the blocks of other ranks before its own: causality then cuts its diagonal blocks as
always, and blocks in the future are left out of the pattern.  The blocks of one rank stay together,
so that what came from it is put in place, and its gradients are taken, in one piece.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from sparsek_backend.distributed.exchange import Fetch
from sparsek_backend.distributed.layouts import SequenceLayout, check_layout, check_shard
from sparsek_backend.distributed.mesh import channel_of
from sparsek_backend.distributed.rows import Range, Transfers, plan_transfers
from sparsek_kernels import block_sparse_attention
from sparsek_kernels.block_sparse.checks import misfit
from sparsek_kernels.block_sparse.structure import BlockStructure, offsets_of, structure_of
from sparsek_kernels.checks import check_int, check_qkv, check_scale


@dataclass(frozen=True)
class _Entries:
    """Blocks of a pattern on the host: pattern, row and column of each, and a digest of all."""

    pattern: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    digest: str


@dataclass(frozen=True)
class BlockPlan:
    """Key blocks that a rank fetches, and the pattern of its rows over own and fetched blocks."""

    transfers: Transfers
    structure: BlockStructure


_entries: MutableMapping[BlockStructure, _Entries] = WeakKeyDictionary()
_plans: MutableMapping[BlockStructure, dict[Any, BlockPlan]] = WeakKeyDictionary()


def _entries_of(structure: BlockStructure) -> _Entries:
    if structure not in _entries:
        crow, column = structure.crow_indices.cpu(), structure.col_indices.cpu().long()
        rows = structure.shape[0]
        flat = torch.repeat_interleave(crow.diff(dim=1).flatten().long())
        said = repr((structure.block_size, structure.shape, crow.shape)).encode()
        words = said + crow.numpy().tobytes() + column.numpy().tobytes()
        digest = blake2b(words, digest_size=8).hexdigest()
        _entries[structure] = _Entries(flat // max(rows, 1), flat % max(rows, 1), column, digest)
    return _entries[structure]


def balanced_layout(pattern: Any, world_size: int, *, causal: bool = False) -> SequenceLayout:
    """The layout of a sequence that gives every rank as many rows and about as much work.

    Rows are dealt by falling number of blocks, there and back.

    Args:
        pattern: a ``BlockSparsePattern`` or :class:`BlockStructure` with as many rows as columns.
        world_size: ranks, a divisor of the rows.
        causal: whether blocks in the future count.

    Raises:
        TypeError: no pattern.
        ValueError: another shape, or rows that the ranks cannot share equally.
    """
    check_int("world_size", world_size, 1)
    if not isinstance(pattern, BlockStructure):
        raise TypeError(f"pattern: expected a BlockStructure, got {type(pattern).__name__}")
    rows, columns = pattern.shape
    if rows != columns or rows % world_size or rows == 0:
        raise ValueError(
            f"pattern: expected as many rows as columns, a multiple of {world_size}, "
            f"got {rows} x {columns}"
        )
    entries = _entries_of(pattern)
    listed = entries.row[entries.column <= entries.row] if causal else entries.row
    work = torch.bincount(listed, minlength=rows)
    deal = [*range(world_size), *reversed(range(world_size))]
    order = [0] * rows
    for place, row in enumerate(torch.argsort(work, descending=True, stable=True).tolist()):
        order[row] = deal[place % len(deal)]
    return SequenceLayout(rows * pattern.block_size, world_size, tuple(order))


def _plan(structure: BlockStructure, layout: SequenceLayout, rank: int, causal: bool) -> BlockPlan:
    """The plan of one rank, from pattern and layout alone."""
    known = _plans.setdefault(structure, {})
    key = (layout, rank, causal)
    if key in known:
        return known[key]
    size, (num_rows, _) = structure.block_size, structure.shape
    entries = _entries_of(structure)
    seen = entries.column <= entries.row if causal else torch.ones_like(entries.row).bool()
    own = [layout.token_indices(r)[::size] // size for r in range(layout.world_size)]
    owner = torch.empty(num_rows, dtype=torch.long)
    for r, blocks in enumerate(own):
        owner[blocks] = r
    requests: list[list[list[Range]]] = []
    mine = others = own[rank]
    for r, blocks in enumerate(own):
        wanted = torch.unique(entries.column[(owner[entries.row] == r) & seen])
        wanted = wanted[owner[wanted] != r]
        wanted = wanted[torch.argsort(owner[wanted], stable=True)]  # each rank's are one piece
        order = torch.cat([wanted, blocks]).tolist()
        requests.append([[(x * size, (x + 1) * size) for x in order]])
        if r == rank:
            others = wanted
    place = torch.full((num_rows,), -1)  # of each key block in what the rank has
    place[others] = torch.arange(len(others))
    place[mine] = len(others) + torch.arange(len(mine))
    local = torch.full((num_rows,), -1)
    local[mine] = torch.arange(len(mine))
    kept = (local[entries.row] >= 0) & seen
    at = entries.pattern[kept] * len(mine) + local[entries.row[kept]]
    column = place[entries.column[kept]]
    total = len(others) + len(mine)
    ordered = torch.argsort(at * total + column)
    counts = torch.bincount(at, minlength=structure.num_patterns * len(mine))
    device = structure.device
    with torch.inference_mode(False):
        known[key] = BlockPlan(
            plan_transfers(layout.ownership, requests, rank),
            BlockStructure(
                size,
                (len(mine), total),
                offsets_of(counts.view(structure.num_patterns, -1)).to(device),
                column[ordered].int().to(device),
            ),
        )
    return known[key]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any,
    *,
    mesh: DeviceMesh,
    layout: SequenceLayout,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`sparsek_kernels.block_sparse_attention` of sequences that lie on several ranks.

    All ranks call this, and its backward pass, in the same order.  Key gradients are summed in fp32
    by the rank that holds the block.

    Args:
        q: this rank's queries ``[B, n, Hq, D]``, ``n = layout.tokens_per_rank``.
        k: this rank's keys ``[B, n, Hkv, D]``.
        v: this rank's values ``[B, n, Hkv, D]``.
        pattern: of the whole sequence, the same on every rank.
        mesh: one dimension with the ranks of ``layout``.
        layout: which rank holds which rows of blocks (:func:`balanced_layout`); chunks are whole
            blocks of one sequence.
        causal: whether a query is limited to keys up to its own position.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        return_lse: also return the log-sum-exp.

    Returns:
        This rank's rows of the output, ``[B, n, Hq, D]``, and with ``return_lse`` of the
        log-sum-exp ``[B, Hq, n]``.  Both are differentiable, once.

    Raises:
        TypeError: on every rank, where an argument of one has a wrong type or dtype.
        ValueError: on every rank, where an argument of one has a wrong shape or value, or differs
            among the ranks; the message names it.
        RuntimeError: a rank failed, or did not answer within the process group's timeout.
    """
    channel = channel_of(mesh)
    with channel.agreed() as facts:
        check_layout(layout, mesh)
        facts["layout"] = layout
        check_qkv(q, k, v)
        check_shard("q", q, layout)
        check_shard("k", k, layout)
        scale = check_scale(softmax_scale, q.shape[3])
        structure = structure_of(pattern, layout.num_tokens)
        tokens = layout.num_tokens
        reason = misfit(structure, tokens, tokens, q.shape[2], q.device)
        if reason is not None:
            raise ValueError(f"pattern: {reason}")
        chunk = tokens // layout.num_chunks
        if layout.packed or chunk % structure.block_size:
            raise ValueError(
                f"layout: expected one sequence in chunks of whole blocks of "
                f"{structure.block_size}, got {len(layout.edges) - 1} in chunks of {chunk}"
            )
        facts.update(
            q=(tuple(q.shape), str(q.dtype), q.device.type),
            k=tuple(k.shape),
            pattern=_entries_of(structure).digest,
            causal=causal,
            softmax_scale=scale,
            requires_grad=torch.is_grad_enabled() and [x.requires_grad for x in (q, k, v)],
        )
    with torch.device("cpu"):  # plans are made there, whatever the default device
        plan = _plan(structure, layout, channel.rank, causal)
    keys, values = Fetch(channel, plan.transfers, (k, v)).wait()[0]
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = block_sparse_attention(
        q, keys, values, plan.structure, causal=causal, softmax_scale=scale, return_lse=return_lse
    )
    return found
