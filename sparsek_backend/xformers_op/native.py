"""Forward and backward passes of a mask plan on ``sink_flash_attention`` or
``block_sparse_attention``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from sparsek_backend.xformers_op.plan import Interval, MaskPlan, Segments
from sparsek_kernels import block_sparse_attention, sink_flash_attention
from sparsek_kernels.block_sparse.ops import block_sparse_bwd
from sparsek_kernels.sink_window.ops import sink_flash_bwd

_Selection = slice | torch.Tensor | None


@dataclass(frozen=True)
class KernelCall:
    """One kernel call on some query rows and some keys (``None``: all of them)."""

    causal: bool
    rows: _Selection = None
    keys: _Selection = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None


def kernel_calls(plan: MaskPlan, num_q: int, num_k: int) -> list[KernelCall]:
    """Calls whose query rows partition the queries.

    A top-left aligned causal mask equals the kernels' bottom-right one on as many keys as queries;
    queries past the last key see all keys, which is a second call without causality.
    """
    band, segments = plan.band, plan.segments
    if segments is not None:
        return _segment_calls(plan, segments)
    if not band.top_left or num_q == num_k:
        return [KernelCall(band.causal)]
    if num_q < num_k:
        return [KernelCall(True, keys=slice(0, num_q))]
    return [KernelCall(True, rows=slice(0, num_k)), KernelCall(False, rows=slice(num_k, num_q))]


def _segment_calls(plan: MaskPlan, segments: Segments) -> list[KernelCall]:
    band = plan.band
    if segments.packed_keys and (not band.top_left or segments.same_lengths):
        return [
            KernelCall(
                band.causal,
                cu_seqlens_q=segments.q_info.seqstart,
                cu_seqlens_k=segments.k_info.seqstart,
            )
        ]
    queries, keys = segments.query_intervals(), segments.key_intervals()
    device = segments.q_info.seqstart.device
    if not band.top_left:
        return [
            KernelCall(
                band.causal,
                keys=_key_index(segments, keys, device),
                cu_seqlens_q=segments.q_info.seqstart,
                cu_seqlens_k=_offsets(keys, device),
            )
        ]
    pairs = list(zip(queries, keys, strict=True))
    shared = [min(q_hi - q_lo, k_hi - k_lo) for (q_lo, q_hi), (k_lo, k_hi) in pairs]
    first_rows = [(q[0], q[0] + n) for q, n in zip(queries, shared, strict=True)]
    first_keys = [(k[0], k[0] + n) for k, n in zip(keys, shared, strict=True)]
    calls = [_call_on(True, first_rows, first_keys, device)]
    rest = [(q, k, n) for (q, k), n in zip(pairs, shared, strict=True) if q[1] - q[0] > n]
    if rest:
        rows = [(q[0] + n, q[1]) for q, _, n in rest]
        calls.append(_call_on(False, rows, [k for _, k, _ in rest], device))
    return calls


def _call_on(
    causal: bool, rows: list[Interval], keys: list[Interval], device: torch.device
) -> KernelCall:
    """A call on packed sequences, each of which attends with some rows to some keys."""
    index = _index(rows, device), _index(keys, device)
    return KernelCall(causal, *index, _offsets(rows, device), _offsets(keys, device))


def _offsets(intervals: Iterable[Interval], device: torch.device) -> torch.Tensor:
    ends = accumulate((hi - lo for lo, hi in intervals), initial=0)
    return torch.tensor(list(ends), dtype=torch.int32, device=device)


def _index(intervals: Iterable[Interval], device: torch.device) -> torch.Tensor:
    ranges = [torch.arange(lo, hi) for lo, hi in intervals]
    return torch.cat(ranges).to(device) if ranges else torch.arange(0, device=device)


def _key_index(segments: Segments, intervals: list[Interval], device: torch.device) -> torch.Tensor:
    """Rows of the key tensor that hold the sequences' keys, in order."""
    position = _index(intervals, device)
    if segments.block_table is None:
        return position
    lengths = torch.tensor([hi - lo for lo, hi in intervals], device=device)
    sequence = torch.arange(len(intervals), device=device)
    sequence = torch.repeat_interleave(sequence, lengths, output_size=position.shape[0])
    size = segments.page_size
    page = segments.block_table.to(torch.int64)[sequence, position // size]
    return page * size + position % size


def _take(x: torch.Tensor, selection: _Selection) -> torch.Tensor:
    if selection is None:
        return x
    if isinstance(selection, slice):
        return x[:, selection]
    return x.index_select(1, selection)


def _put(total: torch.Tensor, selection: _Selection, part: torch.Tensor) -> None:
    if isinstance(selection, torch.Tensor):
        total.index_copy_(1, selection, part)
    else:
        total[:, selection or slice(None)] = part


def _widen(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def native_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: MaskPlan, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[B, N, Hq, Dv]`` and log-sum-exp ``[B, Hq, N]`` (natural logarithm) of the kernels.

    Args:
        q: ``[B, N, Hq, D]``; k: ``[B, M, Hkv, D]``; v: ``[B, M, Hkv, Dv]``.
    """
    value_dim = v.shape[-1]
    width = max(q.shape[-1], value_dim)
    q, k, v = (_widen(x, width) for x in (q, k, v))
    if plan.pattern is not None:
        out, lse = block_sparse_attention(
            q, k, v, plan.pattern, causal=plan.band.causal, softmax_scale=scale, return_lse=True
        )
        return out[..., :value_dim], lse
    calls = kernel_calls(plan, q.shape[1], k.shape[1])
    if len(calls) == 1 and calls[0].rows is None:
        out, lse = _call(calls[0], q, k, v, plan, scale)
        return out[..., :value_dim], lse
    out = q.new_zeros(*q.shape[:3], width)
    lse = q.new_full((q.shape[0], q.shape[1], q.shape[2]), float("-inf"), dtype=torch.float32)
    for call in calls:
        part, part_lse = _call(call, q, k, v, plan, scale)
        _put(out, call.rows, part)
        _put(lse, call.rows, part_lse.transpose(1, 2))
    return out[..., :value_dim], lse.transpose(1, 2).contiguous()


def _call(
    call: KernelCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: MaskPlan,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    found = sink_flash_attention(
        _take(q, call.rows),
        _take(k, call.keys),
        _take(v, call.keys),
        num_sink=plan.band.num_sink if call.causal else 0,
        window_size=plan.band.window_size if call.causal else None,
        causal=call.causal,
        softmax_scale=scale,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        return_lse=True,
    )
    return found[0], found[1]


def native_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: MaskPlan,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, shaped as they are, from what the forward pass left.

    Args:
        dout and out: ``[B, N, Hq, Dv]``; lse: ``[B, Hq, N]``; q, k, v as in the forward.
    """
    dims = tuple(x.shape[-1] for x in (q, k, v))
    width = max(dims)
    q, k, v, out, dout = (_widen(x, width) for x in (q, k, v, out, dout))
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    calls = [] if plan.pattern is not None else kernel_calls(plan, q.shape[1], k.shape[1])
    whole = len(calls) == 1 and calls[0].rows is None and calls[0].keys is None
    if plan.pattern is not None:
        dq, dk, dv = block_sparse_bwd(
            dout, None, q, k, v, out, lse, *plan.pattern.indices, plan.pattern.block_size,
            plan.band.causal, scale,
        )  # fmt: skip
    elif whole:
        dq, dk, dv = _call_backward(calls[0], dout, q, k, v, out, lse, plan, scale)
    else:
        dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        for call in calls:
            parts = _call_backward(call, dout, q, k, v, out, lse, plan, scale)
            _put(dq, call.rows, parts[0])
            for total, part in ((dk, parts[1]), (dv, parts[2])):
                _put(total, call.keys, _take(total, call.keys) + part)
        dk, dv = dk.to(k.dtype), dv.to(v.dtype)
    return dq[..., : dims[0]], dk[..., : dims[1]], dv[..., : dims[2]]


def _call_backward(
    call: KernelCall,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: MaskPlan,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, keys = call.rows, call.keys
    part_lse = lse
    if rows is not None:
        part_lse = _take(lse.transpose(1, 2), rows).transpose(1, 2).contiguous()
    window = plan.band.window_size if call.causal else None
    dq, dk, dv, _ = sink_flash_bwd(
        _take(dout, rows), None, _take(q, rows), _take(k, keys), _take(v, keys), _take(out, rows),
        part_lse, None, call.cu_seqlens_q, call.cu_seqlens_k,
        plan.band.num_sink if window is not None else 0, window, call.causal, scale,
    )  # fmt: skip
    return dq, dk, dv
