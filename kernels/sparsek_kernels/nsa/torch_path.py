"""Native sparse attention in torch operations, for CPU tensors and for fp64.

Queries are handled some at a time, so that nothing of size tokens x keys is held, and gradients
are written out rather than recorded.  Half-precision inputs are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sparsek_kernels.common import torch_attention
from sparsek_kernels.common.operators import new_like, new_lse
from sparsek_kernels.common.precision import compute_dtype, row_sums, softmax_, without_autocast
from sparsek_kernels.common.torch_attention import Part
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.sequences import Span, spans
from sparsek_kernels.nsa.spec import NSASpec

_CHUNK_ELEMENTS = 1 << 22  # elements of the largest intermediate, whatever the shapes


def _chunks(rows: slice, per_row: int) -> Iterator[slice]:
    step = max(_CHUNK_ELEMENTS // max(per_row, 1), 1)
    for lo in range(rows.start, rows.stop, step):
        yield slice(lo, min(lo + step, rows.stop))


def _position(rows: slice, span: Span, device: torch.device) -> torch.Tensor:
    """Position of each query row within its sequence."""
    first = (span.keys.stop - span.keys.start) - span.rows.stop
    position: torch.Tensor = torch.arange(rows.start, rows.stop, device=device) + first
    return position


def mean_pool_forward(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
) -> None:
    """Fill each ``[B, C, Hkv, D]`` of ``outs`` with the means of compressed blocks of ``xs``."""
    size, stride = spec.cmp_block_size, spec.cmp_stride
    for x, out in zip(xs, outs, strict=True):
        out.zero_()
        for span in spans(cu_seqlens, x.shape[0], x.shape[1], x.shape[1], size, stride):
            if span.compressed.stop > span.compressed.start:
                tokens = x[span.batch, span.keys].to(compute_dtype(x.dtype))
                means = tokens.unfold(0, size, stride).mean(dim=-1)
                out[span.batch, span.compressed] = means.to(out.dtype)


def mean_pool_backward(
    douts: Sequence[torch.Tensor],
    dxs: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
) -> None:
    """Fill each ``[B, M, Hkv, D]`` of ``dxs``: a block's gradient is divided among its tokens."""
    size, stride = spec.cmp_block_size, spec.cmp_stride
    for dout, dx in zip(douts, dxs, strict=True):
        compute = compute_dtype(dout.dtype)
        total = torch.zeros(dx.shape, dtype=compute, device=dx.device)
        for span in spans(cu_seqlens, dx.shape[0], dx.shape[1], dx.shape[1], size, stride):
            count = span.compressed.stop - span.compressed.start
            if count == 0:
                continue
            part = dout[span.batch, span.compressed].to(compute) / size
            for token in range(size):
                first = span.keys.start + token
                total[span.batch, first : first + (count - 1) * stride + 1 : stride] += part
        dx.copy_(total)


def _hidden_blocks(problem: CompressedProblem, rows: slice, span: Span) -> torch.Tensor:
    """``[n, C]`` bool: blocks that are not all in a query's past."""
    count, device = span.compressed.stop - span.compressed.start, problem.q.device
    stride, size = problem.spec.cmp_stride, problem.spec.cmp_block_size
    last = torch.arange(count, device=device) * stride + size - 1
    return last > _position(rows, span, device)[:, None]


def _compressed_chunks(problem: CompressedProblem) -> Iterator[tuple[Span, slice]]:
    q, spec = problem.q, problem.spec
    for span in spans(
        problem.cu_seqlens, q.shape[0], q.shape[1], problem.seq_len, spec.cmp_block_size,
        spec.cmp_stride,
    ):  # fmt: skip
        width = span.compressed.stop - span.compressed.start
        for rows in _chunks(span.rows, q.shape[2] * max(width, 1)):
            yield span, rows


def _compressed_parts(problem: CompressedProblem) -> Iterator[Part]:
    for span, rows in _compressed_chunks(problem):
        if span.compressed.stop > span.compressed.start:
            hidden = _hidden_blocks(problem, rows, span)
            yield Part(slice(span.batch, span.batch + 1), rows, span.compressed, hidden)


