"""A pattern for each kind of query, chosen while attention runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sparsek_kernels.block_sparse import ops
from sparsek_kernels.block_sparse.structure import check_block_size, offsets_of
from sparsek_kernels.checks import check_qkv, check_scale, check_tensor


class AdaptivePattern(torch.nn.Module):
    """Self-attention in which each block of queries attends the pattern of its cluster.

    A block belongs to the cluster whose centroid is nearest to the mean of its queries.  Routing
    stays on the device and waits for nothing.

    Args:
        centroids: ``[P, K, D]``, of the clusters of each pattern's heads.
        table: ``[P, K, R, C]`` bool, the key blocks of each query block in each cluster.
        block_size: tokens along a side of a block.
        causal: whether queries see earlier keys only.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: shapes that do not fit each other.
    """

    centroids: torch.Tensor
    table: torch.Tensor

    def __init__(
        self,
        centroids: torch.Tensor,
        table: torch.Tensor,
        block_size: int,
        *,
        causal: bool = True,
    ) -> None:
        super().__init__()
        check_block_size(block_size)
        check_tensor("centroids", centroids, ("P", "K", "D"))
        check_tensor("table", table, (*centroids.shape[:2], "R", "C"), (torch.bool,))
        self.block_size = block_size
        self.causal = causal
        self.register_buffer("centroids", centroids.float())
        self.register_buffer("table", table)
        self._count_room()

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self._count_room()

    def _count_room(self) -> None:
        """Room for the largest pattern of every row: sizes must not depend on the queries."""
        self._row_room = int(self.table.sum(3).amax(1).sum())
        self._column_room = int(self.table.any(1).sum())

    def route(self, q: torch.Tensor) -> torch.Tensor:
        """``[B, P, R]`` int64: the cluster of each block of queries ``q [B, N, Hq, D]``."""
        features = block_features(q, self.block_size, self.centroids.shape[0])
        return torch.cdist(features, self.centroids.float()).argmin(3)

    def mask(self, q: torch.Tensor) -> torch.Tensor:
        """``[B, P, R, C]`` bool: the key blocks that each block of queries attends."""
        cluster = self.route(q)
        patterns, rows = (torch.arange(n, device=q.device) for n in cluster.shape[1:])
        chosen: torch.Tensor = self.table[patterns[:, None], cluster, rows]
        return chosen

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
    ) -> torch.Tensor:
        """Attention ``[B, N, Hq, D]``; differentiable in q, k and v, not in the routing.

        Args:
            q: ``[B, N, Hq, D]``.
            k: ``[B, N, Hkv, D]``.
            v: ``[B, N, Hkv, D]``.
            softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        """
        check_qkv(q, k, v)
        needed = tuple(-(-x.shape[1] // self.block_size) for x in (q, k))
        if needed != self.table.shape[2:] or q.shape[2] % self.table.shape[0]:
            raise ValueError(
                f"q: expected {self.table.shape[2]} blocks of {self.block_size} tokens and heads "
                f"for {self.table.shape[0]} patterns, got shape {list(q.shape)} and keys "
                f"{list(k.shape)}"
            )
        with torch.no_grad():
            mask = self.mask(q).flatten(0, 1)  # [B P, R, C]
            batch = q.shape[0]
            crow, col = indices_with_room(mask, batch * self._row_room)
            ccol, row = indices_with_room(mask.mT, batch * self._column_room)
        # Batch entries differ in their patterns, as heads do.
        wide = [x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v)]
        scale = check_scale(softmax_scale, q.shape[3])
        indices = (crow, col, ccol, row)
        out, _ = ops.block_sparse_fwd(*wide, *indices, self.block_size, self.causal, scale)
        apart: torch.Tensor = out[0].unflatten(1, (batch, -1)).transpose(0, 1)
        return apart


def block_features(q: torch.Tensor, block_size: int, num_patterns: int) -> torch.Tensor:
    """``[B, P, R, D]`` fp32: the mean query of each block, over the heads of each pattern.

    Args:
        q: ``[B, N, Hq, D]``.
        block_size: tokens along a side of a block.
        num_patterns: P, which divides Hq.
    """
    tokens = q.float().unflatten(2, (num_patterns, -1)).mean(3)  # [B, N, P, D]
    tokens = F.pad(tokens, (0, 0, 0, 0, 0, -q.shape[1] % block_size))
    sums: torch.Tensor = tokens.unflatten(1, (-1, block_size)).sum(2)  # [B, R, P, D]
    first = torch.arange(0, q.shape[1], block_size, device=q.device)
    counts = (q.shape[1] - first).clamp(max=block_size)
    return (sums / counts[:, None, None]).transpose(1, 2)


def indices_with_room(mask: torch.Tensor, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(crow_indices, col_indices)`` of ``mask [P, R, C]``, without waiting for the device.

    Args:
        mask: bool, at most ``room`` blocks of it set.
        room: length of ``col_indices``, whose end may be unused.
    """
    crow = offsets_of(mask.sum(2))
    place = crow[:, :-1, None] + mask.cumsum(2) - 1
    place = place.masked_fill(~mask, room).flatten()
    columns = torch.arange(mask.shape[2], dtype=torch.int32, device=mask.device)
    col = torch.zeros(room + 1, dtype=torch.int32, device=mask.device)
    col.scatter_(0, place, columns.expand_as(mask).flatten())
    return crow, col[:room]
