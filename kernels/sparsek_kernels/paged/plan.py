"""A step as segments: each has one phase, one policy, and tiles that are dense or sparse together.

The step is cut here, once for all layers with the same policies, and nowhere else::

    segments = plan_step(batch, StepPolicy(prefill, decode), seq_lens)
    for mine, segment in each_segment(operands, segments):
        chosen = index.select(mine, segment)     # where the policy selects blocks
        attend(mine, segment, chosen)

Segments are attended in order: a later one overwrites rows that an earlier one filled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from operator import sub
from typing import Any

import torch

from sparsek_kernels.common.device import on_device
from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy, ceil_div
from sparsek_kernels.paged.scratch import rows_per_step

_MOST_LASTING = 64
"""Decoded tokens of a step whose launches outlive it, with the list that is chosen for each."""
_HEADS = 64
"""Query heads for which the tokens of prompts have room, where nobody says how many there are."""


@dataclass(frozen=True)
class Segment:
    """Decodes of a step, or prefills, or the ends of prompts, that attend by one policy.

    Tokens of prompts that choose by records are decodes of one token each (:func:`tokens_alone`).

    Args:
        batch: the requests, with their own ``max_query_len`` and ``max_seq_len``.
        policy: what their queries attend; its ``dense_last`` is 0.
        rows: the rows of the step's queries from which ``batch`` counts; a tensor, ``[n]`` int64,
            where they are not neighbours.
        fixed_order: whether every row is added up in one order, whatever else is in the batch.
        lasting: all that its launches follow from besides tensors, where other steps may repeat
            them; ``None`` where they depend on more.
    """

    batch: PagedBatch
    policy: SelectionPolicy
    rows: slice | torch.Tensor = field(default_factory=lambda: slice(None))
    fixed_order: bool = False
    lasting: Hashable = None

    @property
    def decodes(self) -> bool:
        """Whether the queries are decoded tokens."""
        return self.batch.num_decodes > 0

    @cached_property
    def repeats(self) -> bool:
        """Whether later layers may repeat its launches: not where a prompt's tokens are alone."""
        of_prompt = not self.decodes or self.rows != slice(None)
        return not (self.fixed_order or (self.policy.query_tile == 1 and of_prompt))

    @cached_property
    def replays(self) -> dict[Hashable, Any]:
        """Launches of earlier layers, which later ones repeat (``replay.py``)."""
        return {} if self.lasting is None else _lasting_replays(self.lasting)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors in which steps differ that repeat one another's launches."""
        batch = self.batch
        if self.lasting is None:
            return ()
        return (batch.block_table, batch.seq_lens, batch.cu_seqlens_q, batch.rotation)

    @property
    def by_request(self) -> bool:
        """Whether a request's tokens share a selection; else every token, or tile, has its own."""
        return self.decodes and self.policy.alignment > 0

    def chooses(self, page_size: int) -> bool:
        """Whether any query may have to choose: the longest context that pages hold has the room.

        Pages and not lengths decide, so that a captured step serves longer sequences later.
        """
        batch, policy = self.batch, self.policy
        longest = max(batch.max_seq_len, batch.block_table.shape[1] * page_size)
        return policy.scored_blocks > 0 and not policy.sees_all(longest - 1)


@lru_cache(maxsize=16)
def _lasting_replays(lasting: Hashable) -> dict[Hashable, Any]:
    """The replays of segments that differ in tensors alone; those asked for last are kept."""
    return {}


def each_segment(
    operands: PagedOperands, segments: Iterable[Segment]
) -> Iterator[tuple[PagedOperands, Segment]]:
    """Each segment with the operands of its rows, to be attended before the next one is asked for.

    What is attended for rows that had to be gathered is then put in its place.
    """
    for segment in segments:
        mine = operands.of_rows(segment.rows)
        yield mine, segment
        if isinstance(segment.rows, torch.Tensor):
            operands.out.index_copy_(0, segment.rows, mine.out)


def everything(policy: SelectionPolicy) -> SelectionPolicy:
    """The policy of prompts of ``policy``, or their ends, that attend every earlier key."""
    return SelectionPolicy(sel_block_size=policy.alignment or policy.sel_block_size)


