"""Attention over the nodes of a graph, block by block."""

from __future__ import annotations

from typing import cast

import torch

from sparsek_backend.patterns.graphs.layout import GraphLayout, Order, known_layout
from sparsek_kernels import block_sparse_attention
from sparsek_kernels.block_sparse.structure import check_block_size
from sparsek_kernels.checks import check_tensor


class GraphAttention(torch.nn.Module):
    """Multi-head attention of nodes to the blocks of nodes that their edges come from.

    Called as PyTorch Geometric's ``TransformerConv`` is, without depending on it.  Nodes are laid
    out so that edges fill few blocks; a node attends every node of a listed block, also those
    that it has no edge from, so this is attention over neighbourhoods rather than single edges.

    Args:
        in_channels: features of a node.
        out_channels: features of each head.
        heads: attention heads.
        concat: whether the heads' outputs are concatenated; otherwise their mean is taken.
        block_size: nodes along a side of a block.
        density: most blocks, as a share of the grid; all blocks with an edge when ``None``.
        order: how nodes are laid out; see :func:`graph_layout`.
        root_weight: whether a linear map of the node's own features is added.
        bias: whether projections have biases.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        *,
        block_size: int = 64,
        density: float | None = None,
        order: Order = "communities",
        root_weight: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_block_size(block_size)
        self.in_channels, self.out_channels, self.heads = in_channels, out_channels, heads
        self.concat, self.block_size = concat, block_size
        self.density, self.order = density, order
        wide = heads * out_channels
        self.lin_query = torch.nn.Linear(in_channels, wide, bias=bias)
        self.lin_key = torch.nn.Linear(in_channels, wide, bias=bias)
        self.lin_value = torch.nn.Linear(in_channels, wide, bias=bias)
        self.lin_skip = None
        if root_weight:
            self.lin_skip = torch.nn.Linear(in_channels, wide if concat else out_channels, bias)

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        for linear in (self.lin_query, self.lin_key, self.lin_value, self.lin_skip):
            if linear is not None:
                linear.reset_parameters()

    def forward(
        self,
        x: torch.Tensor,
        edge_index: torch.Tensor | GraphLayout,
        batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[N, heads x out_channels]``, or ``[N, out_channels]`` without ``concat``.

        Args:
            x: ``[N, in_channels]`` node features.
            edge_index: ``[2, E]`` int64, from source to target, or a layout made of it.  The
                layout of a tensor is made once and kept as long as the tensor.
            batch: ``[N]`` int64, the graph of each node; graphs do not see each other.  A layout
                is made with it.

        Raises:
            ValueError: a ``batch`` with a layout, or another number of nodes than the layout's.
        """
        check_tensor("x", x, ("N", self.in_channels))
        layout = edge_index
        if isinstance(layout, torch.Tensor):
            layout = known_layout(
                layout, x.shape[0], self.block_size,
                density=self.density, order=self.order, batch=batch,
            )  # fmt: skip
        elif batch is not None:
            raise ValueError("batch: expected None with a layout, which is made with it, got one")
        check_tensor("slots of the layout", layout.slots, (x.shape[0],))
        placed = x.new_zeros(layout.length, self.in_channels).index_copy(0, layout.slots, x)
        q, k, v = (
            project(placed).unflatten(1, (self.heads, -1))[None]
            for project in (self.lin_query, self.lin_key, self.lin_value)
        )
        out = _attend(q, k, v, layout)[0, layout.slots]  # [N, H, D]
        out = out.flatten(1) if self.concat else out.mean(1)
        return out if self.lin_skip is None else out + self.lin_skip(x)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: GraphLayout) -> torch.Tensor:
    """``[1, L, H, D]``; places without a node see nothing and are seen by none."""
    real = None if layout.real is None else layout.real[None]
    return cast(
        torch.Tensor,
        block_sparse_attention(q, k, v, layout.pattern, key_mask=real, query_mask=real),
    )
