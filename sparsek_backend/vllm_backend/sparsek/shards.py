"""Decode context parallelism: the ranks that hold a sequence's pages between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from sparsek_kernels.paged.api import paged_attention
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.merge import merge_shards
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import ceil_div
from sparsek_kernels.paged.shards import attend_shard

from .pages import PageReader, page_rows
from .selection import LayerSelection

GATHERED_TOKENS = 1 << 17
"""Tokens of several sequences whose pages are gathered at once: a bound of the memory they take."""


@dataclass(frozen=True)
class ContextRanks:
    """The ranks of a group, which have the same KV heads and neighbouring query heads.

    Page ``n`` of a sequence is on rank ``n % size``, as that rank's page ``n // size``.
    """

    group: dist.ProcessGroup  # their process group
    rank: int  # this process's place in it
    size: int  # how many there are

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[ranks, ...]``: a tensor of every rank."""
        found = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(found, x.contiguous(), group=self.group)
        return found.view(self.size, *x.shape)

    def gather_heads(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., ranks * H]`` rows of heads ``[..., H, D]`` or logits ``[H]`` of every rank."""
        heads = x.dim() - 2 if x.dim() > 1 else 0
        return self.gather(x).movedim(0, heads).flatten(heads, heads + 1)

    def own_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Rows ``[T, H, D]`` of this rank's heads, of rows of the heads of all."""
        rows: torch.Tensor = x.unflatten(1, (self.size, -1))[:, self.rank]
        return rows

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the ranks; ``x`` is overwritten."""
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of this rank's heads over the keys of all ranks, ``[T, H, D]`` float32.

        Args:
            out: ``[T, ranks * H, D]`` float32, over this rank's keys.
            lse: ``[T, ranks * H]`` float32.
            sinks: ``[H]`` learned logits of this rank's heads.
        """
        both = torch.cat([out, lse.unsqueeze(-1)], dim=-1)
        sent = both.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        found = torch.empty_like(sent)  # [ranks, T, H, D + 1]
        dist.all_to_all_single(found, sent, group=self.group)
        return merge_shards(found[..., :-1], found[..., -1], sinks)


@dataclass(frozen=True)
class GatheredPrefills:
    """Some of a step's prefills, over pages that are gathered from all ranks."""

    batch: PagedBatch  # the requests; their block table counts gathered pages
    pages: torch.Tensor  # ``[n]`` int64 pages of this rank's cache that their sequences have

    def gather(
        self, kv_cache: torch.Tensor, rows: torch.Tensor, ranks: ContextRanks
    ) -> torch.Tensor:
        """The pages of all ranks, ``[ranks * n, Hkv, page_size, C]``, laid out as they lie here.

        Args:
            kv_cache: ``[pages, Hkv, page_size, C]``.
            rows: its pages (``page_rows``).
        """
        found = ranks.gather(rows[self.pages]).flatten(0, 1)
        strides = (found.stride(0), *kv_cache.stride()[1:])
        return found.as_strided((found.shape[0], *kv_cache.shape[1:]), strides)


@dataclass(frozen=True)
class ShardedStep:
    """A step's requests where several ranks hold their pages."""

    ranks: ContextRanks  # these ranks
    batch: PagedBatch  # the step; in its block table, -1 is a page of another rank
    # the prefills, in parts that gather :data:`GATHERED_TOKENS` or one sequence
    prefills: tuple[GatheredPrefills, ...]

    @property
    def decodes(self) -> PagedBatch:
        """The requests that decode."""
        return self.batch.part(0, self.batch.num_decodes)


def shard_step(batch: PagedBatch, page_size: int, ranks: ContextRanks) -> ShardedStep:
    """Tell the pages of a step's sequences apart by rank."""
    local = batch.block_table
    table = local.new_full((local.shape[0], local.shape[1] * ranks.size), -1)
    table[:, ranks.rank :: ranks.size] = local
    # What the host knows of decodes on a GPU is an upper bound.
    lengths = batch.seq_lens_host if local.device.type == "cpu" else None
    return ShardedStep(
        ranks,
        replace(batch, block_table=table, seq_lens_host=lengths, _derived={}),
        tuple(
            _gathered_prefills(batch.part(first, last), page_size, ranks.size)
            for first, last in _parts_of_prefills(batch)
        ),
    )


