"""Prefills that attend everything, through the FlashAttention that vLLM ships.

A prompt within the budget has nothing to gain from selection and must lose nothing either: it
takes the fastest dense kernel on the machine, over the same pages.  Where vLLM has no
FlashAttention for a layer, SparseK's own dense path serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.policy import SelectionPolicy


@dataclass(frozen=True)
class Run:
    """Neighbouring requests of a step that take the same path.

    Args:
        batch: the requests.
        dense: whether all of them see everything (or slide a window without sinks).
        max_query_len, max_seq_len: bounds over the run, on the host.
        window_size: of a dense run, the latest keys that a query sees, or ``None`` for all.
        policy: what the run's queries attend, or ``None`` for what the layer's do.
        rows: the run's rows of the step's queries, from which ``batch`` counts; ``None`` for all.
            Where FlashAttention splits keys, it takes scratch for every row that it is given.
    """

    batch: PagedBatch
    dense: bool
    max_query_len: int
    max_seq_len: int
    window_size: int | None = None
    policy: SelectionPolicy | None = None
    rows: slice | None = None

    @classmethod
    def whole(cls, batch: PagedBatch) -> Run:
        """A step that one call serves."""
        return cls(batch, False, batch.max_query_len, batch.max_seq_len)


def is_flash_mask(policy: SelectionPolicy) -> bool:
    """Whether FlashAttention has this policy's mask at any length."""
    if policy.window_size is None:
        return True
    only_window = policy.num_sink == 0 and not policy.selects_blocks and not policy.dense_last
    return only_window and policy.dense_below <= policy.window_size


def split_runs(
    batch: PagedBatch,
    policy: SelectionPolicy,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    dense_decode: bool = False,
) -> tuple[Run, ...]:
    """Split a step into its decodes and runs of dense and sparse prefills.

    The queries of sparse prefills that ``dense_last`` lets see everything come again, as dense
    runs after the sparse one.

    Args:
        seq_lens, query_lens: of every request, on the host, exact for prefills.
        dense_decode: whether decodes attend everything where the policy selects blocks.
    """
    always = is_flash_mask(policy)
    runs = []
    if batch.num_decodes:
        decodes = Run.whole(batch.part(0, batch.num_decodes))
        everything = SelectionPolicy(sel_block_size=policy.sel_block_size)
        is_dense = dense_decode and policy.selects_blocks
        runs.append(replace(decodes, policy=everything) if is_dense else decodes)
    first = batch.num_decodes
    while first < batch.num_requests:
        dense = always or policy.sees_all(max(seq_lens[first] - 1, 0))
        last = first + 1
        while last < batch.num_requests and dense == (
            always or policy.sees_all(max(seq_lens[last] - 1, 0))
        ):
            last += 1
        run = Run(
            batch=batch.part(first, last),
            dense=dense,
            max_query_len=max(query_lens[first:last]),
            max_seq_len=max(seq_lens[first:last]),
            window_size=policy.window_size if always else None,
        )
        if dense or not policy.dense_last:
            runs.append(run)
        else:
            if run.max_query_len > policy.dense_last:  # else nothing is left to select for
                runs.append(replace(run, policy=replace(policy, dense_last=0)))
            runs += _tails(batch, range(first, last), policy.dense_last, seq_lens)
        first = last
    return tuple(runs)


def _tails(batch: PagedBatch, members: range, count: int, seq_lens: Sequence[int]) -> list[Run]:
    """The last ``count`` queries of each of some prefills, a dense run for every prefill."""
    spans = {r: rows for r, rows in batch.last_rows(count).items() if r in members}
    offsets = torch.tensor([(0, len(rows)) for rows in spans.values()], dtype=torch.int32)
    if batch.seq_lens.is_cuda:
        offsets = offsets.pin_memory()
    offsets = offsets.to(batch.seq_lens.device, non_blocking=True)
    return [
        Run(
            batch=PagedBatch(
                block_table=batch.block_table[r : r + 1],
                seq_lens=batch.seq_lens[r : r + 1],
                cu_seqlens_q=own,
                num_decodes=0,
                num_decode_tokens=0,
                decode_query_len=1,
                max_query_len=len(rows),
                max_seq_len=seq_lens[r],
                query_lens_host=(len(rows),),
            ),
            dense=True,
            max_query_len=len(rows),
            max_seq_len=seq_lens[r],
            policy=SelectionPolicy(),
            rows=slice(rows.start, rows.stop),
        )
        for (r, rows), own in zip(spans.items(), offsets, strict=True)
    ]


class FlashPrefill:
    """vLLM's FlashAttention over our pages.

    Args:
        attend: ``flash_attn_varlen_func``.
        version: its ``fa_version``.
    """

    def __init__(self, attend: Callable[..., Any], version: int) -> None:
        self._attend = attend
        self.version = version

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        run: Run,
        *,
        softmax_scale: float,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Attend the queries of ``run``.

        Args:
            q: ``[T, Hq, D]``, the rows that the run's batch counts from (:attr:`Run.rows`); out
                likewise, written for the run.
            k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``.
            sinks: ``[Hq]`` learned logits, or ``None``.
        """
        left = -1 if run.window_size is None else run.window_size - 1
        self._attend(
            q=q,
            k=k_cache.transpose(1, 2),
            v=v_cache.transpose(1, 2),
            out=out,
            cu_seqlens_q=run.batch.cu_seqlens_q,
            max_seqlen_q=run.max_query_len,
            seqused_k=run.batch.seq_lens,
            max_seqlen_k=run.max_seq_len,
            softmax_scale=softmax_scale,
            causal=True,
            window_size=[left, 0 if left >= 0 else -1],
            block_table=run.batch.block_table,
            fa_version=self.version,
            s_aux=sinks,
        )
