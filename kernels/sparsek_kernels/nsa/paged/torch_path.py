"""The decode step over pages in torch operations, for CPU tensors."""

from __future__ import annotations

import torch

from sparsek_kernels.nsa.paged.cache import NSAPages
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.nsa.torch_path import best_blocks, compute_dtype, fold_scores
from sparsek_kernels.paged.batch import PagedBatch, host_lengths

_GATHER_ELEMENTS = 1 << 24
"""Most elements of K gathered at once; larger batches are decoded in parts."""


def decode(
    out: torch.Tensor,
    q: torch.Tensor,
    pages: NSAPages,
    batch: PagedBatch,
    spec: NSASpec,
    scale: float,
) -> None:
    """Compressed and selected branch of the decodes: fills ``out[:, 0]`` and ``out[:, 1]``.

    Args:
        out: ``[T, 3, Hq, D]``.
        q: ``[T, Hq, D]``, the decodes' tokens.
    """
    request, position = batch.derived("nsa decodes", lambda: _tokens(batch))
    if not position.numel():
        return
    width = spec.num_compressed(int(position.max()) + 1)
    tokens = max(width, spec.top_n * spec.sel_block_size)
    step = max(_GATHER_ELEMENTS // (tokens * pages.k_slc.shape[1] * q.shape[2]), 1)
    for first in range(0, q.shape[0], step):
        rows = slice(first, first + step)
        table = batch.block_table[request[rows]].long()
        _decode(out[rows], q[rows], pages, table, position[rows], spec, scale)


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
    out: torch.Tensor,
    q: torch.Tensor,
    pages: NSAPages,
    table: torch.Tensor,
    position: torch.Tensor,
    spec: NSASpec,
    scale: float,
) -> None:
    heads = pages.k_slc.shape[1]
    queries = q.unflatten(1, (heads, -1)).to(compute_dtype(q.dtype)) * scale  # [T, Hkv, G, D]
    own = (position // spec.sel_block_size)[:, None, None]
    length = int(position.max()) + 1
    mass, found = _compressed(queries, pages, table, position, spec, spec.num_compressed(length))
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


def _compressed(
    queries: torch.Tensor,
    pages: NSAPages,
    table: torch.Tensor,
    position: torch.Tensor,
    spec: NSASpec,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities summed over the group ``[T, Hkv, C]``, and the output ``[T, Hkv, G, D]``."""
    per_page = pages.k_cmp.shape[2]
    block = torch.arange(width)
    cell = block + spec.cells_per_cmp - 1
    page = table[:, cell // per_page]  # [T, C]
    hidden = block * spec.cmp_stride + spec.cmp_block_size - 1 > position[:, None]  # [T, C]
    rows = (x[page, :, cell % per_page].transpose(1, 2) for x in (pages.k_cmp, pages.v_cmp))
    # Rows past a sequence's end may hold anything, NaN included.
    keys, values = (x.to(queries.dtype).masked_fill(hidden[:, None, :, None], 0.0) for x in rows)
    logits = torch.matmul(queries, keys.mT).masked_fill(hidden[:, None, None], float("-inf"))
    dead = hidden.all(-1)[:, None, None, None]
    probs = torch.softmax(logits, dim=-1).masked_fill(dead, 0.0)
    return probs.sum(2), torch.matmul(probs, values)
