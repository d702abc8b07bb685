"""The decode step over pages in torch operations, for CPU tensors."""

from __future__ import annotations

import torch

from sparsek_kernels.common.precision import compute_dtype
from sparsek_kernels.nsa.paged.problem import PagedProblem
from sparsek_kernels.nsa.torch_path import best_blocks, fold_scores
from sparsek_kernels.paged.batch import PagedBatch, host_lengths

_GATHER_ELEMENTS = 1 << 24
"""Most elements of K gathered at once; larger batches are decoded in parts."""


def decode(problem: PagedProblem, out: torch.Tensor) -> None:
    """Compressed and selected branch of the decodes: fills ``out[:, 0]`` and ``out[:, 1]``.

    ``out`` is ``[T, 3, Hq, D]``; only rows of decodes are written.
    """
    batch, pages, spec = problem.batch, problem.pages, problem.spec
    request, position = batch.derived("nsa decodes", lambda: _tokens(batch))
    if not position.numel():
        return
    width = spec.num_compressed(int(position.max()) + 1)
    tokens = max(width, spec.top_n * spec.sel_block_size)
    step = max(_GATHER_ELEMENTS // (tokens * pages.num_kv_heads * problem.q.shape[2]), 1)
    for first in range(0, batch.num_decode_tokens, step):
        rows = slice(first, min(first + step, batch.num_decode_tokens))
        table = batch.pages(pages.page_size)[request[rows]]
        _decode(problem, out[rows], rows, table, position[rows])


def _tokens(batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of every decoded token, ``[T]`` int64 each."""
    lengths, counts = host_lengths(batch)
    rows = [
        (request, position)
        for request in range(batch.num_decodes)
        for position in range(lengths[request] - counts[request], lengths[request])
    ]
    request, position = torch.tensor(rows, dtype=torch.int64).view(-1, 2).unbind(1)
    return request, position


def _decode(
    problem: PagedProblem,
    out: torch.Tensor,
    rows: slice,
    table: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """Tokens ``rows``, whose sequences have the page tables ``table [T, pages]``."""
    pages, spec, heads = problem.pages, problem.spec, problem.pages.num_kv_heads
    queries = problem.q[rows].unflatten(1, (heads, -1)).to(compute_dtype(problem.q.dtype))
    queries = queries * problem.softmax_scale  # [T, Hkv, G, D]
    own = (position // spec.sel_block_size)[:, None, None]
    length = int(position.max()) + 1
    mass, found = _attend_compressed(problem, queries, table, position)
    out[:, 0] = found.flatten(1, 2).to(out.dtype)
    scores = fold_scores(mass, spec.num_selectable(length), spec)
    chosen = best_blocks(scores, own, spec)  # [T, Hkv, n]
    token = chosen[..., None] * spec.sel_block_size + torch.arange(spec.sel_block_size)
    token = token.flatten(2)  # [T, Hkv, K]
    hidden = (token < 0) | (token > position[:, None, None])
    token = token.masked_fill(hidden, 0)
    page = table.unsqueeze(1).expand(-1, heads, -1).gather(2, token // pages.page_size)
    head = torch.arange(heads)[:, None]
    offset = token % pages.page_size
    keys, values = (x[page, head, offset].to(queries.dtype) for x in (pages.k_slc, pages.v_slc))
    logits = torch.matmul(queries, keys.mT).masked_fill(hidden[:, :, None], float("-inf"))
    found = torch.matmul(torch.softmax(logits, dim=-1), values)
    out[:, 1] = found.flatten(1, 2).to(out.dtype)


def _attend_compressed(
    problem: PagedProblem, queries: torch.Tensor, table: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities summed over the group ``[T, Hkv, C]``, and the output ``[T, Hkv, G, D]``."""
    pages, spec = problem.pages, problem.spec
    per_page = pages.k_cmp.shape[2]
    block = torch.arange(spec.num_compressed(int(position.max()) + 1))
    row = block + spec.strides_per_cmp - 1
    page = table[:, row // per_page]  # [T, C]
    hidden = block * spec.cmp_stride + spec.cmp_block_size - 1 > position[:, None]  # [T, C]
    # Rows past a sequence's end may hold anything, NaN included.
    keys, values = (
        x[page, :, row % per_page].transpose(1, 2).to(queries.dtype)
        .masked_fill(hidden[:, None, :, None], 0.0)
        for x in (pages.k_cmp, pages.v_cmp)
    )  # fmt: skip
    logits = torch.matmul(queries, keys.mT).masked_fill(hidden[:, None, None], float("-inf"))
    dead = hidden.all(-1)[:, None, None, None]
    probs = torch.softmax(logits, dim=-1).masked_fill(dead, 0.0)
    return probs.sum(2), torch.matmul(probs, values)
