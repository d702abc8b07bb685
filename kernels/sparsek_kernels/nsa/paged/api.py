"""Native sparse attention over a paged KV cache, for prefill and decode.

A page holds K and V of the three branches for its tokens and, for each of its strides of
``cmp_stride`` tokens, the compressed key and value of the block that *ends* there.  Such a block
depends on this page and those before it only, so sequences with the same prefix can share pages.
Keys of the compressed branch are unrotated; compressed keys are rotated by the position
of their block's first token, as in :class:`sparsek_backend.nn.NativeSparseAttention`.

Decodes run one vectorised step over all requests (Triton kernels on a GPU, which read nothing back
and can be captured in a CUDA graph); every other request gathers its own K and V and takes the
kernels of training.
"""

from __future__ import annotations

import math

import torch

from sparsek_kernels.checks import FLOAT_DTYPES, check_heads, check_scale, check_tensor
from sparsek_kernels.common.device import on_device
from sparsek_kernels.nsa import ops
from sparsek_kernels.nsa.api import nsa_compress
from sparsek_kernels.nsa.compress.rotary import rotate
from sparsek_kernels.nsa.paged import torch_path as paged_torch
from sparsek_kernels.nsa.paged.cache import Compression, NSAPages, check_paged_spec
from sparsek_kernels.nsa.paged.problem import PagedProblem
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.paged.api import paged_attention, write_kv
from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.policy import SelectionPolicy


