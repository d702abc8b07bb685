"""Attention as a module, with the contract of ``xformers.components.attention.Attention``.

That package left xFormers in 0.0.34.  Where it imports, :class:`SparseKAttention` subclasses its
base class and is registered as ``"sparsek"``, so ``build_attention({"name": "sparsek", ...})``
makes one; elsewhere the module works alone, with masks by :class:`AttentionMask` of its own.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparsek_backend.xformers_op.biases import SinkWindowMask
from sparsek_backend.xformers_op.compat import attn_bias, fmha
from sparsek_backend.xformers_op.op import BwOp, FwOp

if TYPE_CHECKING:
    _Base: Any = torch.nn.Module
    _Config: Any = object
    _LegacyMask: Any = None
    register_attention: Any = None
else:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            from xformers.components.attention import Attention as _Base
            from xformers.components.attention import AttentionConfig as _Config
            from xformers.components.attention import AttentionMask as _LegacyMask
            from xformers.components.attention import register_attention
    except ImportError:
        _LegacyMask = None
        _Base = torch.nn.Module

        @dataclass
        class _Config:
            name: str
            dropout: float


class _AttentionMask:
    """Additive attention mask: 0 where a key is seen, ``-inf`` where not, or any bias.

    Args:
        additive_mask: ``[to, from]`` or ``[batch, to, from]``, floating.
        is_causal: the values are exactly the causal mask, so kernels may skip reading them.

    Raises:
        ValueError: the mask is not floating, or not 2-D or 3-D.
    """

    def __init__(self, additive_mask: torch.Tensor, is_causal: bool = False) -> None:
        if not additive_mask.is_floating_point():
            raise ValueError(
                f"additive_mask: expected a floating dtype, got {additive_mask.dtype} "
                "(use AttentionMask.from_bool)"
            )
        if additive_mask.dim() not in (2, 3):
            raise ValueError(
                f"additive_mask: expected 2 or 3 dimensions, got {additive_mask.dim()}"
            )
        self.values = additive_mask if additive_mask.dim() == 3 else additive_mask[None]
        self.is_causal = is_causal

    @classmethod
    def from_bool(cls, x: torch.Tensor) -> _AttentionMask:
        """Mask from a pattern whose ``True`` marks the keys that are seen."""
        if x.dtype != torch.bool:
            raise ValueError(f"x: expected a boolean tensor, got {x.dtype}")
        return cls(torch.zeros(x.shape, device=x.device).masked_fill(~x, float("-inf")))

    @classmethod
    def make_causal(
        cls,
        seq_len: int,
        to_seq_len: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> _AttentionMask:
        """Causal mask ``[1, seq_len, to_seq_len]``, aligned to the first key."""
        shape = (seq_len, to_seq_len or seq_len)
        later = torch.ones(shape, dtype=torch.bool, device=device).triu(1)
        values = torch.zeros(shape, dtype=dtype or torch.get_default_dtype(), device=device)
        return cls(values.masked_fill(later, float("-inf")), is_causal=True)


AttentionMask: Any = _LegacyMask or _AttentionMask
"""xFormers' own class where it exists (<= 0.0.33), else an equal one."""


@dataclass
class SparseKAttentionConfig(_Config):  # type: ignore[misc]
    """Fields that ``build_attention`` passes on to :class:`SparseKAttention`."""

    causal: bool | None
    num_sink: int | None
    window_size: int | None