def _parts_of_prefills(batch: PagedBatch) -> Iterator[tuple[int, int]]:
    """First and end of runs of prefills that have few tokens together, or are one."""
    lengths = batch.seq_lens_host or ()
    first, tokens = batch.num_decodes, 0
    for request in range(batch.num_decodes, batch.num_requests):
        tokens += lengths[request]
        if tokens > GATHERED_TOKENS and request > first:
            yield first, request
            first, tokens = request, lengths[request]
    if first < batch.num_requests:
        yield first, batch.num_requests


def _gathered_prefills(batch: PagedBatch, page_size: int, size: int) -> GatheredPrefills:
    """Block tables of the prefills over gathered pages, which stand rank after rank."""
    counts = [ceil_div(length, page_size * size) for length in batch.seq_lens_host or ()]
    total, first = sum(counts), 0
    logical = torch.arange(max(counts) * size, device=batch.block_table.device)
    table, pages = [], []
    for request, count in enumerate(counts):
        table.append(logical % size * total + first + logical // size)
        pages.append(batch.block_table[request, :count])
        first += count
    rows = torch.stack(table).to(torch.int32)
    return GatheredPrefills(replace(batch, block_table=rows, _derived={}), torch.cat(pages).long())


def attend_shards(
    operands: PagedOperands,
    kv_cache: torch.Tensor,
    step: ShardedStep,
    selection: LayerSelection,
    pages: PageReader,
) -> None:
    """Attend a step of one layer whose pages the ranks hold between them.

    Args:
        operands: this rank's pages, query heads, learned logits and output.
        kv_cache: ``[pages, Hkv, page_size, C]``, this rank's.
    """
    operands = replace(operands, q=step.ranks.gather_heads(operands.q))
    if step.decodes.num_decodes:
        _attend_decodes(operands, step, selection)
    rows = page_rows(kv_cache, pages.head_size, pages.summaries)
    for part in step.prefills:
        found = pages.view(part.gather(kv_cache, rows, step.ranks))
        everywhere = replace(
            operands, k_cache=found.keys, v_cache=found.values, k_summary=found.summary
        )
        _attend_prefills(everywhere, part.batch, step.ranks, selection)


def _attend_decodes(operands: PagedOperands, step: ShardedStep, selection: LayerSelection) -> None:
    """Attend a step's decodes: every rank its own pages, by a selection that all ranks share.

    Args:
        operands: this rank's pages, the query heads of all ranks, ``[T, ranks * H, D]``, learned
            logits ``[H]`` of this rank's heads, and their output ``[T, H, D]``.
    """
    rows = slice(step.decodes.num_decode_tokens)
    part, lse = attend_shard(
        operands.q[rows],
        operands.k_cache,
        operands.v_cache,
        step.decodes,
        selection.policy,
        ranks=step.ranks,
        softmax_scale=operands.softmax_scale,
        k_summary=operands.k_summary,
        index=selection.indexers.decode,
    )
    operands.out[rows] = step.ranks.merge(part, lse, operands.sinks)


def _attend_prefills(
    operands: PagedOperands, batch: PagedBatch, ranks: ContextRanks, selection: LayerSelection
) -> None:
    """Attend some of a step's prefills over the pages of all ranks.

    The ranks have parts of a KV head's query heads, which share a selection: every rank selects and
    attends for all of them, and keeps its own.

    Args:
        operands: as :func:`_attend_decodes` takes them, but for pages of all ranks
            (:meth:`GatheredPrefills.gather`).
    """
    rows = slice(batch.first_row, batch.first_row + batch.num_prefill_tokens)
    of_all_heads = paged_attention(
        operands.q,
        operands.k_cache,
        operands.v_cache,
        batch,
        selection.policy,
        softmax_scale=operands.softmax_scale,
        k_summary=operands.k_summary,
        sinks=None if operands.sinks is None else ranks.gather_heads(operands.sinks),
        indexers=selection.indexers,
    )
    operands.out[rows] = ranks.own_heads(of_all_heads)[rows]


def check_interleave(interleave: int, page_size: int) -> None:
    """Check that ranks take whole pages in turn, so that blocks are whole on a rank."""
    if interleave != page_size:
        raise ValueError(
            f"cp_kv_cache_interleave_size: expected the KV page of {page_size} tokens with decode "
            f"context parallelism, got {interleave}; remedy: --cp-kv-cache-interleave-size "
            f"{page_size}"
        )