def first_sparse(policy: SelectionPolicy, start: int, end: int) -> int:
    """First of the positions ``[start, end)`` that does not see everything; ``end`` if all do."""
    positions = range(start, end)  # what is sparse once stays sparse
    return start + bisect_left(positions, True, key=lambda p: not policy.sees_all(p))


def split_queries(policy: SelectionPolicy, num_q: int, num_k: int) -> tuple[int, int]:
    """Rows of a prompt's queries as ``(first, last)``: the sparse ones are ``[first, last)``.

    Rows before and after them attend every earlier key.  Where all rows do, both are ``num_q``.

    Args:
        policy: what the queries attend.
        num_q: queries, at the end of the prompt.
        num_k: keys of the sequence, its queries' own included.
    """
    start = num_k - num_q
    first = first_sparse(policy, start, num_k) - start
    last, _ = policy.last_rows(num_q, num_k)
    return (first, last) if first < last else (num_q, num_q)


def plan_step(
    batch: PagedBatch, policy: StepPolicy, seq_lens: Sequence[int] | None = None
) -> tuple[Segment, ...]:
    """The step as its decodes and runs of neighbouring prefills, either dense or sparse.

    The ends of prompts that are not dense, which ``dense_last`` lets attend everything, come again
    as one dense segment after all others: also of prompts whose last tokens are so few that they
    count as a decode, and all such tokens where prompts are dense.  A sparse prompt without sparse
    neighbours leaves out the tiles that its end replaces.  A prompt by records comes token by
    token.

    Args:
        batch: the step.
        policy: what its queries attend.
        seq_lens: keys of every request, on the host; default: what the batch knows of them.  Upper
            bounds are enough: a prefill that only its bound keeps from being dense counts as
            sparse, and the sparse kernels attend everything for it.
    """
    # By identity first: the hash of policies takes longer than all else that a layer does here.
    plans: dict[int, tuple[tuple[Segment, ...], StepPolicy]] = batch.derived("plans", dict)
    found = plans.get(id(policy))
    if found is None:
        key = ("segments", policy)
        segments = batch.derived(key, lambda: _segments(batch, policy, seq_lens))
        found = plans[id(policy)] = (segments, policy)
    return found[0]


def plan_tokens(
    batch: PagedBatch, policy: SelectionPolicy, num_heads: int, num_rows: int, page_size: int
) -> tuple[Segment, ...]:
    """The step as tokens that are each decoded alone, so that results do not depend on the batch.

    The layer's shapes and the width of the block table decide how a row is added up.

    Args:
        batch: the step.
        policy: of single tokens.
        num_heads: query heads.
        num_rows: rows of the step's queries, padding included.
        page_size: tokens of a page.
    """
    return batch.derived(
        ("tokens", policy, num_heads, num_rows, page_size),
        lambda: _tokens(batch, policy, num_heads, num_rows, page_size),
    )


def _tokens(
    batch: PagedBatch, policy: SelectionPolicy, num_heads: int, num_rows: int, page_size: int
) -> tuple[Segment, ...]:
    batch = replace(batch, max_seq_len=batch.block_table.shape[1] * page_size)
    if not batch.num_prefills and batch.decode_query_len == 1:
        return (Segment(batch, policy, fixed_order=True),)  # as it is: a CUDA graph may hold it
    return tokens_alone(batch, policy, range(num_rows), num_heads, fixed_order=True)


def tokens_alone(
    batch: PagedBatch,
    policy: SelectionPolicy,
    rows: range | None = None,
    num_heads: int = _HEADS,
    *,
    fixed_order: bool = False,
) -> tuple[Segment, ...]:
    """Queries as tokens that are each decoded alone, as many together as scratch has room for.

    Args:
        batch: whose tokens they are.
        policy: of single tokens.
        rows: of the step's queries; default: those of the batch.
        num_heads: query heads.
        fixed_order: :attr:`Segment.fixed_order`.
    """
    if rows is None:
        rows = range(batch.first_row, batch.first_row + sum(batch.query_lens))
    widest = batch.block_table.shape[1]
    if policy.selects_blocks:
        scored = ceil_div(batch.max_seq_len, policy.sel_block_size * policy.segment_blocks) + 16
        widest = max(widest, num_heads * max(scored, policy.scored_blocks))
    step = rows_per_step(widest)
    parts = [(first, min(first + step, rows.stop)) for first in range(rows.start, rows.stop, step)]
    return tuple(
        Segment(batch.by_token(*part), policy, slice(*part), fixed_order) for part in parts
    )


