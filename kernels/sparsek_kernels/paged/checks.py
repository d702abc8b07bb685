"""Checks of what the paged operations are called with."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch

from sparsek_kernels.checks import check_tensor
from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy, StepPolicy
from sparsek_kernels.paged.sample import CELL_BITS


def check_cache_dtype(
    k_cache: torch.Tensor, dtype: torch.dtype, k_scale: float, v_scale: float = 1.0
) -> None:
    if k_cache.dtype == dtype:
        if k_scale != 1.0 or v_scale != 1.0:
            raise ValueError(
                f"k_scale, v_scale: expected 1.0 for a {dtype} cache, got {k_scale} and {v_scale}"
            )
        return
    if k_cache.dtype != torch.float8_e4m3fn:
        raise TypeError(
            f"k_cache: expected the dtype of q, {dtype}, or float8_e4m3fn, got {k_cache.dtype}"
        )
    if not k_cache.is_cuda:
        raise NotImplementedError(f"k_cache: fp8 caches need a GPU; on a CPU use {dtype}")
    if torch.cuda.get_device_capability(k_cache.device) < (8, 9):
        raise NotImplementedError(f"k_cache: fp8 caches need sm_89 or later; use {dtype}")


def check_triton_layout(**tensors: torch.Tensor | None) -> None:
    """The Triton kernels read rows as whole runs of memory, K and V of one width."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise NotImplementedError(
                f"{name}: on a GPU the last dimension must be contiguous, got strides "
                f"{tuple(tensor.stride())}; pass {name}.contiguous()"
            )
    k_cache, v_cache = tensors.get("k_cache"), tensors.get("v_cache")
    if k_cache is not None and v_cache is not None and v_cache.shape[-1] != k_cache.shape[-1]:
        raise NotImplementedError(
            f"v_cache: on a GPU V must be as wide as K, {k_cache.shape[-1]}, got "
            f"{v_cache.shape[-1]}; pad V with zeros"
        )


def check_batch_layout(batch: PagedBatch) -> None:
    """:func:`check_triton_layout` of a batch's own tensors, once for all layers."""
    batch.derived(
        "layout",
        lambda: check_triton_layout(
            block_table=batch.block_table, seq_lens=batch.seq_lens, cu_seqlens_q=batch.cu_seqlens_q
        ),
    )


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor | None = None) -> tuple[int, int, int]:
    check_tensor("k_cache", k_cache, ("num_pages", "Hkv", "page_size", "D"))
    pages, heads, page_size, dim = k_cache.shape
    if v_cache is not None:
        shape = (pages, heads, page_size, "Dv")
        check_tensor("v_cache", v_cache, shape, (k_cache.dtype,), k_cache.device)
    return heads, page_size, dim


def check_summary(k_summary: torch.Tensor, k_cache: torch.Tensor, least: int) -> None:
    """Check what pages keep for an indexer: ``least`` bytes or more for each page and KV head."""
    shape = (*k_cache.shape[:2], "bytes")
    check_tensor("k_summary", k_summary, shape, (torch.uint8,), k_cache.device)
    if k_summary.shape[2] < least:
        raise ValueError(
            f"k_summary: expected at least {least} bytes for each page and KV head, got "
            f"{k_summary.shape[2]}"
        )
    if k_summary.stride(2) != 1:
        raise ValueError(
            "k_summary: expected the bytes of a page and head side by side, "
            f"got strides {k_summary.stride()}"
        )


def check_context(batch: PagedBatch, policy: SelectionPolicy) -> None:
    """Check that lists can number the cells of the longest sequence, where cells are chosen."""
    most = policy.sel_block_size << CELL_BITS
    if policy.alignment and batch.max_seq_len > most:
        raise NotImplementedError(
            f"batch.max_seq_len: decoded tokens that choose by records have contexts of at most "
            f"{most} tokens, got {batch.max_seq_len}; use shorter ones, or another mode"
        )


def check_rotation(batch: PagedBatch, k_cache: torch.Tensor) -> None:
    """Check the rotation that learned rankings undo, where there is one."""
    rotation = batch.rotation
    if rotation is None:
        return
    shape = ("positions", k_cache.shape[3])
    check_tensor("batch.rotation", rotation, shape, (torch.float32,), k_cache.device)
    if not rotation.is_contiguous():
        raise ValueError(
            f"batch.rotation: expected a contiguous tensor, got strides {rotation.stride()}"
        )


def fit_pages(policy: SelectionPolicy, page_size: int) -> SelectionPolicy:
    """The policy, whose blocks and pages hold each other whole.

    A policy that selects no blocks attends the same keys whatever their size, so that theirs follow
    the pages.

    Raises:
        ValueError: selected blocks and pages do not nest, or no block fits the pages.
    """
    size = policy.sel_block_size
    if page_size % size == 0 or size % page_size == 0:
        return policy
    fitting = math.gcd(page_size, size)
    if policy.selects_blocks or fitting % CELL_SIZE:
        raise ValueError(
            f"page_size: expected a divisor or a multiple of sel_block_size={size}, or without "
            f"selected blocks a multiple of {CELL_SIZE}, got {page_size}"
        )
    return replace(policy, sel_block_size=fitting)


