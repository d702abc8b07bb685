"""KV pages of natively sparse layers.

K and V of the three branches are heads of one cache (one K and V with ``shared_kv``).  Compressed
keys and values live behind them, in the page in which their block ends and in bytes that vLLM
accounts for; see :mod:`sparsek_kernels.nsa.paged`.
"""

from __future__ import annotations

import torch

from sparsek_backend.nn.config import NSAConfig
from sparsek_kernels.nsa.paged.cache import NSAPages


def tail_elements(config: NSAConfig, num_kv_heads: int, page_size: int, head_dim: int) -> int:
    """Elements of the compressed rows behind a page's K and V.

    Args:
        num_kv_heads: heads of the cache, all branches together.
    """
    heads = num_kv_heads // config.num_branches
    return heads * -(-page_size // config.cmp_stride) * 2 * head_dim


def view_nsa_pages(kv_cache: torch.Tensor, config: NSAConfig) -> NSAPages:
    """Views of a layer's cache ``[pages, branches * Hkv, page_size, 2 * D]``.

    Raises:
        ValueError: the pages have no room for the compressed rows.
    """
    pages, heads, page_size, width = kv_cache.shape
    used = heads * page_size * width
    tail = tail_elements(config, heads, page_size, width // 2)
    stride = kv_cache.stride(0)
    if stride < used + tail:
        raise ValueError(
            f"kv_cache: expected pages of at least {used + tail} elements, so that compressed "
            f"keys and values fit behind K and V, got a page stride of {stride}"
        )
    branch_heads = heads // config.num_branches
    shape = (pages, branch_heads, page_size // config.cmp_stride, width)
    compressed = kv_cache.as_strided(
        shape, (stride, shape[2] * width, width, 1), kv_cache.storage_offset() + used
    )
    branches = kv_cache.split(branch_heads, dim=1)
    branches = branches * 3 if config.shared_kv else branches
    views = [x for part in (*branches, compressed) for x in part.split(width // 2, dim=-1)]
    return NSAPages(*views)
