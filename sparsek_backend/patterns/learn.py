"""Learning a pattern: attention mass per block, and the fewest blocks that hold most of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from sparsek_backend.patterns.entries import check_share
from sparsek_backend.patterns.masses import sampled_block_masses
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_backend.patterns.ranking import blocks_holding, fixed_blocks
from sparsek_kernels.block_sparse.structure import check_block_size
from sparsek_kernels.checks import check_int, check_tensor

Heads = Literal["query", "kv", "all"]
Scope = Literal["row", "head"]


class BlockMass:
    """How much attention each key block gets from each query block, on average over samples.

    Args:
        block_size: tokens along a side of a block.
        causal: whether queries see earlier keys only (bottom-right aligned).
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
    """

    def __init__(
        self, block_size: int, *, causal: bool = True, softmax_scale: float | None = None
    ) -> None:
        check_block_size(block_size)
        self.block_size = block_size
        self.causal = causal
        self.softmax_scale = softmax_scale
        self._total: torch.Tensor | None = None
        self._samples = 0
        self._shape: tuple[int, int, int, int] | None = None

    @torch.no_grad()
    def add(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Count samples: dense attention of a few rows of blocks at a time, in fp32.

        Args:
            q: ``[B, N, Hq, D]``, any floating dtype.
            k: ``[B, M, Hkv, D]``.

        Raises:
            ValueError: sizes that do not fit each other or the samples before.
        """
        check_tensor("q", q, ("B", "N", "Hq", "D"))
        check_tensor("k", k, (q.shape[0], "M", "Hkv", q.shape[3]), device=q.device)
        shape = (q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        if self._shape not in (None, shape):
            raise ValueError(
                "q: expected queries, keys, heads and KV heads as in the samples before, "
                f"{self._shape}, got {shape}"
            )
        q, k = q.float(), k.float()
        mass = sampled_block_masses(
            q, k, k, self.block_size, samples=self.block_size,
            causal=self.causal, softmax_scale=self.softmax_scale,
        )  # fmt: skip
        self._shape = shape
        self._total = mass * q.shape[0] + (0.0 if self._total is None else self._total)
        self._samples += q.shape[0]

    def observe(
        self, q: torch.Tensor, k: torch.Tensor, _: torch.Tensor, softmax_scale: float | None = None
    ) -> None:
        """:meth:`add`, as a layer of a model calls it: with its values and its scale."""
        self.softmax_scale = softmax_scale
        self.add(q, k)

    def mean(self) -> torch.Tensor:
        """``[Hq, R, C]`` fp32: the share of a query block's attention that each key block gets.

        Raises:
            ValueError: no sample was added.
        """
        if self._total is None:
            raise ValueError("samples: expected at least one, got none")
        return self._total / self._samples

    def pattern(
        self,
        share: float = 0.95,
        *,
        scope: Scope = "row",
        heads: Heads = "kv",
        sinks: int = 1,
        window: int = 1,
    ) -> BlockSparsePattern:
        """Sinks, window and the fewest other blocks that hold ``share`` of the others' mass.

        The masses of the blocks become the pattern's weights.

        Args:
            share: above 0 and up to 1.
            scope: ``row`` holds the share in every row of blocks; ``head`` over all rows of a
                head, so that rows with scattered attention get more blocks and others fewer.
            heads: who shares a pattern, by the mean mass: the query heads of a ``kv`` head,
                ``all``, or each ``query`` head on its own.
            sinks: first key blocks, always attended and not counted.
            window: latest key blocks, a query block's own included, always attended and not
                counted; without causality as many after it.

        Raises:
            TypeError: ``sinks`` or ``window`` is no integer.
            ValueError: an argument out of range, or no samples.
        """
        check_share("share", share)
        if scope not in ("row", "head"):
            raise ValueError(f"scope: expected 'row' or 'head', got {scope!r}")
        check_int("sinks", sinks, 0)
        check_int("window", window, 0)
        mass = self.mean()
        groups = {"query": mass.shape[0], "all": 1, "kv": self._shape[3] if self._shape else 1}
        if heads not in groups:
            raise ValueError(f"heads: expected 'query', 'kv' or 'all', got {heads!r}")
        mass = mass.unflatten(0, (groups[heads], -1)).mean(1)  # [P, R, C]
        fixed = fixed_blocks(mass, mass > 0, sinks, window)
        if scope == "row":
            rows, fixed_rows = (x.flatten(0, 1)[:, None] for x in (mass, fixed))
            kept = blocks_holding(rows, fixed_rows, share).view_as(mass)
        else:
            kept = blocks_holding(mass, fixed, share)
        return BlockSparsePattern.from_mask(kept, self.block_size, mass=mass)


def learn_pattern(
    samples: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    block_size: int,
    share: float = 0.95,
    scope: Scope = "row",
    heads: Heads = "kv",
    sinks: int = 1,
    window: int = 1,
    causal: bool = True,
    softmax_scale: float | None = None,
) -> BlockSparsePattern:
    """Learn one layer's pattern from its queries and keys.

    Args:
        samples: pairs of q ``[B, N, Hq, D]`` and k ``[B, M, Hkv, D]``, after their position
            embedding, all of the same lengths.
        block_size: tokens along a side of a block.
        share: of the attention mass that the pattern holds; see :meth:`BlockMass.pattern` for
            this, ``scope``, ``heads``, ``sinks`` and ``window``.
        causal: whether queries see earlier keys only.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.

    Raises:
        ValueError: no samples, sizes that differ, or an argument out of range.
    """
    mass = BlockMass(block_size, causal=causal, softmax_scale=softmax_scale)
    for q, k in samples:
        mass.add(q, k)
    return mass.pattern(share, scope=scope, heads=heads, sinks=sinks, window=window)