def _segments(
    batch: PagedBatch, policy: StepPolicy, seq_lens: Sequence[int] | None
) -> tuple[Segment, ...]:
    of_prompts = policy.prefill
    rule = replace(of_prompts, dense_last=0) if of_prompts.dense_last else of_prompts
    if not batch.num_requests:
        return ()
    alone = rule.alignment > 0  # tokens choose each for itself
    tails = [] if alone else _ends_of_decodes(batch, policy, seq_lens)
    if not (batch.num_prefills or tails):
        return (Segment(batch, policy.decode),)
    if not (batch.num_decodes or of_prompts.dense_last or alone or _knows_queries(batch)):
        # the kernels tell dense tiles from sparse ones
        return (Segment(batch, rule.within(batch.max_seq_len)),)
    found = []
    lengths = _length_bounds(batch) if seq_lens is None else seq_lens
    counts = batch.query_lens
    if batch.num_decodes:
        found.append(_decodes_beside_prompts(batch, policy.decode, lengths, sum(counts)))
    whole = everything(of_prompts)
    prefills = range(batch.num_decodes, batch.num_requests)
    left = batch.prompt_left_host or (None,) * batch.num_requests
    ends = {r: of_prompts.last_rows(counts[r], lengths[r], left[r]) for r in prefills}

    def is_sparse(request: int) -> bool:
        count, length, (begin, end) = counts[request], lengths[request], ends[request]
        first = 0
        if of_prompts.is_dense or not of_prompts.is_band:  # else one mask, whatever the length
            first = first_sparse(of_prompts, length - count, length) - (length - count)
        return bool(first < begin or max(first, end) < count)

    for sparse, run in groupby(prefills, is_sparse):
        members = list(run)
        part = replace(
            batch.part(members[0], members[-1] + 1),
            max_query_len=max(counts[r] for r in members),
            max_seq_len=max(lengths[r] for r in members),
            _derived={},
        )
        if sparse and alone:
            found += tokens_alone(part, rule)
            continue
        rows: slice | torch.Tensor = slice(None)
        if sparse:
            tails += [(r, *ends[r]) for r in members if ends[r][0] < ends[r][1]]
            kept = _rows_kept(batch, rule, members, ends)
            if kept:
                rows, part = _rows_of_requests(batch, kept, lengths)
        found.append(Segment(part, rule.within(part.max_seq_len) if sparse else whole, rows))
    if tails:
        rows, part = _rows_of_requests(batch, tails, lengths)
        found.append(Segment(part, whole, rows))
    return tuple(found)


def _decodes_beside_prompts(
    batch: PagedBatch, policy: SelectionPolicy, lengths: Sequence[int], num_rows: int
) -> Segment:
    """The decodes of a step, launched for a bound of their own contexts that many steps share.

    While a prompt comes chunk by chunk such steps follow each other, and no CUDA graph holds them.
    """
    longest = max(1, *lengths[: batch.num_decodes])
    unit = 1 << max(longest.bit_length() - 6, 0)
    bound = ceil_div(longest, unit) * unit  # a 32nd more at most
    part = replace(batch.part(0, batch.num_decodes), max_seq_len=bound, _derived={})
    few = part.num_decode_tokens <= _MOST_LASTING
    sizes = (part.num_decodes, part.num_decode_tokens, part.decode_query_len, bound, num_rows)
    return Segment(part, policy, lasting=(policy, *sizes) if few else None)


