"""Decoding biases on the paged kernels: keys stay where they are, nothing is gathered."""

from __future__ import annotations

import torch

from sparsek_backend.xformers_op.plan import MaskPlan, Segments
from sparsek_kernels.common.operators import new_like
from sparsek_kernels.common.precision import without_autocast
from sparsek_kernels.paged.api import paged_attention
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy

_PAGE_OF_PADDED_KEYS = 64  # tokens; halved until it divides the padding
_LONGEST_DECODE = 8  # query tokens of a sequence
_SHORTEST_HEAD = 16  # what a matrix product takes


def page_size_of(plan: MaskPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int | None:
    """Tokens per page if the paged kernels can serve this plan, else ``None``.

    They know one mask, causal and aligned to the last key, values as wide as keys and rows that are
    contiguous, and return no log-sum-exp.  A sequence with one query needs no causality.  Each
    query is itself a token of the cache, so a sequence with fewer keys than queries is not theirs.
    """
    segments, band = plan.segments, plan.band
    if segments is None or segments.packed_keys or band.top_left:
        return None
    if q.shape[3] != v.shape[3] or q.shape[3] < _SHORTEST_HEAD:
        return None
    if q.shape[1] == 0 or any(x.stride(3) != 1 for x in (q, k, v)):
        return None
    if not band.causal and segments.q_info.max_seqlen > 1:
        return None
    pairs = zip(segments.query_intervals(), segments.key_intervals(), strict=True)
    if any(q_hi - q_lo > k_hi - k_lo for (q_lo, q_hi), (k_lo, k_hi) in pairs):
        return None
    if segments.block_table is not None:
        gaps = not hasattr(segments.k_info, "padding")
        if gaps and any(segments.k_info.seqstart_py[: segments.block_table.shape[0]]):
            return None
        return segments.page_size if segments.page_size % CELL_SIZE == 0 else None
    size = _PAGE_OF_PADDED_KEYS
    padding = getattr(segments.k_info, "padding", 0)
    while size >= CELL_SIZE and padding % size:
        size //= 2
    return size if padding and size >= CELL_SIZE else None


@without_autocast
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens_host: list[int],
    query_lens: list[int],
    page_size: int,
    window_size: int | None,
    scale: float,
) -> torch.Tensor:
    longest_q = max(query_lens, default=0)
    decodes = len(query_lens) if longest_q <= _LONGEST_DECODE else 0
    batch = PagedBatch(
        block_table=table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        num_decodes=decodes,
        num_decode_tokens=q.shape[1] if decodes else 0,
        decode_query_len=longest_q if decodes else 1,
        max_query_len=longest_q,
        max_seq_len=table.shape[1] * page_size,
        seq_lens_host=tuple(seq_lens_host),
        query_lens_host=tuple(query_lens),
    )
    fits = 64 % page_size == 0 or page_size % 64 == 0
    policy = SelectionPolicy(window_size=window_size, sel_block_size=64 if fits else page_size)
    caches = [x[0, : x.shape[1] // page_size * page_size] for x in (k, v)]
    k_cache, v_cache = (x.unflatten(0, (-1, page_size)).transpose(1, 2) for x in caches)
    with torch.cuda.device_of(q):
        return paged_attention(q[0], k_cache, v_cache, batch, policy, softmax_scale=scale)[None]


# torch.compile sees an operator; eager calls save its microseconds.
_attend_compiled = torch.library.custom_op("sparsek::paged_bias_fwd", _attend, mutates_args=())
_attend_compiled.register_fake(lambda q, *_: new_like(q))


def paged_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: MaskPlan,
    segments: Segments,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """Output ``[1, N, Hq, Dv]`` for ``q [1, N, Hq, D]`` and ``k, v [1, M, Hkv, ...]``."""
    info, table = segments.k_info, segments.block_table
    if table is None:
        sequences, pages = len(info.seqlen_py), info.padding // page_size
        table = torch.arange(sequences * pages, dtype=torch.int32, device=q.device)
        table = table.view(sequences, pages)
    query_lens = [hi - lo for lo, hi in segments.query_intervals()]
    attend = _attend_compiled if torch.compiler.is_compiling() else _attend
    return attend(
        q, k, v, table, info.seqlen, segments.q_info.seqstart, list(info.seqlen_py), query_lens,
        page_size, plan.band.window_size, scale,
    )  # fmt: skip
