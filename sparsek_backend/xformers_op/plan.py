"""An xFormers bias translated into arguments of SparseK's kernels.

Every supported bias is a *band* (full, causal, or sinks + window, aligned to the first or to the
last key) over the whole batch or over packed sequences, with an optional additive tensor or, over
the whole batch, a block-sparse pattern.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.xformers_op.biases import BlockSparseMask, SinkWindowMask
from sparsek_backend.xformers_op.compat import Inputs, attn_bias
from sparsek_kernels.block_sparse.checks import misfit

Interval = tuple[int, int]
Terms = tuple[bool, int, int | None, int]


@dataclass(frozen=True)
class Band:
    """Which keys ``j`` a query ``i`` of a sequence with N queries and M keys sees."""

    causal: bool = False  # whether ``j <= i + shift``
    top_left: bool = False  # ``shift`` is 0, else ``M - N`` (bottom-right aligned)
    # also ``j > i + shift - window_size``; ``None`` for no such bound
    window_size: int | None = None
    num_sink: int = 0  # keys below this are exempt from ``window_size``

    def terms(self, num_q: int, num_k: int) -> Terms:
        """``(causal, shift, window_size, num_sink)`` of a sequence, as the torch path takes it."""
        return self.causal, 0 if self.top_left else num_k - num_q, self.window_size, self.num_sink


@dataclass(frozen=True)
class Segments:
    """Sequences packed along the token axis of a batch of one."""

    q_info: Any  # xFormers' description of the query lengths, on host and device
    k_info: Any  # xFormers' description of the key lengths
    # whether the keys lie back to back (else gaps, padding or pages between them)
    packed_keys: bool = True
    # ``[S, max_pages]`` int32 physical pages of each sequence, or ``None``
    block_table: torch.Tensor | None = None
    page_size: int = 0  # tokens in a page

    def query_intervals(self) -> list[Interval]:
        """Half-open token ranges of the sequences' queries."""
        starts = self.q_info.seqstart_py
        return list(pairwise(starts))

    def key_intervals(self) -> list[Interval]:
        """Half-open ranges of the sequences' keys: in the tensor, or in the sequence if paged."""
        starts = self.k_info.seqstart_py
        if self.packed_keys:
            return list(pairwise(starts))
        lengths = self.k_info.seqlen_py
        if self.block_table is None:
            return [(lo, lo + n) for lo, n in zip(starts, lengths, strict=False)]
        if hasattr(self.k_info, "padding"):
            return [(0, n) for n in lengths]
        return list(zip(starts, lengths, strict=False))

    @property
    def same_lengths(self) -> bool:
        """Whether every sequence is known to have as many keys as queries."""
        if not self.packed_keys:
            return False
        return self.q_info is self.k_info or self.q_info.seqstart_py == self.k_info.seqstart_py


@dataclass(frozen=True)
class MaskPlan:
    """A bias as a band, sequences (``None``: the batch is not packed), an additive tensor and a
    block-sparse pattern within the band.
    """

    band: Band
    segments: Segments | None = None
    bias: torch.Tensor | None = None
    pattern: BlockSparsePattern | None = None

    @property
    def outruns_window(self) -> bool:
        """Whether a top-left aligned window meets a sequence with more queries than keys.

        Its last queries see the end of the keys through a window that no kernel call describes.
        """
        band = self.band
        if not band.top_left or band.window_size is None or self.segments is None:
            return False
        if self.segments.same_lengths:
            return False
        pairs = zip(self.segments.query_intervals(), self.segments.key_intervals(), strict=True)
        return any(q_hi - q_lo > k_hi - k_lo for (q_lo, q_hi), (k_lo, k_hi) in pairs)


def _band_of(band: Band, bias: Any) -> Band:
    """The band of a bias, from that of its type and the window and sinks of its own."""
    if isinstance(bias, SinkWindowMask):
        return replace(band, window_size=bias.window_size, num_sink=bias.num_sink)
    if hasattr(bias, "window_left"):
        return replace(band, window_size=bias.window_left + 1)
    return replace(band, window_size=getattr(bias, "_window_size", None))


def _by_type(bands: dict[str, Band]) -> dict[type, Band]:
    """Bands of the bias classes that this xFormers has."""
    known = vars(attn_bias)
    return {known[name]: band for name, band in bands.items() if name in known}


