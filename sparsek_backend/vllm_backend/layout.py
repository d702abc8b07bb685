"""KV pages whose heads are contiguous: the layout that the paged kernels read."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import MultipleOf

from . import compat
from .names import BACKEND_NAME

PREFERRED_PAGE_SIZE = 64
"""Tokens: one selected block is one page, so that a block's K and V are contiguous per head."""


SMALLEST_PAGE_SIZE = 16
"""Tokens: pages are multiples of this."""


class HeadMajorPages:
    """A backend's name and the layout of its KV cache, in both generations of vLLM's interface."""

    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Return the name after ``--attention-backend``."""
        return BACKEND_NAME

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes: any multiple of 16 tokens."""
        return [MultipleOf(SMALLEST_PAGE_SIZE)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the page size to use when the user names none."""
        if default_block_size % PREFERRED_PAGE_SIZE == 0:
            return default_block_size
        return PREFERRED_PAGE_SIZE

    # vLLM 0.29 and later: logical [pages, Hkv, page_size, C], C what a token takes.

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return layouts in which one head's tokens of a page are contiguous."""
        return tuple(compat.head_major_layouts())

    # vLLM before 0.29.

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the logical shape of a layer's cache."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the physical order: pages outermost, then heads, so that pages can be padded."""
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Return vLLM's name for head-major pages."""
        return "HND"
