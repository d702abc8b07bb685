"""A ragged batch of sequences over a paged KV cache: sizes and index tensors, no K or V."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch

_T = TypeVar("_T")

ALIGNMENT = 16
"""Bytes: Triton compiles a kernel for addresses that are multiples of it, and one for others."""


@dataclass(frozen=True)
class PagedBatch:
    """One engine step's requests; the first ``num_decodes`` of them are decodes.

    A *decode* has at most ``decode_query_len`` query tokens and selects blocks per token; every
    other request is a (chunk of a) prefill and selects per query tile.

    Args:
        block_table: ``[R, max_pages]`` int32, physical page of each logical page; entries past a
            sequence's last page may hold anything.  -1 stands for a page that another rank holds,
            where several ranks share a cache (``attend_shard``).
        seq_lens: ``[R]`` int32, keys of each sequence, its new tokens included.
        cu_seqlens_q: ``[R + 1]`` int32, offsets of each request's query tokens.
        num_decodes: requests at the front of the batch that decode.
        num_decode_tokens: query tokens of those requests.
        decode_query_len: most query tokens of a decode (1, or 1 + k when speculating).
        max_query_len: most query tokens of any request.
        max_seq_len: an upper bound of ``seq_lens``.
        seq_lens_host: ``seq_lens`` on the host where the caller has them; of decodes on a GPU upper
            bounds are enough.  The CPU path needs them; on a GPU they spare prefills' kernels
            programs without work.
        query_lens_host: query tokens of each request on the host; where they are missing,
            :attr:`query_lens` waits for the device.
        prompt_left_host: tokens of each request's prompt that come after its new tokens, on the
            host; below 0 the tokens that follow the prompt, as in decodes, and where answers are
            computed again.  ``None``: nobody knows (:meth:`SelectionPolicy.last_rows`); no decode
            is of a prompt.
        first_row: ``cu_seqlens_q[0]``; above 0 in a :meth:`part` of a batch.
        rotation: ``[positions, D]`` float32, by which positions have turned queries and keys: D/2
            cosines, then as many sines.  Where it is given, InfLLM-v2's scores are of queries and
            keys turned back (``use_nope``), and so are SeerAttention-R's gates, which it then
            turns.  On a GPU it is contiguous.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    decode_query_len: int
    max_query_len: int
    max_seq_len: int
    seq_lens_host: tuple[int, ...] | None = None
    query_lens_host: tuple[int, ...] | None = None
    prompt_left_host: tuple[int, ...] | None = None
    first_row: int = 0
    rotation: torch.Tensor | None = None
    _derived: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return int(self.seq_lens.shape[0])

    @property
    def num_prefills(self) -> int:
        """Requests that prefill."""
        return self.num_requests - self.num_decodes

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Query tokens of each request; waits for the device where the host does not have them."""
        if self.query_lens_host is not None:
            return self.query_lens_host
        return self.derived("query lens", lambda: tuple(self.cu_seqlens_q.diff().tolist()))

    @property
    def num_prefill_tokens(self) -> int:
        """Query tokens of the prefills (see :attr:`query_lens`)."""
        return sum(self.query_lens[self.num_decodes :])

    def derived(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """Index tensors that ``build`` makes from this batch, once for all layers with ``key``."""
        try:
            found = self._derived[key]
        except KeyError:
            found = self._derived[key] = build()
        return cast(_T, found)

    def pages(self, page_size: int) -> torch.Tensor:
        """``[R, max_pages]`` int64: ``block_table``, 0 past a sequence's end and in place of -1."""

        def build() -> torch.Tensor:
            logical = torch.arange(self.block_table.shape[1], device=self.block_table.device)
            unused = logical * page_size >= self.seq_lens[:, None]
            return self.block_table.long().clamp(min=0).masked_fill_(unused, 0)

        return self.derived(("pages", page_size), build)

    def part(self, first: int, last: int) -> PagedBatch:
        """The requests ``first .. last - 1``; query tokens keep their offsets in the whole batch.

        Args:
            first: at ``num_decodes`` or after it, or 0 with ``last == num_decodes``.
            last: one past the last request.

        Raises:
            ValueError: decodes and prefills would be mixed.
        """
        if first < self.num_decodes and (first, last) != (0, self.num_decodes):
            raise ValueError(
                f"first, last: expected all {self.num_decodes} decodes or prefills only, "
                f"got {first}, {last}"
            )
        decodes = first < self.num_decodes

        def build() -> PagedBatch:
            lens, left = self.query_lens_host, self.prompt_left_host
            before = int(self.cu_seqlens_q[first]) if lens is None else sum(lens[:first])
            return replace(
                self,
                block_table=_aligned(self.block_table[first:last]),
                seq_lens=_aligned(self.seq_lens[first:last]),
                cu_seqlens_q=_aligned(self.cu_seqlens_q[first : last + 1]),
                num_decodes=self.num_decodes if decodes else 0,
                num_decode_tokens=self.num_decode_tokens if decodes else 0,
                seq_lens_host=self.seq_lens_host[first:last] if self.seq_lens_host else None,
                query_lens_host=lens and lens[first:last],
                prompt_left_host=left and left[first:last],
                first_row=before if lens is None else self.first_row + before,
                _derived={},
            )

        return self.derived(("part", first, last), build)

    def phases(self) -> tuple[tuple[PagedBatch, int], ...]:
        """Decodes and prefills apart, each with the most new tokens of one of its requests."""
        if not self.num_prefills:
            return ((self, self.decode_query_len),)
        if not self.num_decodes:
            return ((self, self.max_query_len),)
        return (
            (self.part(0, self.num_decodes), self.decode_query_len),
            (self.part(self.num_decodes, self.num_requests), self.max_query_len),
        )

    def by_token(self, first: int, last: int) -> PagedBatch:
        """The query tokens ``first .. last - 1`` as decodes of one token each.

        A token's sequence ends with the token itself, whatever follows it in this batch: its row
        is the one that it has when it is decoded.  Rows count from ``first``; a token that is in
        none of the requests becomes a decode without tokens.
        """

        def build() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            offsets = self.cu_seqlens_q.long()
            rows = torch.arange(first, last + 1, device=offsets.device)
            owner = torch.searchsorted(offsets[1:], rows[:-1], right=True)
            owner = owner.clamp(max=self.num_requests - 1)
            lens = self.seq_lens[owner] - offsets[1:][owner] + rows[:-1] + 1
            own = rows.clamp(offsets[0], offsets[-1]) - first
            return owner, lens.to(torch.int32), own.to(torch.int32)

        owner, lens, own = self.derived(("by token", first, last), build)
        return PagedBatch(
            block_table=self.block_table.index_select(0, owner),
            seq_lens=lens,
            cu_seqlens_q=own,
            num_decodes=last - first,
            num_decode_tokens=last - first,
            decode_query_len=1,
            max_query_len=1,
            max_seq_len=self.max_seq_len,
            rotation=self.rotation,
        )


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy where Triton would compile every kernel anew for its address."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def host_lengths(batch: PagedBatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sequence and query lengths as integers (on the CPU they are there already)."""

    lengths = batch.seq_lens_host
    if lengths is None:
        lengths = batch.derived("sequence lengths", lambda: tuple(batch.seq_lens.tolist()))
    return lengths, batch.query_lens
