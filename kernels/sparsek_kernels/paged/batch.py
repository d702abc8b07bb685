"""A ragged batch of sequences over a paged KV cache: sizes and index tensors, no K or V."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch

_T = TypeVar("_T")


@dataclass(frozen=True)
class PagedBatch:
    """One engine step's requests; the first ``num_decodes`` of them are decodes.

    A *decode* has at most ``decode_query_len`` query tokens and selects blocks per token; every
    other request is a (chunk of a) prefill and selects per query tile.

    Args:
        block_table: ``[R, max_pages]`` int32, physical page of each logical page; entries past a
            sequence's last page are never read.
        seq_lens: ``[R]`` int32, keys of each sequence, its new tokens included.
        cu_seqlens_q: ``[R + 1]`` int32, offsets of each request's query tokens.
        num_decodes: requests at the front of the batch that decode.
        num_decode_tokens: query tokens of those requests.
        decode_query_len: most query tokens of a decode (1, or 1 + k when speculating).
        max_query_len: most query tokens of any request.
        max_seq_len: an upper bound of ``seq_lens``.
        seq_lens_host: ``seq_lens`` on the host where the caller has them; the CPU path needs
            them, CUDA kernels never do.
        query_lens_host: likewise, query tokens of each request.
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
    _derived: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return int(self.seq_lens.shape[0])

    @property
    def num_prefills(self) -> int:
        """Requests that prefill."""
        return self.num_requests - self.num_decodes

    def derived(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """Index tensors that ``build`` makes from this batch, once for all layers with ``key``."""
        if key not in self._derived:
            self._derived[key] = build()
        return cast(_T, self._derived[key])

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
        key = ("part", first, last)
        return self.derived(
            key,
            lambda: replace(
                self,
                block_table=self.block_table[first:last],
                seq_lens=self.seq_lens[first:last],
                cu_seqlens_q=self.cu_seqlens_q[first : last + 1],
                num_decodes=self.num_decodes if decodes else 0,
                num_decode_tokens=self.num_decode_tokens if decodes else 0,
                seq_lens_host=self.seq_lens_host[first:last] if self.seq_lens_host else None,
                query_lens_host=self.query_lens_host[first:last] if self.query_lens_host else None,
                _derived={},
            ),
        )