def _rows_kept(
    batch: PagedBatch, rule: SelectionPolicy, members: list[int], ends: dict[int, tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """The rows of a prompt alone up to the tiles that its dense end replaces; none: keep them all.

    Where that end begins inside a tile, the tile keeps its queries: all of them choose for it.
    Several prompts keep their rows, which would have to be gathered.
    """
    (request, *others), known = members, batch.seq_lens_host
    count, (begin, end) = batch.query_lens[request], ends[request]
    if others or known is None or end < count:
        return []
    before = known[request] - count
    kept = ceil_div(before + begin, rule.query_tile) * rule.query_tile - before
    return [(request, 0, kept)] if kept < count else []


def _ends_of_decodes(
    batch: PagedBatch, policy: StepPolicy, seq_lens: Sequence[int] | None
) -> list[tuple[int, int, int]]:
    """Decodes that are the last tokens of a prompt, each with its queries that are exempt."""
    rule, left, found = policy.of_ends, batch.prompt_left_host, []
    if left is None or not (rule.dense_last and batch.num_decodes):
        return []
    lengths = _length_bounds(batch) if seq_lens is None else seq_lens
    counts = batch.query_lens[: batch.num_decodes]
    for request, (count, after) in enumerate(zip(counts, left, strict=False)):
        if count + after <= 0:  # an answer, as nearly all are
            continue
        begin, end = rule.last_rows(count, lengths[request], after)
        start = lengths[request] - count
        if begin < end and first_sparse(policy.decode, start, start + end) < start + end:
            found.append((request, begin, end))
    return found


def _knows_queries(batch: PagedBatch) -> bool:
    """Whether the host has the query lengths, so that no device is waited for."""
    return batch.query_lens_host is not None or batch.cu_seqlens_q.device.type == "cpu"


def _length_bounds(batch: PagedBatch) -> Sequence[int]:
    """Keys of every request at most, without waiting for a device."""
    if batch.seq_lens_host is None and batch.seq_lens.device.type != "cpu":
        return (batch.max_seq_len,) * batch.num_requests
    return host_lengths(batch)[0]


def _rows_of_requests(
    batch: PagedBatch, parts: Sequence[tuple[int, int, int]], lengths: Sequence[int]
) -> tuple[slice | torch.Tensor, PagedBatch]:
    """Some queries of some requests: their rows of the step's queries, and a batch of them alone.

    Args:
        batch: the step.
        parts: requests, each with the first and the end of its queries that are meant.
        lengths: keys of every request, or bounds of them.
    """
    device, counts = batch.seq_lens.device, batch.query_lens
    starts = list(accumulate(counts, initial=batch.first_row))
    spans = [(starts[r] + begin, starts[r] + end) for r, begin, end in parts]
    members, after = [r for r, _, _ in parts], [counts[r] - end for r, _, end in parts]
    rows: slice | torch.Tensor = slice(spans[0][0], spans[-1][1])
    if any(end != begin for (_, end), (begin, _) in pairwise(spans)):
        rows = on_device(torch.cat([torch.arange(*span) for span in spans]), torch.int64, device)
    known = batch.seq_lens_host
    if members[0] >= batch.num_decodes and members[-1] - members[0] < len(members):  # neighbours
        part = batch.part(members[0], members[-1] + 1)
        table, seq_lens = part.block_table, part.seq_lens
    else:
        index = on_device(members, torch.int64, device)
        table, seq_lens = (x.index_select(0, index) for x in (batch.block_table, batch.seq_lens))
    if any(after):
        seq_lens = seq_lens - on_device(after, seq_lens.dtype, device)
    sizes = [end - begin for begin, end in spans]
    return rows, replace(
        batch,
        block_table=table,
        seq_lens=seq_lens,
        cu_seqlens_q=on_device([0, *accumulate(sizes)], torch.int32, device),
        num_decodes=0,
        num_decode_tokens=0,
        max_query_len=max(sizes),
        max_seq_len=max(map(sub, (lengths[r] for r in members), after)),
        seq_lens_host=known and tuple(map(sub, (known[r] for r in members), after)),
        query_lens_host=tuple(sizes),
        prompt_left_host=None,
        first_row=0,
        _derived={},
    )
