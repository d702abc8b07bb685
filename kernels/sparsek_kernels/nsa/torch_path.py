"""Native sparse attention in torch operations, for CPU tensors and for fp64.

Queries are handled some at a time, so that nothing of size tokens x keys is held, and gradients
are written out rather than recorded.  Half-precision inputs are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sparsek_kernels.common.operators import new_lse
from sparsek_kernels.common.precision import compute_dtype, row_sums, softmax_, without_autocast
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.sequences import Span, spans
from sparsek_kernels.nsa.spec import NSASpec

_CHUNK_ELEMENTS = 1 << 22  # elements of the largest intermediate, whatever the shapes


def _chunks(rows: slice, per_row: int) -> Iterator[slice]:
    step = max(_CHUNK_ELEMENTS // max(per_row, 1), 1)
    for lo in range(rows.start, rows.stop, step):
        yield slice(lo, min(lo + step, rows.stop))


def _grouped(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``[n, Hq, D]`` as ``[n, Hkv, G, D]`` in the compute dtype."""
    return torch.unflatten(x, 1, (num_kv_heads, -1)).to(compute_dtype(x.dtype))


def _by_head(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``[n, Hq, D]`` as ``[Hkv, G, n, D]`` in the compute dtype."""
    return _grouped(x, num_kv_heads).permute(1, 2, 0, 3)


def _by_row(
    q: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What gradients need of each row, ``[B, N, Hq, D]`` or, of ``[B, Hq, N]``, ``D = 1``."""
    return q, dout, *(x.transpose(1, 2)[..., None] for x in (lse, delta))


def _position(rows: slice, span: Span, device: torch.device) -> torch.Tensor:
    """Position of each query row within its sequence."""
    first = (span.keys.stop - span.keys.start) - span.rows.stop
    position: torch.Tensor = torch.arange(rows.start, rows.stop, device=device) + first
    return position


@without_autocast
def mean_pool_forward(
    x: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None, spec: NSASpec
) -> None:
    """Fill ``out [B, C, Hkv, D]`` with the means of the compressed blocks of ``x``."""
    out.zero_()
    size, stride = spec.cmp_block_size, spec.cmp_stride
    for span in spans(cu_seqlens, x.shape[0], x.shape[1], x.shape[1], size, stride):
        if span.compressed.stop > span.compressed.start:
            tokens = x[span.batch, span.keys].to(compute_dtype(x.dtype))
            means = tokens.unfold(0, size, stride).mean(dim=-1)
            out[span.batch, span.compressed] = means.to(out.dtype)


@without_autocast
def mean_pool_backward(
    dout: torch.Tensor, dx: torch.Tensor, cu_seqlens: torch.Tensor | None, spec: NSASpec
) -> None:
    """Fill ``dx [B, M, Hkv, D]``: each block's gradient, divided among its tokens."""
    compute = compute_dtype(dout.dtype)
    total = torch.zeros(dx.shape, dtype=compute, device=dx.device)
    size, stride = spec.cmp_block_size, spec.cmp_stride
    for span in spans(cu_seqlens, dx.shape[0], dx.shape[1], dx.shape[1], size, stride):
        count = span.compressed.stop - span.compressed.start
        if count == 0:
            continue
        part = dout[span.batch, span.compressed].to(compute) / size
        for token in range(size):
            first = span.keys.start + token
            total[span.batch, first : first + (count - 1) * stride + 1 : stride] += part
    dx.copy_(total)


def _compressed_scores(problem: CompressedProblem, rows: slice, span: Span) -> torch.Tensor:
    """``[Hkv, G, n, C]`` scores, ``-inf`` where the block is not all in the past."""
    q, k_cmp, spec = problem.q, problem.k_cmp, problem.spec
    keys = k_cmp[span.batch, span.compressed].to(compute_dtype(q.dtype))
    heads = _by_head(q[span.batch, rows], k_cmp.shape[2])
    scores = torch.matmul(heads, keys.permute(1, 2, 0)[:, None]) * problem.softmax_scale
    last = torch.arange(keys.shape[0], device=q.device) * spec.cmp_stride + spec.cmp_block_size - 1
    hidden = last[None] > _position(rows, span, q.device)[:, None]
    return scores.masked_fill_(hidden, float("-inf"))


def _compressed_chunks(problem: CompressedProblem) -> Iterator[tuple[Span, slice]]:
    q, spec = problem.q, problem.spec
    for span in spans(
        problem.cu_seqlens, q.shape[0], q.shape[1], problem.seq_len, spec.cmp_block_size,
        spec.cmp_stride,
    ):  # fmt: skip
        width = span.compressed.stop - span.compressed.start
        for rows in _chunks(span.rows, q.shape[2] * max(width, 1)):
            yield span, rows


@without_autocast
def compressed_forward(problem: CompressedProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]`` of the compressed branch."""
    out.zero_()
    lse.fill_(float("-inf"))
    for span, rows in _compressed_chunks(problem):
        if span.compressed.stop == span.compressed.start:
            continue
        scores = _compressed_scores(problem, rows, span)
        probs, total = softmax_(scores)
        values = problem.v_cmp[span.batch, span.compressed].to(scores.dtype).transpose(0, 1)
        found = torch.matmul(probs, values[:, None])  # [Hkv, G, n, D]
        out[span.batch, rows] = found.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
        lse[span.batch, :, rows] = total[..., 0].flatten(0, 1).to(lse.dtype)


@without_autocast
def compressed_backward(
    problem: CompressedProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k_cmp and v_cmp."""
    q, k_cmp, v_cmp = problem.q, problem.k_cmp, problem.v_cmp
    compute = compute_dtype(q.dtype)
    num_kv_heads = k_cmp.shape[2]
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=compute, device=q.device) for x in (k_cmp, v_cmp))
    by_row = _by_row(q, dout, lse, row_sums(dout, out, dlse))
    for span, rows in _compressed_chunks(problem):
        if span.compressed.stop == span.compressed.start:
            continue
        heads, upstream, row_lse, row_delta = (
            _by_head(x[span.batch, rows], num_kv_heads) for x in by_row
        )
        probs, _ = softmax_(_compressed_scores(problem, rows, span), row_lse)
        keys, values = (
            x[span.batch, span.compressed].to(compute).transpose(0, 1)[:, None]
            for x in (k_cmp, v_cmp)
        )
        dscores = torch.matmul(upstream, values.transpose(2, 3)).sub_(row_delta)
        dscores.mul_(probs).mul_(problem.softmax_scale)
        found = torch.matmul(dscores, keys)
        dq[span.batch, rows] = found.permute(2, 0, 1, 3).flatten(1, 2).to(dq.dtype)
        part_k = torch.matmul(dscores.transpose(2, 3), heads).sum(1)
        part_v = torch.matmul(probs.transpose(2, 3), upstream).sum(1)
        dk[span.batch, span.compressed] += part_k.transpose(0, 1)
        dv[span.batch, span.compressed] += part_v.transpose(0, 1)
    return dq, dk.to(k_cmp.dtype), dv.to(v_cmp.dtype)


