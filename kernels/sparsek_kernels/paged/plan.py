"""Which queries of a step attend everything, and which attend by a sparse policy.

Our kernels tell dense tiles from sparse ones by themselves, except for ``dense_last``.  A caller
that has another kernel for dense prefills asks for :func:`segments` and picks one for each::

    for segment in segments(batch, policy, seq_lens):
        banded = segment.policy.is_band and segment.batch.num_prefills > 0
        attend = flash_attention if banded else paged_attention
        attend(q[segment.rows], ..., segment.batch, segment.policy, out=out[segment.rows])

Segments are attended in order: a later one overwrites rows that an earlier one filled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

import torch

from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.policy import SelectionPolicy


@dataclass(frozen=True)
class Segment:
    """Requests of a step, or one request's last queries, that attend by one policy.

    Args:
        batch: the requests, with their own ``max_query_len`` and ``max_seq_len``.
        policy: what their queries attend; its ``dense_last`` is 0.
        rows: the rows of the step's queries from which ``batch`` counts.
    """

    batch: PagedBatch
    policy: SelectionPolicy
    rows: slice = field(default_factory=lambda: slice(None))


def first_sparse(policy: SelectionPolicy, start: int, end: int) -> int:
    """First of the positions ``[start, end)`` that does not see everything; ``end`` if all do."""
    positions = range(start, end)  # what is sparse once stays sparse
    return start + bisect_left(positions, True, key=lambda p: not policy.sees_all(p))


def split_queries(policy: SelectionPolicy, num_q: int, num_k: int) -> tuple[int, int]:
    """Rows of a prefill's queries as ``(first, last)``: the sparse ones are ``[first, last)``.

    Rows before and after them attend every earlier key.  Where all rows do, both are ``num_q``.

    Args:
        policy: what the queries attend.
        num_q: queries, at the end of the sequence.
        num_k: keys of the sequence, its queries' own included.
    """
    start = num_k - num_q
    first = first_sparse(policy, start, num_k) - start
    last = num_q - policy.dense_last
    return (first, last) if first < last else (num_q, num_q)


def segments(
    batch: PagedBatch, policy: SelectionPolicy, seq_lens: Sequence[int] | None = None
) -> tuple[Segment, ...]:
    """The step as its decodes and runs of neighbouring prefills, either dense or sparse.

    A sparse prefill's last queries, which ``dense_last`` lets attend everything, come again as a
    dense segment after the sparse one.

    Args:
        batch: the step.
        policy: what its queries attend.
        seq_lens: keys of every request, on the host; default: what the batch knows of them.  Upper
            bounds are enough: a prefill that only its bound keeps from being dense counts as
            sparse, and the sparse kernels attend everything for it.
    """
    return batch.derived(("segments", policy), lambda: _segments(batch, policy, seq_lens))


def _segments(
    batch: PagedBatch, policy: SelectionPolicy, seq_lens: Sequence[int] | None
) -> tuple[Segment, ...]:
    lengths = _length_bounds(batch) if seq_lens is None else seq_lens
    counts = batch.query_lens
    rule = replace(policy, dense_last=0)
    everything = SelectionPolicy(sel_block_size=policy.sel_block_size)
    found = []
    if batch.num_decodes:
        found.append(Segment(batch.part(0, batch.num_decodes), rule))

    def is_sparse(request: int) -> bool:
        if policy.is_band and not policy.is_dense:  # one mask, whatever the length
            return counts[request] > policy.dense_last
        first, last = split_queries(policy, counts[request], lengths[request])
        return first < last

    prefills = range(batch.num_decodes, batch.num_requests)
    for sparse, run in groupby(prefills, is_sparse):
        members = list(run)
        part = replace(
            batch.part(members[0], members[-1] + 1),
            max_query_len=max(counts[r] for r in members),
            max_seq_len=max(lengths[r] for r in members),
            _derived={},
        )
        found.append(Segment(part, rule if sparse else everything))
        if sparse and policy.dense_last:
            found += [
                Segment(part, everything, rows)
                for rows, part in _tails(batch, members, policy.dense_last, lengths)
            ]
    return tuple(found)


def _length_bounds(batch: PagedBatch) -> Sequence[int]:
    """Keys of every request at most, without waiting for a device."""
    if batch.seq_lens_host is None and batch.seq_lens.device.type != "cpu":
        return (batch.max_seq_len,) * batch.num_requests
    return host_lengths(batch)[0]


def _tails(
    batch: PagedBatch, members: Sequence[int], count: int, lengths: Sequence[int]
) -> list[tuple[slice, PagedBatch]]:
    """Rows of the last ``count`` queries of each of some longer prefills, as batches of one."""
    ends = list(accumulate(batch.query_lens, initial=batch.first_row))[1:]
    offsets = torch.tensor([0, count], dtype=torch.int32)
    if batch.seq_lens.is_cuda:
        offsets = offsets.pin_memory().to(batch.seq_lens.device, non_blocking=True)
    return [
        (
            slice(ends[r] - count, ends[r]),
            replace(
                batch.part(r, r + 1),
                cu_seqlens_q=offsets,
                max_query_len=count,
                max_seq_len=lengths[r],
                query_lens_host=(count,),
                first_row=0,
                _derived={},
            ),
        )
        for r in members
    ]
