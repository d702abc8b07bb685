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
    block_n = keys_of_blocks(sel_block, 64 if head_dim <= 128 else 32)
    pieces = blocks if sel_block >= block_n else -(-blocks * sel_block // block_n)
    programs = tiles * num_kv_heads
    narrow = is_hopper(arch) and head_dim <= 128 and block_m == 16
    splits = choose_splits(programs, pieces, (4 if narrow else 2) * num_sms)
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
    block_n = keys_of_blocks(sel_block, 64 // shrink)
    pieces = blocks if sel_block >= block_n else -(-blocks * sel_block // block_n)
    chunks = -(-group // block_h) * -(-tile // queries)
    programs = tiles * num_kv_heads * chunks
    splits = max(
        choose_splits(programs, pieces // 4, num_sms, most=8),
        choose_splits(programs, pieces // 32, 4 * num_sms, most=16),  # few queries, long contexts
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
    vectors: int,
    num_sms: int,
) -> TileConfig:
    """Block logits of decodes: about 256 vectors (16 KiB at 128 dimensions) at a time.

    ``splits`` is the most programs that share a context: no more than run at once, six on each
    multiprocessor, for a second round of a few would take as long as the first.  They loop over
    what is really there.

    Args:
        vectors: vectors of the sketch in a block.
    """
    block_h = next_power_of_2(group)
    queries = next_power_of_2(queries)
    rows = 256 if head_dim <= 128 else 128
    return TileConfig(
        block_h=block_h,
        queries=queries,
        block_m=max(8, queries * block_h),
        block_n=max(16, rows // next_power_of_2(vectors)),
        splits=max(6 * num_sms // (requests * num_kv_heads), 1),
        num_warps=4,
        num_stages=3,
    )


def averages_config(
    *, tokens: int, num_kv_heads: int, group: int, head_dim: int, num_sms: int
) -> TileConfig:
    """Logits of InfLLM-v2's averages: 64 of them at a time, for all heads of a token's group.

    ``splits`` is the most programs that share a context, about three on each multiprocessor, as
    their means on the way (twice 16 KiB in two stages) leave room for.
    """
    return TileConfig(
        block_h=next_power_of_2(group),
        queries=1,
        block_m=max(16, next_power_of_2(group)),
        block_n=64 if head_dim <= 128 else 32,
        splits=max(3 * num_sms // (tokens * num_kv_heads), 1),
        num_warps=4,
        num_stages=2,
    )


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


def listed_shares(programs: int, pieces: int, resident: int) -> int:
    """Programs that share one tile's list of ``pieces`` runs of keys: ``resident`` at once."""
    return max(min(resident // max(programs, 1), pieces // 2), 1)


def rank_rows(places: int, rows: int) -> int:
    """Rows at a time of the shares of a list of ``places`` blocks: 4096 shares in registers."""
    return min(max(4096 // next_power_of_2(places), 1), next_power_of_2(rows))


def top_warps(max_blocks: int) -> tuple[int, int]:
    """Warps that share one row of scores, and registers of a thread.

    Two programs then share a multiprocessor, where the scores of a row fit into their registers.
    """
    if max_blocks <= 2048:
        return 8, 128
    return 16, 64 if max_blocks <= 8192 else 128


def keys_of_blocks(sel_block: int, most: int) -> int:
    """Keys per iteration over blocks: an equal part of one, or several that are small."""
    return most if most % sel_block == 0 else largest_part(sel_block, most)


def largest_part(n: int, most: int) -> int:
    """Largest power of two that divides ``n`` and is at most ``most``."""
    return min(n & -n, most)
