"""The tensors of one call of paged attention, as one object from the api to every kernel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

_ALL = slice(None)


class Ranks(Protocol):
    """Ranks that hold the pages of sequences between them; all of them make each call together."""

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the ranks of a contiguous tensor, which may be overwritten."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, ``[ranks, ...]``, in the same order on each."""


@dataclass(slots=True, eq=False)
class Located:
    """Tensors of one GPU that were looked at once, for all launches on them (``replay.py``).

    Args:
        tensors: what differs between calls with one key.
        addresses: where these begin; 0 stands for ``None``.
        key: the device, and how they lie on it.
        device: where they are.
    """

    tensors: tuple[torch.Tensor | None, ...]
    addresses: Sequence[int]
    key: tuple[Hashable, ...]
    device: int


@dataclass(slots=True, eq=False)
class PagedOperands:
    """Queries, one layer's cache and the output.

    Not frozen: every layer of a step makes one, and a frozen one takes three times as long.

    Args:
        q: ``[T, Hq, D]``.
        k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``.
        out: ``[T, Hq, Dv]``, written.
        softmax_scale: factor of ``q . k``.
        k_summary: ``[num_pages, Hkv, bytes]`` uint8, what an indexer keeps in the pages
            (``pages.py``), or ``None``.
        sinks: ``[Hq]`` learned logits that join the softmax denominator only, or ``None``.
        k_scale, v_scale: factors of an fp8 cache.
        lse: ``[T, Hq]`` float32, contiguous, written, where several ranks hold the pages between
            them: the natural log-sum-exp of each row's logits; else ``None``.
        ranks: these ranks, else ``None``.
        pages: where ``k_cache``, ``v_cache`` and ``k_summary`` are, if that is known
            (:func:`locate_pages`), which spares looking at them.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    softmax_scale: float
    k_summary: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    lse: torch.Tensor | None = None
    ranks: Ranks | None = None
    pages: Located | None = None
    located: Located | None = field(default=None, init=False, repr=False)
    """Where the tensors are, once a segment has asked: the others of a layer have the same."""

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that differ from layer to layer."""
        return (self.k_cache, self.v_cache, self.k_summary, self.q, self.out, self.sinks)

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.k_cache.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k_cache.shape[1]

    @property
    def summary(self) -> torch.Tensor:
        """``k_summary``, which the indexer reads.

        Raises:
            ValueError: there is none.
        """
        if self.k_summary is None:
            raise ValueError(
                "k_summary: expected the page summaries that the indexer reads, got None"
            )
        return self.k_summary

    def of_rows(self, rows: slice | torch.Tensor) -> PagedOperands:
        """The operands of some rows of ``q`` and ``out``.

        Rows that are not neighbours, ``[n]`` int64, are gathered, and have an output of their own.
        """
        lse = self.lse
        if isinstance(rows, torch.Tensor):
            out = self.out.new_empty(len(rows), *self.out.shape[1:])
            q = self.q.index_select(0, rows)
        elif rows == _ALL:
            return self
        else:
            q, out, lse = self.q[rows], self.out[rows], None if lse is None else lse[rows]
        return PagedOperands(  # replace() takes ten times as long
            q, self.k_cache, self.v_cache, out, self.softmax_scale, self.k_summary, self.sinks,
            self.k_scale, self.v_scale, lse, self.ranks, self.pages,
        )  # fmt: skip
