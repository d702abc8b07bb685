"""Attention biases that xFormers does not have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_backend.xformers_op.compat import attn_bias


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
        for name, low in (("num_sink", 0), ("window_size", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < low:
                raise ValueError(f"{name}: expected an integer >= {low}, got {value}")

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
        query = torch.arange(num_queries, device=device)[:, None] + (num_keys - num_queries)
        key = torch.arange(num_keys, device=device)[None, :]
        seen = (key <= query) & ((key < self.num_sink) | (key > query - self.window_size))
        mask = torch.zeros(num_queries, num_keys, dtype=dtype, device=device)
        return mask.masked_fill(~seen, float("-inf")).expand(shape)
