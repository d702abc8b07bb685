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


def choose_splits(programs: int, pieces: int, resident: int, *, most: int = 32) -> int:
    """Programs that share one tile, so that about ``resident`` of them run at once.

    Args:
        programs: programs without splitting.
        pieces: most pieces of work of one tile; each share gets at least two.
        resident: programs that fill the device.
    """
    wanted = min(resident // max(programs, 1), pieces // 2, most)
    best = 1
    for step in _SPLIT_STEPS:
        if step <= wanted:
            best = step
    return best


def is_hopper(arch: int) -> bool:
    """Whether ``arch`` (as ``major * 10 + minor``) has the large shared memory of sm_90."""
    return 90 <= arch < 120


def has_wgmma(arch: int) -> bool:
    """Whether the kernels written for Hopper run on ``arch``."""
    return 90 <= arch < 100


def shared_memory(arch: int) -> int:
    """Bytes of shared memory that one program may take."""
    return (227 if is_hopper(arch) else 99) * 1024


def score_bytes(rows: int, columns: int, stages: int, row_bytes: int) -> int:
    """Most shared memory of a program that multiplies ``rows`` queries by ``columns`` means.

    Queries, means in every stage of the pipeline, and room to lay a result out anew.
    """
    return (rows + stages * columns) * row_bytes + (1 << 14)


def decode_config(
    *,
    tiles: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    queries: int,
    blocks: int,
    sel_block: int,
    arch: int,
    num_sms: int,
) -> TileConfig:
    """Split-KV decoding: all heads of a group and ``queries`` tokens in one tile."""
    block_h = next_power_of_2(group)
    queries = next_power_of_2(queries)
    block_m = max(16, queries * block_h)
    block_n = largest_part(sel_block, 64 if head_dim <= 128 else 32)
    programs = tiles * num_kv_heads
    narrow = is_hopper(arch) and head_dim <= 128 and block_m == 16
    splits = choose_splits(programs, blocks, (4 if narrow else 2) * num_sms)
    return TileConfig(
        block_h=block_h,
        queries=queries,
        block_m=block_m,
        block_n=block_n,
        splits=splits,
        num_warps=2 if narrow and programs >= 32 else 4,
        num_stages=2,
    )


def row_config(*, group: int, head_dim: int, sel_block: int, arch: int) -> TileConfig:
    """One query token per program, nothing split: every batch adds a row up in the same order."""
    return decode_config(
        tiles=1 << 16,  # so many that there is nothing to gain from splits
        num_kv_heads=1,
        group=group,
        head_dim=head_dim,
        queries=1,
        blocks=1,
        sel_block=sel_block,
        arch=arch,
        num_sms=1,
    )


def prefill_config(
    *,
    tiles: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    tile: int,
    blocks: int,
    sel_block: int,
    itemsize: int,
    arch: int,
    num_sms: int,
) -> TileConfig:
    """Prefill: two heads of the group beside 64 queries, two programs per multiprocessor."""
    shrink = (2 if head_dim > 128 else 1) * (2 if itemsize > 2 else 1)
    rows = 128 // shrink
    queries = largest_part(tile, min(rows, 64))
    block_h = max(1, min(next_power_of_2(group), rows // queries))
    block_m = max(16, queries * block_h)
    block_n = largest_part(sel_block, 64 // shrink)
    chunks = -(-group // block_h) * -(-tile // queries)
    programs = tiles * num_kv_heads * chunks
    splits = max(
        choose_splits(programs, blocks // 4, num_sms, most=8),
        choose_splits(programs, blocks // 32, 4 * num_sms, most=16),  # few queries, long contexts
    )
    return TileConfig(
        block_h=block_h,
        queries=queries,
        block_m=block_m,
        block_n=block_n,
        splits=splits,
        num_warps=max(4, block_m // 16),
        num_stages=2,
        max_registers=128 if has_wgmma(arch) and block_m == 128 else 0,
        hopper=has_wgmma(arch),
    )


def logits_config(
    *,
    requests: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    queries: int,
    cells: int,
    num_sms: int,
) -> TileConfig:
    """Block logits of decodes: about 128 cells (32 KiB at 16 bits and 128 dimensions) at a time.

    ``splits`` is the most programs that share a context.  They loop over what is really there; a
    graph captured for long contexts would pay for every program more than the device holds at once,
    with work or without.
    """
    block_h = next_power_of_2(group)
    queries = next_power_of_2(queries)
    columns = 128 if head_dim <= 128 else 64
    wanted = max(8 * num_sms // (requests * num_kv_heads), 1)
    return TileConfig(
        block_h=block_h,
        queries=queries,
        block_m=max(16, queries * block_h),
        block_n=max(16, columns // next_power_of_2(cells)),
        splits=1 << (wanted.bit_length() - 1),
        num_warps=4,
        num_stages=2,
    )


def score_config(
    *,
    tiles: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    tile: int,
    blocks: int,
    itemsize: int,
    arch: int,
    num_sms: int,
) -> TileConfig:
    """Scores of prefill tiles: 64 rows (queries x heads), one cell of 64 blocks, or fewer.

    Args:
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
    queries = min(next_power_of_2(tile), rows // block_h)
    programs = tiles * num_kv_heads * -(-group // block_h) * -(-tile // queries)
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


def top_warps(max_blocks: int) -> int:
    """Warps that share one row of scores."""
    return 8 if max_blocks <= 4096 else 16


def largest_part(n: int, most: int) -> int:
    """Largest power of two that divides ``n`` and is at most ``most``."""
    return min(n & -n, most)
