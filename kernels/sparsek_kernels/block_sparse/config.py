"""Tile sizes for a shape: a pure function of sizes, dtype and GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class ProblemShape:
    """Sizes of one call; patterns share the query heads evenly.

    ``num_k`` is 0 where it does not matter; ``masked`` says that keys or queries may be padding.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_patterns: int = 1
    num_k: int = 0
    masked: bool = False
    dropout: bool = False

    @property
    def padded_dim(self) -> int:
        """``head_dim`` rounded up to a power of two that tensor cores can use."""
        return max(16, _power_of_two(self.head_dim))

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def pattern_heads(self) -> int:
        """Query heads per pattern."""
        return self.num_heads // self.num_patterns


@dataclass(frozen=True)
class TileConfig:
    """Launch parameters of one kernel."""

    rows: int  # tokens that a program owns of a block, dividing the block
    pack: int  # heads of a group that it owns
    own: int  # ``rows x pack`` rounded up to a power of two
    step: int  # tokens of the other side that it takes at a time
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class HopperBackward:
    """Launch parameters of the warp-specialised backward kernels.

    Args:
        dkdv_stages: tiles of queries in flight.
        dq_stages: tiles of keys in flight.
        dkdv_held: whether a warpgroup takes k and v to registers, where there is room: products of
            64 rows read as much of them as of the tiles, and shared memory is as busy as the
            tensor cores.
        shares: parts into which a multiprocessor's even share of the work for keys is divided; a
            program takes at most one such part, and longer lists of query blocks are cut.
        least_entries: query blocks that a program may take at least, however short its part.
    """

    dkdv_stages: int
    dq_stages: int
    dkdv_held: bool
    shares: int = 2
    least_entries: int = 16


@dataclass(frozen=True)
class LaunchConfig:
    """Launch parameters of every kernel of a call.

    ``hopper_stages`` is the pipeline depth of the warp-specialised forward kernel; what starts
    with ``hopper`` is ``None`` where such kernels are not used.
    """

    forward: TileConfig
    dkdv: TileConfig
    dq: TileConfig
    precision: str = "tf32"
    hopper_stages: int | None = None
    hopper_backward: HopperBackward | None = None


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def _rows(block_size: int, most: int) -> int:
    """Largest share of a block, its size over an integer, that is at most ``most``.

    A share is a multiple of 8, because dropout draws the bits of 8 keys together.
    """
    shares = (block_size // n for n in range(1, block_size + 1) if block_size % (8 * n) == 0)
    return next(share for share in shares if share <= most)


def query_tile(
    shape: ProblemShape, own: int, step: int, num_warps: int, num_stages: int
) -> TileConfig:
    """Tile of up to ``own`` query rows: a share of a block, or a block of several heads."""
    rows = _rows(shape.block_size, own)
    # A pack must not cross from one pattern to the next.
    shared = shape.group if shape.pattern_heads % shape.group == 0 else 1
    packs = -(-shared // max(own // rows, 1))
    pack = -(-shared // packs)
    size = max(_power_of_two(rows * pack), 16)
    return TileConfig(rows, pack, size, step, num_warps if size > 64 else 4, num_stages)


def key_tile(
    shape: ProblemShape, own: int, step: int, num_warps: int, num_stages: int
) -> TileConfig:
    """Tile of up to ``own`` keys: a share of a block, or a block."""
    rows = _rows(shape.block_size, own)
    size = max(_power_of_two(rows), 16)
    return TileConfig(rows, 1, size, step, num_warps if size >= 64 else 4, num_stages)


def hopper_stages(shape: ProblemShape) -> int | None:
    """Pipeline depth of the warp-specialised forward kernel for half-precision shapes it takes.

    It takes neither padding nor dropout: the portable kernel serves such calls.
    """
    if shape.masked or shape.dropout:
        return None
    two_heads = shape.group > 1 and shape.pattern_heads % shape.group == 0
    if shape.block_size != 128 and not (shape.block_size == 64 and two_heads):
        return None
    if shape.head_dim not in (64, 128) or shape.num_k % shape.block_size:
        return None
    return 2 if shape.head_dim == 128 else 4


def hopper_backward(shape: ProblemShape) -> HopperBackward | None:
    """Parameters of the warp-specialised backward kernels for half-precision shapes they take.

    These are what the forward kernel takes, where heads of a group share one pattern or the heads
    of a pattern lie in one group.
    """
    if hopper_stages(shape) is None:
        return None
    if shape.pattern_heads % shape.group and shape.group % shape.pattern_heads:
        return None
    if shape.head_dim == 128:
        return HopperBackward(4, 4, False)
    return HopperBackward(4, 6, True)


def select_config(shape: ProblemShape, dtype: torch.dtype, arch: int) -> LaunchConfig:
    """Launch parameters for ``shape`` and the dtype of q, k and v.

    ``arch`` is ten times the compute capability; unknown ones get the portable default.
    """
    dim = shape.padded_dim
    if dtype == torch.float32:
        # IEEE products run on the plain fp32 units: small tiles, all state in registers.
        own, step = 32, 16 if dim > 128 else 32
        query, key = (make(shape, own, step, 4, 1) for make in (query_tile, key_tile))
        return LaunchConfig(query, key, query, "ieee")
    large_smem = arch in (80, 90, 100, 103)
    if dim <= 64:
        forward = query_tile(shape, 128, 64, 4, 3 if large_smem else 2)
        dkdv = key_tile(shape, 64 if arch == 90 else 128, 64, 4 if arch <= 90 else 8, 2)
        dq = query_tile(shape, 128, 64, 4 if arch < 90 else 8, 2)
    elif dim == 128 and arch == 90:
        forward = query_tile(shape, 128, 64, 4, 3)
        dkdv = key_tile(shape, 64, 64, 4, 2)
        dq = query_tile(shape, 128, 64, 8, 2)
    elif dim == 128:
        forward = query_tile(shape, 128, 64, 8, 3 if large_smem else 2)
        dkdv = key_tile(shape, 64, 64, 8, 1)
        dq = query_tile(shape, 64, 64, 8, 2)
    else:
        forward = query_tile(shape, 128 if large_smem else 64, 32, 8, 2 if large_smem else 1)
        dkdv = key_tile(shape, 64 if large_smem else 32, 32, 8, 1)
        dq = query_tile(shape, 64 if large_smem else 32, 32, 8, 1)
    if shape.dropout:  # random bits of a tile need registers of their own
        forward, dq = (replace(tile, num_warps=8) for tile in (forward, dq))
        dkdv = replace(dkdv, step=min(dkdv.step, 32), num_warps=8)
    if arch != 90:
        return LaunchConfig(forward, dkdv, dq)
    return LaunchConfig(
        forward,
        dkdv,
        dq,
        hopper_stages=hopper_stages(shape),
        hopper_backward=hopper_backward(shape),
    )