_FULL = Band()
_CAUSAL = Band(causal=True)
_TOP_LEFT = Band(causal=True, top_left=True)

_BATCHED: dict[type, Band] = {
    type(None): _FULL,
    torch.Tensor: _FULL,
    torch.nn.Parameter: _FULL,
    SinkWindowMask: _CAUSAL,
    BlockSparseMask: _FULL,
    **_by_type(
        {
            "LowerTriangularMask": _TOP_LEFT,
            "LowerTriangularMaskWithTensorBias": _TOP_LEFT,
            "LowerTriangularFromBottomRightMask": _CAUSAL,
            "LowerTriangularFromBottomRightLocalAttentionMask": _CAUSAL,
            "LocalAttentionFromBottomRightMask": _CAUSAL,
        }
    ),
}
_PACKED = _by_type(
    {
        "BlockDiagonalMask": _FULL,
        "BlockDiagonalCausalMask": _TOP_LEFT,
        "BlockDiagonalCausalFromBottomRightMask": _CAUSAL,
        "BlockDiagonalCausalLocalAttentionMask": _TOP_LEFT,
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _CAUSAL,
    }
)
_SPREAD = _by_type(
    {
        "BlockDiagonalPaddedKeysMask": _FULL,
        "BlockDiagonalCausalWithOffsetPaddedKeysMask": _CAUSAL,
        "BlockDiagonalLocalAttentionPaddedKeysMask": _CAUSAL,
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _CAUSAL,
        "BlockDiagonalGappyKeysMask": _FULL,
        "BlockDiagonalCausalWithOffsetGappyKeysMask": _CAUSAL,
        "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": _CAUSAL,
    }
)
_PAGED = _by_type(
    {
        "PagedBlockDiagonalPaddedKeysMask": _FULL,
        "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": _CAUSAL,
        "PagedBlockDiagonalCausalLocalPaddedKeysMask": _CAUSAL,
        "PagedBlockDiagonalGappyKeysMask": _FULL,
        "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": _CAUSAL,
    }
)

BACKWARD_TYPES = (*_BATCHED, *_PACKED)
"""Bias types that have gradients; the others are for decoding."""

FORWARD_TYPES = (*BACKWARD_TYPES, *_SPREAD, *_PAGED)


def plan_of(bias: Any) -> MaskPlan:
    """Translate a bias of a supported type.

    Raises:
        NotImplementedError: the type is not one of ``FORWARD_TYPES`` (exact match).
    """
    kind = type(bias)
    if kind in _BATCHED:
        tensor = bias if isinstance(bias, torch.Tensor) else getattr(bias, "_bias", None)
        if kind is BlockSparseMask:
            return MaskPlan(Band(causal=bias.causal), pattern=bias.pattern)
        return MaskPlan(_band_of(_BATCHED[kind], bias), bias=tensor)
    if kind in _PACKED:
        segments = Segments(bias.q_seqinfo, bias.k_seqinfo)
        return MaskPlan(_band_of(_PACKED[kind], bias), segments)
    if kind in _SPREAD:
        segments = Segments(bias.q_seqinfo, bias.k_seqinfo, packed_keys=False)
        return MaskPlan(_band_of(_SPREAD[kind], bias), segments)
    if kind in _PAGED:
        segments = Segments(
            bias.q_seqinfo, bias.k_seqinfo, False, bias.block_tables, bias.page_size
        )
        return MaskPlan(_band_of(_PAGED[kind], bias), segments)
    raise NotImplementedError(f"attn_bias: expected a supported type, got {kind.__name__}")


def bias_reasons(inp: Inputs) -> list[str]:
    """Why the bias of these inputs, of a supported type, cannot be served as it is."""
    bias = inp.attn_bias
    reasons = []
    if getattr(bias, "window_right", 0) != 0:
        reasons.append(f"window_right={bias.window_right}: only windows to the left (0)")
    plan = plan_of(bias)
    if plan.bias is not None:
        reasons += _tensor_reasons(inp, plan.bias)
    if plan.pattern is not None:
        reasons += _pattern_reasons(inp, plan.pattern)
    if plan.band.window_size is not None and plan.band.window_size < 1:
        reasons.append(f"attn_bias has a window of {plan.band.window_size} keys (expected >= 1)")
    if plan.segments is not None:
        reasons += _segment_reasons(inp, plan.segments)
    return reasons


