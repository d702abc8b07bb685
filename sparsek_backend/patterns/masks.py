"""Predefined patterns: random blocks, BigBird, Longformer, dilated windows.

Sinks with a window are ``BlockSparsePattern.local``, a window with strides ``.strided``.
"""

from __future__ import annotations

import torch

from sparsek_backend.patterns.entries import block_grid, check_density
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_kernels.checks import check_int


def random_pattern(
    shape: tuple[int, int],
    block_size: int,
    *,
    density: float,
    seed: int,
    num_patterns: int = 1,
    causal: bool = False,
) -> BlockSparsePattern:
    """Blocks drawn evenly without repeats; every query block has its own.

    Args:
        shape: ``(R, C)``; the last query block sits at the last key block.
        block_size: tokens along a side of a block.
        density: share of the visible blocks that a pattern lists.
        seed: the same seed gives the same blocks.
        num_patterns: P, each drawn for itself.
        causal: whether later key blocks are left out.
    """
    check_density(density)
    check_int("num_patterns", num_patterns, 1)
    generator = torch.Generator().manual_seed(seed)
    row, col = block_grid(shape)
    seen = (col <= row) if causal else torch.ones(shape, dtype=torch.bool)
    own = seen & (col == row)
    order = torch.rand(num_patterns, *shape, generator=generator).masked_fill(~seen, -1.0)
    order = order.masked_fill(own, 2.0).flatten(1)
    count = max(round(density * int(seen.sum())), int(own.sum()))
    mask = torch.zeros_like(order, dtype=torch.bool)
    mask.scatter_(1, order.topk(count, dim=1).indices, True)
    return BlockSparsePattern.from_mask(mask.view(num_patterns, *shape), block_size)


def dilated_pattern(
    shape: tuple[int, int], block_size: int, *, window: int, dilation: int, causal: bool = False
) -> BlockSparsePattern:
    """A window with gaps: ``window`` key blocks, ``dilation`` apart (Longformer, figure 2c).

    Shape, block size and causality are as in :func:`random_pattern`.

    Args:
        window: attended key blocks, a query block's own included; without causality as many
            after it.
        dilation: distance between them, in blocks.
    """
    check_int("window", window, 1)
    check_int("dilation", dilation, 1)
    row, col = block_grid(shape)
    far = (row - col).abs()
    mask = (far % dilation == 0) & (far < window * dilation)
    return BlockSparsePattern.from_mask(mask & (col <= row) if causal else mask, block_size)


def longformer_pattern(
    shape: tuple[int, int],
    block_size: int,
    *,
    window: int,
    global_blocks: int = 1,
    causal: bool = False,
) -> BlockSparsePattern:
    """A window and global blocks (Beltagy et al., arXiv 2004.05150, figure 2d).

    The first ``global_blocks`` attend every block, and every block attends them.

    Shape, block size and causality are as in :func:`random_pattern`.

    Args:
        window: latest key blocks, a query block's own included; without causality as many after.
        global_blocks: blocks at the start that see and are seen by all.
    """
    check_int("window", window, 1)
    check_int("global_blocks", global_blocks, 0)
    row, col = block_grid(shape)
    mask = ((row - col).abs() < window) | (col < global_blocks) | (row < global_blocks)
    return BlockSparsePattern.from_mask(mask & (col <= row) if causal else mask, block_size)


def bigbird_pattern(
    shape: tuple[int, int],
    block_size: int,
    *,
    window: int = 2,
    global_blocks: int = 1,
    random_blocks: int = 2,
    seed: int = 0,
    causal: bool = False,
) -> BlockSparsePattern:
    """A window, global blocks and random ones (Zaheer et al., arXiv 2007.14062, figure 1).

    Shape, block size and causality are as in :func:`random_pattern`.

    Args:
        window: as in :func:`longformer_pattern`; BigBird's 3 blocks are a window of 2.
        global_blocks: as in :func:`longformer_pattern`.
        random_blocks: more key blocks of each query block, where as many are left.
        seed: of the random blocks.
    """
    check_int("random_blocks", random_blocks, 0)
    base = longformer_pattern(
        shape, block_size, window=window, global_blocks=global_blocks, causal=causal
    ).mask()[0]
    row, col = block_grid(shape)
    free = ~base & (col <= row) if causal else ~base
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(*shape, generator=generator).masked_fill(~free, -1.0)
    chosen = torch.zeros_like(base)
    chosen.scatter_(1, order.topk(min(random_blocks, shape[1]), dim=1).indices, True)
    return BlockSparsePattern.from_mask(base | (chosen & free), block_size)
