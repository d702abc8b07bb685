"""The mean value of segments, from their records (``record.py``), in torch."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.record import record_bytes


def read_value_means(
    records: torch.Tensor, pages: torch.Tensor, places: torch.Tensor, head_dim: int
) -> torch.Tensor:
    """Means of V of segments, ``[T, S, Hkv, D]`` float32.

    Args:
        records: ``[num_pages, Hkv, bytes]`` uint8, what the pages keep.
        pages: ``[T, S]`` int64, the pages of the segments.
        places: ``[S]`` int64, the segments' places in their pages.
        head_dim: ``D``.
    """
    each = record_bytes(head_dim)
    whole = records[..., : records.shape[2] // each * each].unflatten(2, (-1, each))

    def section(begin: int, end: int) -> torch.Tensor:
        found: torch.Tensor = whole[..., begin:end][pages, :, places]
        return found

    packed = section(21 * head_dim // 2, 11 * head_dim)
    scale = 45 * head_dim // 4 + 34
    factor = section(scale, scale + 2).view(torch.float16)
    return (torch.cat([packed & 15, packed >> 4], dim=-1).float() - 7.5) * factor.float()
