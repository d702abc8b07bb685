"""The integers that define a native-sparse-attention layer, and arithmetic on positions.

Positions are token indices within a sequence.  Compressed block ``c`` covers ``cmp_block_size``
tokens from ``c * cmp_stride`` on and is seen by a query once all of it lies at or before the query;
selection block ``j`` covers ``sel_block_size`` tokens from ``j * sel_block_size`` on.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsek_kernels.checks import check_int


@dataclass(frozen=True)
class NSASpec:
    """Block sizes and counts of compression and selection (arXiv 2502.11089, section 3.3).

    Args:
        cmp_block_size: tokens of a compressed block, ``l``; a multiple of ``cmp_stride``.
        cmp_stride: tokens from one compressed block to the next, ``d``.
        sel_block_size: tokens of a selection block, ``l'``; a multiple of ``cmp_stride`` and at
            least ``cmp_block_size``, as equation 9 asks.
        top_n: blocks that a query attends, the forced ones included, ``n``.
        num_init_blocks: first blocks of a sequence, always chosen.
        num_local_blocks: latest blocks up to the query's own, always chosen.

    Raises:
        TypeError: a field that is no integer.
        ValueError: sizes that do not fit together; the message names the field.
    """

    cmp_block_size: int = 32
    cmp_stride: int = 16
    sel_block_size: int = 64
    top_n: int = 16
    num_init_blocks: int = 1
    num_local_blocks: int = 2

    def __post_init__(self) -> None:
        for name in ("cmp_block_size", "cmp_stride", "sel_block_size", "top_n"):
            check_int(name, getattr(self, name), 1)
        for name in ("num_init_blocks", "num_local_blocks"):
            check_int(name, getattr(self, name), 0)
        for name in ("cmp_block_size", "sel_block_size"):
            if getattr(self, name) % self.cmp_stride:
                raise ValueError(
                    f"{name}: expected a multiple of cmp_stride={self.cmp_stride}, "
                    f"got {getattr(self, name)}"
                )
        if self.sel_block_size < self.cmp_block_size:
            raise ValueError(
                f"sel_block_size: expected at least cmp_block_size={self.cmp_block_size}, "
                f"got {self.sel_block_size}"
            )
        forced = self.num_init_blocks + self.num_local_blocks
        if self.top_n < forced:
            raise ValueError(
                f"top_n: expected at least the {forced} forced blocks "
                f"(num_init_blocks + num_local_blocks), got {self.top_n}"
            )

    def as_list(self) -> list[int]:
        """The fields in order, as operators take them."""
        return [
            self.cmp_block_size,
            self.cmp_stride,
            self.sel_block_size,
            self.top_n,
            self.num_init_blocks,
            self.num_local_blocks,
        ]

    @property
    def strides_per_cmp(self) -> int:
        """Strides in a compressed block, ``l / d``."""
        return self.cmp_block_size // self.cmp_stride

    @property
    def strides_per_sel(self) -> int:
        """Strides in a selection block, ``l' / d``."""
        return self.sel_block_size // self.cmp_stride

    def num_compressed(self, length: int) -> int:
        """Compressed blocks of a sequence of ``length`` tokens: whole ones only."""
        return max((length - self.cmp_block_size) // self.cmp_stride + 1, 0)

    def num_selectable(self, length: int) -> int:
        """Selection blocks of a sequence of ``length`` tokens, the partial last one included."""
        return -(-length // self.sel_block_size)
