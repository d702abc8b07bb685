"""What both of our backends are to vLLM: their name, their pages and the sizes of these."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import MultipleOf

from .compat import HeadMajorLayout
from .names import BACKEND_NAME

PREFERRED_PAGE_SIZE = 64
"""Tokens: one selected block is one page, so that a block's K and V are contiguous per head."""


SMALLEST_PAGE_SIZE = 16
"""Tokens: pages are multiples of this."""


class HeadMajorPages(HeadMajorLayout):
    """A backend's name and the sizes of its KV pages, in which a head's tokens are contiguous."""

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