def _segment_reasons(inp: Inputs, segments: Segments) -> list[str]:
    """Where sequences do not fit each other or the tensors, as far as the host knows."""
    num_q, num_k = inp.query.shape[1], inp.key.shape[1]
    queries, keys = segments.query_intervals(), segments.key_intervals()
    if len(queries) != len(keys):
        return [f"attn_bias has {len(queries)} sequences of queries and {len(keys)} of keys"]
    reasons = [
        f"attn_bias has a sequence from {lo} to {hi}"
        for lo, hi in (*queries, *keys)
        if not 0 <= lo <= hi
    ]
    if inp.query.shape[0] != 1 or inp.key.shape[0] != 1:
        reasons.append("batch size is not 1 with packed sequences")
    covered = segments.q_info.seqstart_py[-1]
    if covered != num_q:
        reasons.append(f"attn_bias covers {covered} queries, query has {num_q}")
    if segments.block_table is not None:
        return reasons + _page_reasons(inp, segments, segments.block_table)
    covered = max([segments.k_info.seqstart_py[-1], *(hi for _, hi in keys)])
    if covered > num_k or (segments.packed_keys and covered < num_k):
        reasons.append(f"attn_bias covers {covered} keys, key has {num_k}")
    padding = getattr(segments.k_info, "padding", num_k)
    longest = max([0, *(hi - lo for lo, hi in keys)])
    if longest > padding:
        reasons.append(f"attn_bias has a sequence of {longest} keys in a padding of {padding}")
    return reasons


def _page_reasons(inp: Inputs, segments: Segments, table: torch.Tensor) -> list[str]:
    """Where sequences do not fit their pages; a table on a GPU is not read."""
    keys, size = segments.key_intervals(), segments.page_size
    reasons = []
    if inp.p != 0.0:
        reasons.append("dropout with paged keys")
    if table.device != inp.query.device:
        reasons.append(f"block_tables is on {table.device}, query on {inp.query.device}")
    if len(table) < len(keys):
        reasons.append(f"block_tables has {len(table)} rows for {len(keys)} sequences")
    pages = inp.key.shape[1] // size
    longest, room = max([0, *(hi for _, hi in keys)]), min(table.shape[1], pages) * size
    if longest > room:
        reasons.append(f"attn_bias has a sequence of {longest} keys in pages for {room}")
    if reasons or table.device.type != "cpu" or torch.compiler.is_compiling():
        return reasons
    for row, (lo, hi) in zip(table.tolist(), keys, strict=False):
        outside = [page for page in row[lo // size : -(-hi // size)] if not 0 <= page < pages]
        if outside:
            return [f"block_tables names page {outside[0]}, key has {pages} pages of {size}"]
    return []


def _tensor_reasons(inp: Inputs, bias: torch.Tensor) -> list[str]:
    reasons = []
    if not bias.is_floating_point():
        reasons.append(f"attn_bias dtype is {bias.dtype} (expected a floating dtype)")
    if bias.device != inp.query.device:
        reasons.append(f"attn_bias is on {bias.device}, query on {inp.query.device}")
    expected = (inp.query.shape[0], *inp.query.shape[2:-1], inp.query.shape[1], inp.key.shape[1])
    if tuple(bias.shape) != expected:
        reasons.append(f"attn_bias has shape {tuple(bias.shape)} (expected {expected})")
    graded = any(x.requires_grad for x in (inp.query, inp.key, inp.value))
    if bias is not inp.attn_bias and bias.requires_grad and (graded or torch.is_grad_enabled()):
        reasons.append(
            "xFormers passes no gradient to the tensor of a LowerTriangularMaskWithTensorBias: "
            "detach it, or add the causal mask to it and pass the sum as a tensor"
        )
    return reasons


def _pattern_reasons(inp: Inputs, pattern: BlockSparsePattern) -> list[str]:
    q = inp.query
    heads = prod(q.shape[2:-1])
    reason = misfit(pattern, q.shape[1], inp.key.shape[1], heads, q.device)
    reasons = [] if reason is None else [f"pattern: {reason}"]
    if inp.p != 0.0:
        reasons.append("dropout with a block-sparse pattern")
    return reasons