@without_autocast
def compressed_forward(problem: CompressedProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]`` of the compressed branch."""
    inputs, parts = (problem.q, problem.k_cmp, problem.v_cmp), _compressed_parts(problem)
    torch_attention.forward(*inputs, parts, problem.softmax_scale, out, lse)


@without_autocast
def compressed_backward(
    problem: CompressedProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k_cmp and v_cmp."""
    inputs, parts = (problem.q, problem.k_cmp, problem.v_cmp), _compressed_parts(problem)
    scale, delta = problem.softmax_scale, row_sums(dout, out, dlse)
    return torch_attention.backward(*inputs, parts, scale, dout, (lse, delta))


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
    spec, k_cmp, by_row = problem.spec, problem.k_cmp, lse.transpose(1, 2)[..., None]
    for span, rows in _compressed_chunks(problem):
        num_blocks = spec.num_selectable(span.keys.stop - span.keys.start)
        hidden = _hidden_blocks(problem, rows, span)
        part = Part(slice(span.batch, span.batch + 1), rows, span.compressed, hidden)
        heads, norm = (part.queries(x, k_cmp) for x in (problem.q, by_row))
        probs, _ = softmax_(part.scores(heads, part.key_rows(k_cmp), problem.softmax_scale), norm)
        mass = probs[0].unflatten(1, (-1, rows.stop - rows.start)).sum(1)  # [Hkv, n, C]
        own = _position(rows, span, lse.device)[:, None] // spec.sel_block_size
        best = best_blocks(fold_scores(mass, num_blocks, spec), own, spec)
        block_indices[span.batch, rows, :, : best.shape[-1]] = best.transpose(0, 1).int()


def attend_and_select(
    problem: CompressedProblem, out: torch.Tensor, lse: torch.Tensor, block_indices: torch.Tensor
) -> None:
    """Fill ``out`` and ``lse`` of compressed attention, and the blocks that follow from it."""
    compressed_forward(problem, out, lse)
    select_forward(problem, lse, block_indices)


class _ChosenPart(Part):
    """Tokens as batch entries of one query, with ``keys [b, KV heads, keys]`` of their own."""

    def key_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, KV heads, keys, D]`` of ``x [1, M, Hkv, D]``."""
        return x[0, self.keys, _heads(x)].to(compute_dtype(x.dtype))

    def add(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``x [b, KV heads, keys, D]``, where keys may come again, to ``total``."""
        where = (self.keys, _heads(total).expand(x.shape[:3]))
        total[0].index_put_(where, x, accumulate=True)  # type: ignore[arg-type]


def _heads(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[2], device=x.device)[:, None]


def _selected_parts(problem: SelectedProblem, batch: int) -> Iterator[Part]:
    """Some tokens of a batch entry at a time.

    A key that is not visible is replaced by the sequence's first key; block -1 has no visible key.
    """
    shape, size, device = problem.shape, problem.sel_block_size, problem.q.device
    ordered = problem.block_indices[batch].sort(dim=-1, descending=True).values
    within = torch.arange(size, device=device)
    for span in spans(problem.cu_seqlens, shape.batch, shape.num_q, shape.num_k):
        chosen = ordered[span.rows]
        width = int((chosen >= 0).sum(-1).max()) if chosen.numel() else 0
        if span.batch != batch or width == 0:
            continue
        for rows in _chunks(span.rows, shape.num_kv_heads * width * size * shape.head_dim):
            blocks = ordered[rows, :, :width].long()  # [n, Hkv, width]
            token = (blocks[..., None] * size + within).flatten(2)
            hidden = (token < 0) | (token > _position(rows, span, device)[:, None, None])
            keys = token.masked_fill(hidden, 0) + span.keys.start
            hidden = hidden.repeat_interleave(shape.group, dim=1)[:, :, None]
            yield _ChosenPart(rows, slice(0, 1), keys, hidden)


def _by_token(batch: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tokens of a batch entry as batch entries ``[N, 1, Hq, D]`` of one query: views."""
    return [x[batch][:, None] for x in tensors]


@without_autocast
def selected_forward(problem: SelectedProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]`` of attention inside chosen blocks."""
    for b in range(problem.shape.batch):
        q, into = _by_token(b, problem.q, out)
        pair = (problem.k[b : b + 1], problem.v[b : b + 1])
        parts, scale = _selected_parts(problem, b), problem.softmax_scale
        torch_attention.forward(q, *pair, parts, scale, into, lse[b].T[..., None])


@without_autocast
def selected_backward(
    problem: SelectedProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    delta = row_sums(dout, out, dlse)
    dq, dk, dv = (new_like(x) for x in (problem.q, problem.k, problem.v))
    for b in range(problem.shape.batch):
        q, upstream = _by_token(b, problem.q, dout)
        pair = (problem.k[b : b + 1], problem.v[b : b + 1])
        parts, scale = _selected_parts(problem, b), problem.softmax_scale
        sums = (lse[b].T[..., None], delta[b].T[..., None])
        by_token, dk[b : b + 1], dv[b : b + 1] = torch_attention.backward(
            q, *pair, parts, scale, upstream, sums
        )
        dq[b] = by_token[:, 0]
    return dq, dk, dv


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