def compress_new_blocks(
    pages: NSAPages, batch: PagedBatch, spec: NSASpec, compression: Compression
) -> None:
    """Store the compressed blocks that the new tokens of ``batch`` complete.

    The tokens themselves are in the pages already.  On a GPU decodes are left out: the kernels of
    their step compress.

    Args:
        pages: one layer's cache; ``k_cmp`` and ``v_cmp`` are written.
        batch: the requests; ``seq_lens_host`` is exact for those that are not decodes.
        spec: block sizes.
        compression: the layer's maps.
    """
    first = batch.num_decodes if pages.k_cmp.is_cuda else 0  # whose kernels compress
    if first == batch.num_requests:
        return
    request, block, slot_mapping = batch.derived(
        ("nsa blocks", spec, first, pages.page_size),
        lambda: _completed_blocks(batch, first, spec, pages.page_size),
    )
    if request.numel() == 0:
        return
    start = block * spec.cmp_stride
    token = start[:, None] + torch.arange(spec.cmp_block_size, device=start.device)  # [B, l]
    page = batch.block_table[request[:, None], token // pages.page_size].long()
    offset = token % pages.page_size
    keys, values = pages.k_raw[page, :, offset], pages.v_raw[page, :, offset]  # [B, l, Hkv, D]
    rope_freqs = compression.rope_freqs
    if rope_freqs is not None and compression.rotated_keys:
        keys = rotate(keys, -token, rope_freqs)
    k_cmp, v_cmp = nsa_compress(
        keys,
        values,
        phi_k=compression.phi_k,
        phi_v=compression.phi_v,
        cmp_block_size=spec.cmp_block_size,
        cmp_stride=spec.cmp_stride,
    )
    if rope_freqs is not None:
        k_cmp = rotate(k_cmp, start[:, None], rope_freqs)
    write_kv(k_cmp[:, 0], v_cmp[:, 0], pages.k_cmp, pages.v_cmp, None, slot_mapping)


def _completed_blocks(
    batch: PagedBatch, first: int, spec: NSASpec, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Request, index and ``slot_mapping`` of the blocks that requests from ``first`` on complete.

    All three are int64.  A block's slot is ``page * blocks_per_page + place in the page``.
    """
    lengths, counts = host_lengths(batch)
    rows = [
        (request, block)
        for request in range(first, batch.num_requests)
        for block in range(
            spec.num_compressed(lengths[request] - counts[request]),
            spec.num_compressed(lengths[request]),
        )
    ]
    table = batch.block_table
    pairs = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
    request, block = on_device(pairs, torch.int64, table.device).unbind(1)
    per_page = page_size // spec.cmp_stride
    row = block + spec.strides_per_cmp - 1
    return request, block, table[request, row // per_page].long() * per_page + row % per_page


def nsa_paged_attention(
    q: torch.Tensor,
    pages: NSAPages,
    batch: PagedBatch,
    spec: NSASpec,
    compression: Compression,
    *,
    window_size: int,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The three branches for the new tokens of ``batch``, before the gates.

    The new tokens are in the pages already (:func:`sparsek_kernels.write_kv`); the blocks that they
    complete are compressed first.

    Args:
        q: ``[T, Hq, D]``, fp16/bf16/fp32, rotated; requests packed in the order of ``batch``.
        pages: one layer's cache; ``k_cmp`` and ``v_cmp`` are written.
        batch: the requests; ``seq_lens_host`` is exact for those that are not decodes.
        spec: block sizes and counts (:func:`check_paged_spec`).
        compression: the layer's maps.
        window_size: tokens of the sliding branch, the query's own included.
        softmax_scale: default ``D ** -0.5``.
        out: ``[T, 3, Hq, D]``, written and returned.

    Returns:
        ``[T, 3, Hq, D]``: compressed, selected and sliding attention.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    pages.check()
    heads, dim = pages.num_kv_heads, pages.k_slc.shape[3]
    check_tensor("q", q, ("T", "Hq", dim), FLOAT_DTYPES, pages.k_slc.device)
    check_heads(q.shape[1], heads)
    check_paged_spec(spec, pages.page_size)
    if out is None:
        out = q.new_empty((q.shape[0], 3, *q.shape[1:]))
    check_tensor("out", out, (q.shape[0], 3, *q.shape[1:]), (q.dtype,), q.device)
    scale = check_scale(softmax_scale, dim)
    policy = SelectionPolicy(window_size=window_size, sel_block_size=math.gcd(pages.page_size, 64))
    compress_new_blocks(pages, batch, spec, compression)
    problem = PagedProblem(q, pages, batch, spec, compression, window_size, scale)
    rest = batch
    if batch.num_decodes and q.is_cuda:
        from sparsek_kernels.nsa.paged import launch as launch_paged

        launch_paged.decode(problem, out)
        rest = batch.part(batch.num_decodes, batch.num_requests)
    elif batch.num_decodes:
        paged_torch.decode(problem, out)
    if rest.num_requests:
        paged_attention(
            q, pages.k_swa, pages.v_swa, rest, policy, softmax_scale=scale, out=out[:, 2]
        )
    if batch.num_prefills:
        lengths, counts = host_lengths(batch)
        token = batch.first_row + sum(counts[: batch.num_decodes])
        for request in range(batch.num_decodes, batch.num_requests):
            rows = slice(token, token + counts[request])
            if counts[request]:
                _prefill(problem, out[rows], rows, request, lengths[request])
            token = rows.stop
    return out


def _prefill(
    problem: PagedProblem, out: torch.Tensor, rows: slice, request: int, length: int
) -> None:
    """Compressed and selected branch of tokens ``rows``, the last of a request's ``length``."""
    pages, spec, table = problem.pages, problem.spec, problem.batch.block_table[request]
    hidden = spec.strides_per_cmp - 1  # first rows of a sequence, in which no block ends
    rows_cmp = length // spec.cmp_stride  # fewer than hidden where no block has ended
    k_cmp, v_cmp = (_gather(x, table, rows_cmp)[:, hidden:] for x in (pages.k_cmp, pages.v_cmp))
    k, v = (_gather(x, table, length) for x in (pages.k_slc, pages.v_slc))
    _attend_sequence(out, problem.q[rows], (k, v), (k_cmp, v_cmp), spec, problem.softmax_scale)


def _attend_sequence(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    kv_cmp: tuple[torch.Tensor, torch.Tensor],
    spec: NSASpec,
    scale: float,
) -> None:
    """The last tokens of a sequence over its gathered keys and values ``[1, M, Hkv, D]``."""
    q, length, fields = q[None], kv[0].shape[1], spec.as_list()
    found, lse = ops.compressed_fwd(q, *kv_cmp, length, None, fields, scale)
    out[:, 0] = found[0]
    chosen = ops.select(q, kv_cmp[0], lse, length, None, fields, scale)
    found, *_ = ops.selected_fwd(q, *kv, chosen, None, spec.sel_block_size, scale)
    out[:, 1] = found[0]


def dummy_run(q: torch.Tensor, num_kv_heads: int, length: int, spec: NSASpec) -> None:
    """Allocate as much memory as prefilling ``q`` at the end of ``length`` tokens, and free it.

    A server that measures its memory before it serves then leaves room for prefills.  The kernels
    are compiled on the way.

    Args:
        q: ``[T, Hq, D]`` of any values; the last of ``length`` tokens.
        num_kv_heads: KV heads.
        length: longest sequence.
        spec: block sizes and counts.
    """
    q, dim = q[:length], q.shape[2]
    k, v = (q.new_zeros(1, length, num_kv_heads, dim) for _ in range(2))
    rows = spec.num_compressed(length)
    k_cmp, v_cmp = (q.new_zeros(1, rows, num_kv_heads, dim) for _ in range(2))
    out = q.new_empty((q.shape[0], 2, *q.shape[1:]))
    _attend_sequence(out, torch.zeros_like(q), (k, v), (k_cmp, v_cmp), spec, dim**-0.5)


def _gather(cache: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    """First ``count`` rows of a sequence as ``[1, count, Hkv, D]``.

    Args:
        cache: ``[pages, Hkv, rows per page, D]``.
        table: ``[max_pages]`` page table row.
    """
    used = table[: -(-count // cache.shape[2])].long()
    return cache.transpose(1, 2).index_select(0, used).flatten(0, 1)[None, :count]
