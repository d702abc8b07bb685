"""Launch configurations of attention over pages: pure functions of shapes, dtype and architecture.

The numbers are winners of offline sweeps; nothing is tuned at run time.
"""

from __future__ import annotations

from sparsek_kernels.paged.config import (
    TileConfig,
    choose_splits,
    has_wgmma,
    is_hopper,
    largest_part,
    next_power_of_2,
)

MANY_PROGRAMS = 32
"""Decodes times KV heads from which on programs have fewer warps."""


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
    splits = choose_splits(programs, pieces, (4 if narrow else 2) * num_sms, least=1)
    return TileConfig(
        block_h=block_h,
        queries=queries,
        block_m=block_m,
        block_n=block_n,
        splits=splits,
        num_warps=2 if narrow and programs >= MANY_PROGRAMS else 4,
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
    fits_hopper: bool = True,
) -> TileConfig:
    """Prefill: two heads of the group beside 64 queries, two programs per multiprocessor.

    Args:
        fits_hopper: whether Hopper's kernel takes these tensors.  It splits nothing, and has one
            program per multiprocessor.
    """
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
    hopper = has_wgmma(arch) and fits_hopper
    if hopper and -(-programs * splits // num_sms) >= splits * -(-programs // num_sms):
        splits = 1  # whole programs need no more rounds
    return TileConfig(
        block_h=block_h,
        queries=queries,
        block_m=block_m,
        block_n=block_n,
        splits=splits,
        num_warps=max(4, block_m // 16),
        num_stages=2,
        max_registers=128 if has_wgmma(arch) and block_m == 128 else 0,
        hopper=hopper,
    )


def keys_of_blocks(sel_block: int, most: int) -> int:
    """Keys per iteration over blocks: an equal part of one, or several that are small."""
    return most if most % sel_block == 0 else largest_part(sel_block, most)