@lru_cache(maxsize=256)
def fit_both(policy: StepPolicy, page_size: int) -> StepPolicy:
    """Both phases' policies by :func:`fit_pages`; equal ones become one object."""
    prefill, decode = (fit_pages(one, page_size) for one in (policy.prefill, policy.decode))
    same = prefill is policy.prefill and decode is policy.decode
    return policy if same else StepPolicy(prefill, decode)


def check_batch(
    q: torch.Tensor, batch: PagedBatch, k_cache: torch.Tensor, *, shared: bool = False
) -> None:
    """Check once per batch what the host knows of it; no device is waited for.

    Other ranks may have pages of a ``shared`` cache: -1 stands for them.
    """
    if batch.query_lens_host is None and batch.cu_seqlens_q.device.type != "cpu":
        return
    pages, page_size = k_cache.shape[0], k_cache.shape[2]
    rows = batch.derived(
        ("rows", pages, page_size, shared),
        lambda: _checked_rows(batch, pages, page_size, -1 if shared else 0),
    )
    if q.shape[0] < rows:
        raise ValueError(
            f"q: expected at least {rows} rows, as many as batch has query tokens, got {q.shape[0]}"
        )


def _checked_rows(batch: PagedBatch, num_pages: int, page_size: int, first_page: int) -> int:
    """Rows of queries up to the batch's last one."""
    integers = (torch.int32, torch.int64)
    check_tensor("block_table", batch.block_table, ("R", "max_pages"), integers)
    check_tensor("seq_lens", batch.seq_lens, ("R",), integers)
    check_tensor("cu_seqlens_q", batch.cu_seqlens_q, ("R + 1",), integers)
    for name in ("prompt_left_host", "seq_lens_host"):
        given = getattr(batch, name)
        if given is not None and len(given) != batch.num_requests:
            raise ValueError(
                f"{name}: expected None, or a number for each of {batch.num_requests} requests, "
                f"got {len(given)}"
            )
    counts, lengths = batch.query_lens, batch.seq_lens_host
    if lengths is None and batch.seq_lens.device.type == "cpu":
        lengths, _ = host_lengths(batch)
    if lengths is not None:
        _check_requests(batch, lengths, page_size)
        if batch.block_table.device.type == "cpu":
            _check_block_table(batch, num_pages, page_size, first_page)
    return batch.first_row + sum(counts)


def _check_requests(batch: PagedBatch, lengths: tuple[int, ...], page_size: int) -> None:
    """Check the sizes of requests, and which of them decode, against each other."""
    requests, counts = len(lengths), batch.query_lens
    sizes = batch.block_table.shape[0], batch.cu_seqlens_q.shape[0] - 1, len(counts)
    if min(sizes) < requests:
        raise ValueError(
            f"seq_lens: expected no more requests than block_table, cu_seqlens_q and query_lens "
            f"have, which is {min(sizes)}, got {requests}"
        )
    if len(counts) > requests:
        raise ValueError(
            f"cu_seqlens_q, query_lens_host: expected {requests} requests, as many as seq_lens "
            f"has, got {len(counts)}"
        )
    room = batch.block_table.shape[1] * page_size
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if not count <= length <= room:
            raise ValueError(
                f"seq_lens: expected {count} (the new tokens) to {room} (the tokens of "
                f"{batch.block_table.shape[1]} pages) for request {request}, got {length}"
            )
    if not 0 <= batch.num_decodes <= requests:
        raise ValueError(f"num_decodes: expected 0 to {requests} requests, got {batch.num_decodes}")
    decodes = counts[: batch.num_decodes]
    tokens, padded = sum(decodes), len(decodes) == requests  # decodes alone may end in padding
    if batch.num_decode_tokens != tokens and not (padded and batch.num_decode_tokens > tokens):
        raise ValueError(
            f"num_decode_tokens: expected {tokens}, the query tokens of {len(decodes)} decodes, "
            f"got {batch.num_decode_tokens}"
        )
    longest = max(decodes, default=0)
    if batch.decode_query_len < longest:
        raise ValueError(
            f"decode_query_len: expected at least {longest}, the query tokens of a decode, got "
            f"{batch.decode_query_len}"
        )


def _check_block_table(batch: PagedBatch, num_pages: int, page_size: int, first_page: int) -> None:
    """Check that the pages which sequences have are pages of the cache."""
    logical = torch.arange(batch.block_table.shape[1]) * page_size
    used = logical < batch.seq_lens[:, None]
    pages = batch.block_table[: batch.num_requests][used]
    outside = pages[(pages < first_page) | (pages >= num_pages)]
    if outside.numel():
        raise ValueError(
            f"block_table: expected pages from {first_page} to {num_pages - 1}, got "
            f"{int(outside[0])}"
        )