class SparseKAttention(_Base):  # type: ignore[misc]
    """Attention of projected heads on SparseK's kernels.

    Args:
        dropout: probability that a softmax weight is dropped while training.
        causal: every query sees itself and earlier keys only.
        num_sink: with ``window_size``, leading keys that every query sees.
        window_size: with ``causal``, latest keys that a query sees, its own included.
        softmax_scale: factor of ``q . k``; ``head_dim ** -0.5`` by default.
        name: what ``build_attention`` passes on; it changes nothing.

    Raises:
        ValueError: an argument is out of range, or ``window_size`` comes without ``causal``, or
            ``num_sink`` without ``window_size``.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        causal: bool = False,
        num_sink: int = 0,
        window_size: int | None = None,
        softmax_scale: float | None = None,
        name: str = "sparsek",
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout: expected a probability, got {dropout}")
        if window_size is not None and not causal:
            raise ValueError(f"window_size: expected None without causal, got {window_size}")
        if num_sink and window_size is None:
            raise ValueError(f"num_sink: expected 0 without window_size, got {num_sink}")
        self.dropout = dropout
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.local_mask = None if window_size is None else SinkWindowMask(num_sink, window_size)
        self.requires_input_projection = True
        self.requires_head_dimension = False
        self.requires_separate_masks = False
        self.requires_same_k_q_dimensions = False
        self.requires_skip_multi_head = False
        self.requires_squared_context = False
        self.supports_attention_mask = True
        self.supports_key_padding_mask = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, att_mask: Any = None
    ) -> torch.Tensor:
        """Attend.

        Args:
            q: ``[B * heads, N, D]``, ``[B, N, heads, D]`` or ``[B, N, groups, heads, D]``.
            k: keys in the layout of ``q``, with M tokens.
            v: values in the layout of ``k``, with any head dim up to 256.
            att_mask: ``None``, an xFormers ``AttentionBias``, an :class:`AttentionMask`, or a
                tensor that broadcasts to ``[B, N, M]`` (3-D inputs) or ``[B, heads, N, M]``:
                boolean (``True`` is seen) or floating (added).  It joins the module's own causal or
                sink-window mask.

        Returns:
            ``q``'s shape with ``v``'s head dim.

        Raises:
            TypeError: ``att_mask`` is of another type or dtype.
            ValueError: a mask of another shape, or an ``AttentionBias`` beside a causal module.
        """
        bias = self._bias(q, k, att_mask)
        width = q.dim()
        if width == 3:
            q, k, v = (x[:, :, None] for x in (q, k, v))
        out: torch.Tensor = fmha.memory_efficient_attention(
            q,
            k,
            v,
            attn_bias=bias,
            p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            op=(FwOp, BwOp),
        )
        return out[:, :, 0] if width == 3 else out

    def _bias(self, q: torch.Tensor, k: torch.Tensor, att_mask: Any) -> Any:
        own = self.local_mask
        if own is None and self.causal:
            own = attn_bias.LowerTriangularMask()
        if att_mask is None:
            return own
        if isinstance(att_mask, attn_bias.AttentionBias):
            if own is not None:
                raise ValueError(
                    f"att_mask: expected a tensor or AttentionMask beside causal=True, got "
                    f"{type(att_mask).__name__} (give that mask to a module with causal=False)"
                )
            return att_mask
        if isinstance(att_mask, AttentionMask):
            if att_mask.is_causal and type(own) in (type(None), attn_bias.LowerTriangularMask):
                return attn_bias.LowerTriangularMask()
            ones = (1,) * max(q.dim() - 3, 0)
            values = att_mask.values
            values = values.reshape(values.shape[0], *ones, *values.shape[1:])
        elif isinstance(att_mask, torch.Tensor):
            values = att_mask
            if values.dtype == torch.bool:
                values = torch.zeros(values.shape, device=q.device, dtype=q.dtype).masked_fill(
                    ~values, float("-inf")
                )
            if not values.is_floating_point():
                raise TypeError(
                    f"att_mask: expected a boolean or floating tensor, got {values.dtype}"
                )
        else:
            raise TypeError(
                "att_mask: expected None, a tensor, an AttentionMask or an AttentionBias, got "
                f"{type(att_mask).__name__}"
            )
        num_q, num_k = q.shape[1], k.shape[1]
        values = values[..., :num_q, :num_k]
        shape = (q.shape[0], *((1,) if q.dim() == 3 else q.shape[2:-1]), num_q, num_k)
        if q.dim() == 3 and values.dim() == 3:
            values = values[:, None]
        sizes = zip(reversed(values.shape), reversed(shape), strict=False)
        if values.dim() > len(shape) or any(size not in (1, due) for size, due in sizes):
            raise ValueError(
                f"att_mask: expected a shape that broadcasts to {list(shape)}, "
                f"got {list(values.shape)}"
            )
        if own is not None:
            values = values + own.materialize((num_q, num_k), values.dtype, q.device)
        return values.expand(shape)


if _LegacyMask is not None:
    register_attention("sparsek", SparseKAttentionConfig)(SparseKAttention)
