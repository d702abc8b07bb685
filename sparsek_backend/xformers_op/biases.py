"""Attention biases that xFormers does not have."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.xformers_op.compat import attn_bias
from sparsek_backend.xformers_op.dense import visible_keys
from sparsek_kernels.checks import check_int


@dataclass
class SinkWindowMask(attn_bias.LowerTriangularFromBottomRightMask):  # type: ignore[misc]
    """Causal mask that keeps the first keys and a sliding window.

    Query ``i``, counted from the end of the keys (``i + num_keys - num_queries``), sees key
    ``j <= i`` when ``j < num_sink`` or ``j > i - window_size``: attention sinks and a window
    (Xiao et al., arXiv 2309.17453, section 3).  Only SparseK's operators accept it; time and
    memory grow with ``window_size``, not with the number of keys.

    Args:
        num_sink: leading keys that every later query sees, >= 0.
        window_size: latest keys that a query sees, its own included, >= 1.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is out of range.
    """

    num_sink: int
    window_size: int

    def __post_init__(self) -> None:
        check_int("num_sink", self.num_sink, 0)
        check_int("window_size", self.window_size, 1)

    def to(self, device: torch.device | str) -> SinkWindowMask:
        """Return the mask for ``device``; it holds no tensor, so this is the mask itself."""
        return self

    def materialize(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> torch.Tensor:
        """Additive mask of ``shape`` ``[..., num_queries, num_keys]``: 0 where a key is seen."""
        num_queries, num_keys = shape[-2:]
        shift = num_keys - num_queries
        seen = visible_keys(
            0, num_queries, num_keys, shift, self.window_size, self.num_sink, device
        )
        mask = torch.zeros(num_queries, num_keys, dtype=dtype, device=device)
        return mask.masked_fill(~seen, float("-inf")).expand(shape)


@dataclass
class BlockSparseMask(attn_bias.AttentionBias):  # type: ignore[misc]
    """Mask that keeps the blocks of a pattern, and with ``causal`` only keys that came before.

    Only SparseK's operators accept it; time and memory grow with the number of listed blocks.  The
    P patterns serve runs of ``H / P`` heads (``G x H / P`` of BMGHK inputs, groups outside).

    Args:
        pattern: ``ceil(num_queries / block_size) x ceil(num_keys / block_size)`` blocks, on the
            inputs' device.
        causal: also hide keys after the query, which is counted from the end of the keys
            (``i + num_keys - num_queries``).

    Raises:
        TypeError: ``pattern`` is no :class:`BlockSparsePattern`, or ``causal`` no bool.
    """

    pattern: BlockSparsePattern
    causal: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("pattern", BlockSparsePattern), ("causal", bool)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise TypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")

    def to(self, device: torch.device | str) -> BlockSparseMask:
        """Return the mask with its pattern on ``device``."""
        return BlockSparseMask(self.pattern.to(device), self.causal)

    def materialize(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> torch.Tensor:
        """Additive mask of ``shape``: 0 where a key is seen.

        Args:
            shape: ``[batch, *heads, num_queries, num_keys]``; one pattern for all heads takes any
                leading sizes.

        Raises:
            ValueError: the pattern has other blocks, or its patterns do not divide the heads.
        """
        num_queries, num_keys = shape[-2:]
        heads = tuple(shape[1:-2])
        blocks, size = self.pattern.mask().to(device), self.pattern.block_size
        if blocks.shape[1:] != (-(-num_queries // size), -(-num_keys // size)):
            raise ValueError(
                f"shape: expected {blocks.shape[1]} x {blocks.shape[2]} blocks of {size}, "
                f"got {num_queries} queries and {num_keys} keys"
            )
        if len(blocks) > 1 and prod(heads) % len(blocks):
            raise ValueError(
                f"shape: expected a number of heads divisible by {len(blocks)} patterns, "
                f"got {list(heads)}"
            )
        seen = blocks.repeat_interleave(size, 1).repeat_interleave(size, 2)
        seen = seen[:, :num_queries, :num_keys]
        if self.causal:
            shift = num_keys - num_queries
            seen = seen & visible_keys(0, num_queries, num_keys, shift, None, 0, device)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        mask = mask.masked_fill(~seen, float("-inf"))
        if len(blocks) > 1:
            mask = mask.repeat_interleave(prod(heads) // len(blocks), 0)
            return mask.view(*heads, num_queries, num_keys).expand(shape)
        return mask[0].expand(shape)
