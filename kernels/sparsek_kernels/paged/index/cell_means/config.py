"""Launch configuration of the scores by means: a pure function of shapes, dtype, architecture.

The numbers are winners of offline sweeps; nothing is tuned at run time.
"""

from __future__ import annotations

from sparsek_kernels.paged.config import (
    TileConfig,
    choose_splits,
    has_wgmma,
    next_power_of_2,
    shared_memory,
)


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
