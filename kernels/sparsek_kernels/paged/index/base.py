"""What every indexer is: the half of sparse attention that chooses, for the queries of one phase.

The other half (``attend``) takes the indices and knows no rule.  An indexer owns the bytes that it
keeps in the pages (``pages.py``), and says when they are written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.pages import mean_bytes

if TYPE_CHECKING:
    from sparsek_kernels.paged.batch import PagedBatch
    from sparsek_kernels.paged.operands import PagedOperands
    from sparsek_kernels.paged.plan import Segment
    from sparsek_kernels.paged.policy import SelectionPolicy


class Indexer(ABC):
    """Chooses the blocks that the queries of a segment attend beyond sinks and window."""

    per_token: ClassVar[bool | None] = None
    """Whether it chooses for single tokens alone, or (``False``) for tiles of several alone."""
    reads_pages: ClassVar[bool] = False
    """Whether it reads bytes of its own from the pages."""
    written_with_keys: ClassVar[bool] = False
    """Whether ``write_kv`` keeps these bytes; else :meth:`write` does, once a step."""
    batch_invariant: ClassVar[bool] = False
    """Whether a token's blocks do not depend on what else is in the batch."""
    shares_context: ClassVar[bool] = False
    """Whether ranks that hold a sequence's pages between them can choose together."""
    replayable: ClassVar[bool] = False
    """Whether :meth:`select`, :meth:`write` and :meth:`fused_decode` are launches by ``run`` alone
    (``recording.py``), on tensors that differ between layers as :attr:`tensors` say.  Later layers
    may repeat these.  So may later steps those for decodes, of other requests and lengths: there
    nothing comes from the host but what ``Segment.lasting`` has, and of a batch the tensors of
    ``Segment.tensors``.  Where it is not so, the launches of attention alone are repeated."""
    aligned: ClassVar[bool] = False
    """Whether it chooses by policies with an alignment."""
    grows: ClassVar[bool] = False
    """Whether it chooses by policies with a growth."""

    def page_bytes(self, page_size: int, head_dim: int) -> int:
        """Bytes that it keeps for one page and KV head: by default means of 16 keys."""
        return mean_bytes(page_size, head_dim) if self.reads_pages else 0

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Its own tensors, which differ between layers that share everything else."""
        return ()

    @property
    def key(self) -> Hashable:
        """What else its launches depend on, beside tensors, policy and batch."""
        return type(self)

    def check(
        self, policy: SelectionPolicy, k_cache: torch.Tensor, num_heads: int | None = None
    ) -> None:
        """Check that it can choose by a policy over these pages.

        Args:
            policy: of the phase.
            k_cache: ``[num_pages, Hkv, page_size, D]``.
            num_heads: query heads; ``None`` where no queries come.

        Raises:
            TypeError, ValueError: it cannot; the message names the argument.
        """
        single = policy.query_tile == 1
        if self.per_token not in (None, single):
            raise ValueError(
                f"policy: expected query_tile {'= 1' if self.per_token else '> 1'} with "
                f"{type(self).__name__}, got {policy.query_tile}"
            )
        if policy.growth is not None and not self.grows:
            raise ValueError(
                f"policy: expected growth None with {type(self).__name__}, got {policy.growth}"
            )
        if policy.alignment and not self.aligned:
            raise ValueError(
                f"policy: expected alignment 0 with {type(self).__name__}, got {policy.alignment}"
            )

    def write(  # noqa: B027 - most keep nothing
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_summary: torch.Tensor,
        batch: PagedBatch,
        policy: SelectionPolicy,
    ) -> None:
        """Keep its bytes of the pages that a step's new tokens touch; their K and V are there.

        Args:
            k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``.
            k_summary: ``[num_pages, Hkv, bytes]`` uint8, written; at least :meth:`page_bytes`.
            batch: the step.
            policy: of the phase.
        """

    @abstractmethod
    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return the chosen blocks, ``[lists, Hkv, policy.scored_blocks]`` int32: see ``Chosen``.

        Every decoded token has a list, or every request (``Segment.by_request``); a prefill has
        one for every ``query_tile`` positions that it touches, request after request.  Where
        everything is seen the row is -1.  On a GPU there may be more rows at the end.
        """

    def fused_decode(self, operands: PagedOperands, segment: Segment) -> bool:
        """Choose and attend in one call, if it has one for these decodes; else return ``False``."""
        return False


@dataclass(frozen=True, eq=False)
class Indexers:
    """The indexers of one layer, one for each phase.

    Args:
        prefill: of prompts; ``None`` where these choose no blocks.
        decode: of decoded tokens, and of prompt tokens that choose by records; ``None`` where
            these choose no blocks.

    Raises:
        ValueError: both would keep something of their own in the same bytes of the pages.
    """

    prefill: Indexer | None = None
    decode: Indexer | None = None

    def __post_init__(self) -> None:
        kinds = {type(index).__name__ for index in self if index is not None and index.reads_pages}
        if len(kinds) > 1:
            names = " and ".join(sorted(kinds))
            raise ValueError(f"indexers: expected one kind that reads the pages, got {names}")

    def of(self, segment: Segment) -> Indexer | None:
        """Return the indexer of a segment, ``None`` where its policy has nothing to choose."""
        if not segment.policy.selects_blocks:
            return None
        found = self.decode if segment.decodes else self.prefill
        if found is None:
            phase = "decode" if segment.decodes else "prefill"
            raise ValueError(f"indexers.{phase}: expected an indexer for top_k >= 1, got None")
        return found

    @cached_property
    def written_with_keys(self) -> bool:
        """Whether ``write_kv`` keeps what one of them reads."""
        return any(index is not None and index.written_with_keys for index in self)

    @cached_property
    def written_once(self) -> Indexer | None:
        """Return the one whose bytes ``write_index`` keeps once a step, if there is one."""
        for index in self:
            if index is not None and index.reads_pages and not index.written_with_keys:
                return index
        return None

    @cached_property
    def reads_pages(self) -> bool:
        """Whether one of them reads bytes of its own from the pages."""
        return any(index is not None and index.reads_pages for index in self)

    def page_bytes(self, page_size: int, head_dim: int) -> int:
        """Bytes of one page and KV head that they keep."""
        found = (index for index in self if index is not None)
        return max((index.page_bytes(page_size, head_dim) for index in found), default=0)

    def __iter__(self) -> Iterator[Indexer | None]:
        return iter((self.prefill, self.decode))
