"""Launch configurations of the two steps: pure functions of shapes, dtype and architecture.

The numbers are winners of offline sweeps; nothing is tuned at run time.
"""

from __future__ import annotations

from functools import lru_cache

from sparsek_kernels.paged.config import (
    TileConfig,
    choose_splits,
    has_wgmma,
    is_hopper,
    next_power_of_2,
    shared_memory,
)
from sparsek_kernels.paged.policy import ceil_div

_START_PIECES = 6
"""Pieces of 64 keys in whose time a program finds its list and has its first keys: an estimate."""


def score_bytes(rows: int, columns: int, stages: int, row_bytes: int) -> int:
    """Most shared memory of a program that multiplies ``rows`` queries by ``columns`` means.

    Queries, means in every stage of the pipeline, and room to lay a result out anew.
    """
    return (rows + stages * columns) * row_bytes + (1 << 14)


def score_config(
    *,
    tiles: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    samples: int,
    blocks: int,
    itemsize: int,
    arch: int,
    num_sms: int,
) -> TileConfig:
    """Scores of prefill tiles: 64 rows (samples x heads) and a cell of each of 64 blocks, or fewer.

    ``queries`` are samples.

    Args:
        samples: at most so many of a tile.
        itemsize: bytes of an element of q; 4 bytes leave the tensor cores unused, and larger tiles
            would spill registers.
    """
    row_bytes = next_power_of_2(head_dim) * itemsize
    rows, columns, stages = (64, 64, 3) if itemsize <= 2 else (32, 32, 2)
    while score_bytes(rows, columns, stages, row_bytes) > shared_memory(arch):
        if stages > 2:
            stages -= 1
        elif columns > 32:
            columns //= 2
        elif rows > 16:
            rows //= 2
        elif columns > 16:
            columns //= 2
        else:
            stages = 1
            break
    block_h = min(next_power_of_2(group), rows)
    queries = min(next_power_of_2(samples), rows // block_h)
    programs = tiles * num_kv_heads * -(-group // block_h) * -(-samples // queries)
    return TileConfig(
        block_h=block_h,
        queries=queries,
        block_m=max(16, queries * block_h),
        block_n=columns,
        splits=choose_splits(programs, blocks // columns, 2 * num_sms, most=16),
        num_warps=4,
        num_stages=stages,
        hopper=has_wgmma(arch),
    )


def listed_config(*, rows: int, head_dim: int, itemsize: int, arch: int) -> TileConfig:
    """Masses of a tile's list: 64 gathered keys at a time, for at most 128 of the tile's ``rows``.

    With three stages a multiprocessor of Hopper holds four programs of a few rows, and 128 KiB of
    keys on their way.  Few rows take two warps: four would multiply by ``wgmma``, and wait for it.
    128 rows take eight: while four multiply, four weigh.
    ``queries`` and ``block_h`` say nothing here.

    Args:
        rows: queries times heads that one tile is ranked by.
        itemsize: bytes of an element of q; 4 bytes leave the tensor cores unused, and larger tiles
            would spill registers.
    """
    row_bytes = next_power_of_2(head_dim) * itemsize
    block_m, block_n, stages = (128, 64, 3) if itemsize <= 2 else (16, 32, 2)
    block_m = min(max(next_power_of_2(rows), 16), block_m)
    while (block_m + stages * block_n) * row_bytes > shared_memory(arch) - (1 << 14):
        if block_m > 32:
            block_m //= 2
        elif block_n > 16:
            block_n //= 2
        else:
            break
    num_warps = 4
    if is_hopper(arch) and row_bytes <= 256:
        num_warps = {16: 2, 128: 8}.get(block_m, 4)
    return TileConfig(
        block_h=1,
        queries=1,
        block_m=block_m,
        block_n=block_n,
        splits=1,
        num_warps=num_warps,
        num_stages=stages,
        hopper=has_wgmma(arch),
    )


@lru_cache(maxsize=1024)
def listed_shares(programs: int, pieces: int, resident: int) -> int:
    """Programs that share one tile's list: the fewest with which all lists are done first.

    ``resident`` programs run at once, so they go in rounds, which a last one may leave half empty.
    Each share gets at least two pieces, and a program's start takes as long as some more.

    Args:
        programs: programs without sharing.
        pieces: runs of keys of one list.
        resident: programs that fill the device.
    """

    def time(shares: int) -> int:
        return ceil_div(programs * shares, resident) * (ceil_div(pieces, shares) + _START_PIECES)

    return min(range(1, max(pieces // 2, 1) + 1), key=time)


def rank_rows(places: int, rows: int) -> int:
    """Rows at a time of the shares of a list of ``places`` blocks: 4096 shares in registers."""
    return min(max(4096 // next_power_of_2(places), 1), next_power_of_2(rows))