def fold_scores(mass: torch.Tensor, num_blocks: int, spec: NSASpec) -> torch.Tensor:
    """``[..., C]`` probabilities to ``[..., num_blocks]`` block scores (equation 9).

    A compressed block that starts in selection block ``j`` shares all of its strides with ``j``
    but the ones that spill into ``j + 1``.
    """
    per_block = spec.strides_per_sel
    missing = num_blocks * per_block - mass.shape[-1]
    by_block = torch.nn.functional.pad(mass, (0, missing)).unflatten(-1, (num_blocks, per_block))
    start = torch.arange(per_block, device=mass.device)
    spill = (start + spec.strides_per_cmp - per_block).clamp(min=0).to(mass.dtype)
    spilled = (by_block * spill).sum(-1)
    own = (by_block * (spec.strides_per_cmp - spill)).sum(-1)
    scores: torch.Tensor = own + torch.nn.functional.pad(spilled[..., :-1], (1, 0))
    return scores


def best_blocks(scores: torch.Tensor, own: torch.Tensor, spec: NSASpec) -> torch.Tensor:
    """Forced blocks and those with the best ``scores [..., J]``: ascending, ``-1`` after the last.

    ``own [..., 1]`` is the block of the query; at most ``top_n`` indices come out.
    """
    num_blocks = scores.shape[-1]
    block = torch.arange(num_blocks, device=scores.device)
    forced = (block < spec.num_init_blocks) | (block > own - spec.num_local_blocks)
    ranked = scores.masked_fill(forced, float("inf")).masked_fill(block > own, -1.0)
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    best = order[..., : spec.top_n]
    best = best.masked_fill(best > own, num_blocks).sort(dim=-1).values
    return best.masked_fill(best == num_blocks, -1)


