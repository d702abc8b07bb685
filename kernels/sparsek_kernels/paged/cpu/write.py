"""Torch form of the cache write: keys, values and the summaries of the cells they touch."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.policy import CELL_SIZE, ScoreKind, cell_size


def write_kv_eager(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    score_kind: ScoreKind,
) -> None:
    """Torch form of :func:`sparsek_kernels.paged.write_kv`."""
    page_size = k_cache.shape[2]
    slots = slot_mapping[: key.shape[0]]
    if slots.numel() == 1 and k_summary is not None and score_kind == "cell_mean":
        _write_one(key[0], value[0], k_cache, v_cache, k_summary, int(slots[0]))
        return
    if bool((slots < 0).any()):
        keep = slots >= 0
        slots, key, value = slots[keep], key[keep], value[keep]
    if slots.numel() == 0:
        return
    pages, offsets = slots // page_size, slots % page_size
    k_cache[pages, :, offsets] = key.to(k_cache.dtype)
    v_cache[pages, :, offsets] = value.to(v_cache.dtype)
    if k_summary is None:
        return
    size = cell_size(score_kind)
    filled = offsets % size + 1
    if slots.numel() > 1:  # keep the last token of each cell: it knows how much the cell holds
        last = filled == size
        last[:-1] |= slots[1:] != slots[:-1] + 1
        last[-1] = True
        pages, offsets, filled = pages[last], offsets[last], filled[last]
    cell = offsets // size
    rows = k_cache.unflatten(2, (-1, size))[pages, :, cell].float()
    written = (torch.arange(size) < filled[:, None])[:, None, :, None]
    if score_kind == "cell_mean":
        total = rows.masked_fill_(~written, 0.0).sum(2)
        k_summary[pages, :, cell] = (total / filled[:, None, None]).to(k_summary.dtype)
        return
    low = rows.masked_fill(~written, float("inf")).amin(2)
    high = rows.masked_fill(~written, float("-inf")).amax(2)
    k_summary[pages, :, 2 * cell] = low.to(k_summary.dtype)
    k_summary[pages, :, 2 * cell + 1] = high.to(k_summary.dtype)


def _write_one(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor,
    slot: int,
) -> None:
    """A single decoded token, key and value ``[Hkv, D]``: slices instead of index tensors."""
    if slot < 0:
        return
    page, offset = divmod(slot, k_cache.shape[2])
    k_cache[page, :, offset] = key
    v_cache[page, :, offset] = value
    cell = offset // CELL_SIZE
    rows = k_cache[page, :, cell * CELL_SIZE : offset + 1]
    k_summary[page, :, cell] = rows.mean(1, dtype=torch.float32)
