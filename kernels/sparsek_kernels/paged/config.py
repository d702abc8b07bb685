"""Launch configurations of the paged kernels: pure functions of shapes, dtype and architecture.

The tables hold winners of offline sweeps; nothing is tuned at run time.  Architectures that were
not swept take the portable row, whose tiles fit the smallest shared memory supported (99 KiB).
"""

from __future__ import annotations

from dataclasses import dataclass

_SPLIT_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class TileConfig:
    """How one kernel is launched.

    Args:
        block_h: query heads of a KV head's group in one program.
        queries: query tokens in one program.
        block_m: rows of the tile (``queries * block_h``, at least 16).
        block_n: keys, or blocks to score, per iteration.
        splits: programs that share a tile.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
        max_registers: registers per thread, so that more programs share a multiprocessor; 0 leaves
            that to the compiler.
        hopper: take the kernel written for Hopper where it fits the call and nothing is split;
            block sizes are then its own.
    """

    block_h: int
    queries: int
    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int
    max_registers: int = 0
    hopper: bool = False


def next_power_of_2(n: int) -> int:
    """Smallest power of two not below ``n >= 1``."""
    return 1 << max(n - 1, 0).bit_length()


def choose_splits(
    programs: int, pieces: int, resident: int, *, most: int = 32, least: int = 2
) -> int:
    """Programs that share one tile, so that about ``resident`` of them run at once.

    Args:
        programs: programs without splitting.
        pieces: most pieces of work of one tile.
        resident: programs that fill the device.
        least: pieces of a share.
    """
    wanted = min(resident // max(programs, 1), pieces // least, most)
    best = 1
    for step in _SPLIT_STEPS:
        if step <= wanted:
            best = step
    return best


def most_splits(splits: int) -> int:
    """Programs that a kernel has room to add up: it is compiled for 1, 8, 16 and 32."""
    return 1 if splits == 1 else max(next_power_of_2(splits), 8)


def is_hopper(arch: int) -> bool:
    """Whether ``arch`` (as ``major * 10 + minor``) has the large shared memory of sm_90."""
    return 90 <= arch < 120


def overlaps(arch: int) -> bool:
    """Whether kernels start while their predecessors drain: on sm_90, where that has been run."""
    return arch // 10 == 9


def has_wgmma(arch: int) -> bool:
    """Whether the kernels written for Hopper run on ``arch``."""
    return 90 <= arch < 100


def shared_memory(arch: int) -> int:
    """Bytes of shared memory that one program may take."""
    return (227 if is_hopper(arch) else 99) * 1024


def largest_part(n: int, most: int) -> int:
    """Largest power of two that divides ``n`` and is at most ``most``."""
    return min(n & -n, most)


def top_warps(max_blocks: int) -> tuple[int, int]:
    """Warps that share one row of scores, and registers of a thread.

    Two programs then share a multiprocessor, where the scores of a row fit into their registers.
    """
    if max_blocks <= 2048:
        return 8, 128
    return 16, 64 if max_blocks <= 8192 else 128