@without_autocast
def select_forward(
    problem: CompressedProblem, lse: torch.Tensor, block_indices: torch.Tensor
) -> None:
    """Fill ``block_indices [B, N, Hkv, top_n]``: ascending, ``-1`` after the last."""
    block_indices.fill_(-1)
    spec, num_kv_heads = problem.spec, problem.k_cmp.shape[2]
    for span, rows in _compressed_chunks(problem):
        num_blocks = spec.num_selectable(span.keys.stop - span.keys.start)
        scores = _compressed_scores(problem, rows, span)
        norm = lse[span.batch, :, rows].to(scores.dtype).unflatten(0, (num_kv_heads, -1))
        mass = softmax_(scores, norm[..., None])[0].sum(1)  # [Hkv, n, C]
        own = _position(rows, span, lse.device)[:, None] // spec.sel_block_size
        best = best_blocks(fold_scores(mass, num_blocks, spec), own, spec)
        block_indices[span.batch, rows, :, : best.shape[-1]] = best.transpose(0, 1).int()


def attend_and_select(
    problem: CompressedProblem, out: torch.Tensor, lse: torch.Tensor, block_indices: torch.Tensor
) -> None:
    """Fill ``out`` and ``lse`` of compressed attention, and the blocks that follow from it."""
    compressed_forward(problem, out, lse)
    select_forward(problem, lse, block_indices)


def _selected_chunks(
    problem: SelectedProblem,
) -> Iterator[tuple[Span, slice, torch.Tensor, torch.Tensor]]:
    """Spans, query rows, their chosen keys ``[n, Hkv, K]``, and a mask of the visible ones.

    A key that is not visible is replaced by the sequence's first key; block -1 has no visible key.
    """
    shape, size, device = problem.shape, problem.sel_block_size, problem.q.device
    ordered = problem.block_indices.sort(dim=-1, descending=True).values
    within = torch.arange(size, device=device)
    for span in spans(problem.cu_seqlens, shape.batch, shape.num_q, shape.num_k):
        chosen = ordered[span.batch, span.rows]
        width = int((chosen >= 0).sum(-1).max()) if chosen.numel() else 0
        if width == 0:
            continue
        for rows in _chunks(span.rows, shape.num_kv_heads * width * size * shape.head_dim):
            blocks = ordered[span.batch, rows, :, :width].long()  # [n, Hkv, width]
            token = (blocks[..., None] * size + within).flatten(2)
            visible = (token >= 0) & (token <= _position(rows, span, device)[:, None, None])
            yield span, rows, token.masked_fill(~visible, 0) + span.keys.start, visible


def _gather(x: torch.Tensor, batch: int, token: torch.Tensor) -> torch.Tensor:
    """Rows of ``x [B, M, Hkv, D]`` as ``[n, Hkv, K, D]`` in the compute dtype."""
    head = torch.arange(x.shape[2], device=x.device)[None, :, None]
    return x[batch][token, head].to(compute_dtype(x.dtype))


def _selected_scores(
    problem: SelectedProblem, heads: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """``[n, Hkv, G, K]`` scores, ``-inf`` where a key is not visible."""
    scores = torch.matmul(heads, keys.transpose(2, 3)).mul_(problem.softmax_scale)
    return scores.masked_fill_(~visible[:, :, None], float("-inf"))


@without_autocast
def selected_forward(problem: SelectedProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]`` of attention inside chosen blocks."""
    out.zero_()
    lse.fill_(float("-inf"))
    q, k, v, num_kv_heads = problem.q, problem.k, problem.v, problem.shape.num_kv_heads
    for span, rows, token, visible in _selected_chunks(problem):
        heads = _grouped(q[span.batch, rows], num_kv_heads)
        keys = _gather(k, span.batch, token)
        probs, total = softmax_(_selected_scores(problem, heads, keys, visible))
        found = torch.matmul(probs, _gather(v, span.batch, token))
        out[span.batch, rows] = found.flatten(1, 2).to(out.dtype)
        lse[span.batch, :, rows] = total.flatten(1).T.to(lse.dtype)


@without_autocast
def selected_backward(
    problem: SelectedProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    q, k, v = problem.q, problem.k, problem.v
    compute, num_kv_heads = compute_dtype(q.dtype), problem.shape.num_kv_heads
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=compute, device=q.device) for x in (k, v))
    by_row = _by_row(q, dout, lse, row_sums(dout, out, dlse))
    for span, rows, token, visible in _selected_chunks(problem):
        heads, upstream, row_lse, row_delta = (
            _grouped(x[span.batch, rows], num_kv_heads) for x in by_row
        )
        keys, values = (_gather(x, span.batch, token) for x in (k, v))
        probs, _ = softmax_(_selected_scores(problem, heads, keys, visible), row_lse)
        dscores = torch.matmul(upstream, values.transpose(2, 3)).sub_(row_delta)
        dscores.mul_(probs).mul_(problem.softmax_scale)
        dq[span.batch, rows] = torch.matmul(dscores, keys).flatten(1, 2).to(dq.dtype)
        head = torch.arange(num_kv_heads, device=q.device)[None, :, None].expand_as(token)
        for total, part in (
            (dk, torch.matmul(dscores.transpose(2, 3), heads)),
            (dv, torch.matmul(probs.transpose(2, 3), upstream)),
        ):
            total[span.batch].index_put_((token, head), part, accumulate=True)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def gated_forward(
    out: torch.Tensor, outs: Sequence[torch.Tensor], gates: Sequence[torch.Tensor]
) -> None:
    """Fill ``out [B, N, Hq, D]`` with the sum of ``gates [B, N, Hq]`` times ``outs``."""
    compute = compute_dtype(out.dtype)
    total = torch.zeros(out.shape, dtype=compute, device=out.device)
    for branch, gate in zip(outs, gates, strict=True):
        total += branch.to(compute) * gate.to(compute)[..., None]
    out.copy_(total)


def selected_gated(
    problem: SelectedProblem,
    out: torch.Tensor,
    others: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
) -> None:
    """Fill ``out`` with the gated sum of ``others``, compressed and sliding, and this branch."""
    out_slc = torch.empty_like(out)
    selected_forward(problem, out_slc, new_lse(problem.q))
    gated_forward(out, (others[0], out_slc, others[1]), gates)


def gated_backward(
    douts: Sequence[torch.Tensor],
    dgates: Sequence[torch.Tensor],
    dout: torch.Tensor,
    outs: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
) -> None:
    """Fill the gradients of ``outs`` and of ``gates``."""
    upstream = dout.to(compute_dtype(dout.dtype))
    for i, gate in enumerate(gates):
        douts[i].copy_(upstream * gate.to(upstream.dtype)[..., None])
        dgates[i].copy_((upstream * outs[i].to(upstream.dtype)).sum(-1))
