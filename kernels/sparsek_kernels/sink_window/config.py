"""Which kernel and which tile sizes serve a shape: pure functions of shape, dtype and GPU.

Winners of ``benchmarks/tune_sink_window.py``; nothing is tuned at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparsek_kernels.common import shapes

_L2_BYTES = 32 << 20  # what K and V may take of the 50 MB of a Hopper GPU
ACCUMULATOR_BYTES = 512 << 20  # of dq in fp32, in one launch of the fused backward kernel


@dataclass(frozen=True)
class ProblemShape(shapes.AttentionShape):
    """Sizes of one call, and its mask; ``num_seqs`` sequences are packed, or ``None``."""

    num_sink: int = 0
    window_size: int | None = None
    causal: bool = True
    num_seqs: int | None = None

    @property
    def mask_rules(self) -> dict[str, int | bool]:
        """Constexprs of the mask and the heads, as most kernels take them."""
        return {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "CAUSAL": self.causal,
            "WINDOWED": self.window_size is not None,
        }


@dataclass(frozen=True)
class TileConfig(shapes.TileConfig):
    """Launch parameters of one kernel.

    ``hold_q`` keeps the rows of the Hopper forward kernel in registers.
    """

    hold_q: bool = False


@dataclass(frozen=True)
class LaunchConfig:
    """Launch parameters of every kernel of a call; ``None`` where a Hopper kernel does not run.

    Args:
        dkdv: of the key-major backward kernel (``block_n`` keys per program).
        dq: of the query-major backward kernel.
        sink: of the sink-key backward kernel (``block_n`` sink keys per program).
        sink_block: sink keys per step of the query-major kernels.
        hopper_forward: 128 rows of one head, or 64 of two neighbouring heads where groups are even.
        hopper_backward: of the fused backward kernel.
        hopper_small: of the kernel for few rows; each of its two warpgroups takes ``num_stages``
            blocks of keys.
        forward_together: KV heads that ``hopper_forward`` works on side by side.
        backward_together: KV heads that ``hopper_backward`` works on side by side.
    """

    forward: TileConfig
    dkdv: TileConfig
    dq: TileConfig
    sink: TileConfig
    sink_block: int
    hopper_forward: TileConfig | None = None
    hopper_backward: TileConfig | None = None
    hopper_small: TileConfig | None = None
    forward_together: int = 1
    backward_together: int = 1
    precision: str = "tf32"


def _sink_block(num_sink: int, longest: int) -> int:
    """Smallest power of two from 16 to ``longest`` that holds the sinks in one step."""
    block = 16
    while block < num_sink and block < longest:
        block *= 2
    return block


def _fp32_config(shape: ProblemShape) -> LaunchConfig:
    """IEEE products run on the plain fp32 units: small tiles, all state in registers."""
    wide = shape.padded_dim > 128
    tile = TileConfig(32, 16 if wide else 32, 4, 1)
    return LaunchConfig(tile, tile, tile, tile, 16, precision="ieee")


def _half_config(shape: ProblemShape, arch: int) -> LaunchConfig:
    dim = shape.padded_dim
    large_smem = arch in (80, 90, 100, 103)
    if dim <= 64:
        forward = TileConfig(128, 64, 4, 3 if large_smem else 2)
        dkdv = TileConfig(64, 128, 4 if arch < 90 else 8, 2)
        dq = TileConfig(128, 64, 4 if arch < 90 else 8, 2)
    elif dim == 128 and arch == 90:
        forward = TileConfig(128, 128, 8, 2)
        dkdv = TileConfig(64, 128, 8, 2)
        dq = TileConfig(128, 64, 8, 3)
    elif dim == 128:
        forward = TileConfig(128, 64, 8, 3 if large_smem else 2)
        dkdv = TileConfig(64, 64, 8, 2 if arch < 90 else 1)
        dq = TileConfig(64, 64, 8, 2)
    else:
        forward = TileConfig(128 if large_smem else 64, 32, 8, 2 if large_smem else 1)
        dkdv = TileConfig(32, 64 if large_smem else 32, 8, 1)
        dq = TileConfig(64 if large_smem else 32, 32, 8, 1)
    sink_block = _sink_block(shape.num_sink, 64 if dim <= 128 else 32)
    sink = TileConfig(64 if dim <= 128 else 32, sink_block, 4, 1)
    return LaunchConfig(forward, dkdv, dq, sink, sink_block)


def _small_tile(shape: ProblemShape) -> TileConfig | None:
    """Tile of the kernel that attends to all keys at once, for problems that fit."""
    if shape.window_size is not None or shape.num_seqs is not None:
        return None
    if shape.head_dim == 64 and 128 < shape.num_k <= 512:
        return TileConfig(64, 128, 4, 2)
    return None


def _together(shape: ProblemShape) -> int:
    """KV heads that the forward kernel works on side by side, with K and V in L2.

    The more heads, the better long and short query blocks even out.  With a window all query
    blocks are of one length, and heads one after another read less.
    """
    if shape.window_size is not None:
        return 1
    keys = shape.num_k // max(shape.num_seqs or 1, 1)
    heads = shape.num_kv_heads * shape.batch
    most = min(heads, _L2_BYTES // max(keys * shape.head_dim * 4, 1))
    return next((x for x in range(most, 1, -1) if heads % x == 0), 1)


def select_config(shape: ProblemShape, dtype: torch.dtype, arch: int) -> LaunchConfig:
    """Launch parameters for ``shape`` and the dtype of q, k and v.

    ``arch`` is ten times the compute capability; unknown ones get the portable default.
    """
    if dtype == torch.float32:
        return _fp32_config(shape)
    config = _half_config(shape, arch)
    rows = shape.num_q * shape.num_heads * shape.batch
    if arch != 90:
        return config
    if rows <= 8192:
        # Few rows: smaller tiles, so that every multiprocessor gets one.
        return replace(config, forward=TileConfig(64, 64, 4, 3), hopper_small=_small_tile(shape))
    if shape.head_dim not in (64, 128) or shape.num_sink > 64:
        return config
    window = shape.window_size
    hopper: TileConfig | None = TileConfig(128, 128, 4, 2)
    # A short window is mostly edge, and many sinks take the room of the wide blocks' buffers.
    if window is not None and window <= 1024 and shape.num_sink > 16:
        hopper = TileConfig(128, 64, 4, 3)
    elif window is not None and window <= 512 and shape.num_sink == 0 and shape.head_dim == 128:
        # Two heads of 64 tokens meet fewer keys, and fewer that need a mask, than one head of 128.
        paired = shape.group % 2 == 0
        hopper = TileConfig(64, 64, 4, 4, hold_q=True) if paired else TileConfig(128, 64, 4, 4)
    if shape.head_dim == 64 and window is not None and window <= 128:
        # So few keys that small tiles, which hardly load more than they need, are faster.
        hopper = None
        config = replace(config, forward=TileConfig(64, 64, 4, 3))
    return replace(
        config,
        hopper_forward=hopper,
        hopper_backward=TileConfig(64, 128, 8, 3),
        forward_together=_together(shape),
        backward_together=1 if window is not None else 8,
    )


def accumulator_parts(shape: ProblemShape) -> list[tuple[slice, slice, slice]]:
    """Sequences, query heads and KV heads of each launch of the fused backward kernel.

    They follow one another, so that the fp32 ``dq`` of all heads need not be in memory at once.
    """
    group = shape.group
    head = group * shape.num_q * shape.head_dim * 4
    heads = min(shape.num_kv_heads, max(1, ACCUMULATOR_BYTES // max(head, 1)))
    heads = -(-shape.num_kv_heads // -(-shape.num_kv_heads // heads))  # parts of equal size
    batch = 1
    if heads == shape.num_kv_heads:
        batch = max(1, ACCUMULATOR_BYTES // max(head * heads, 1))
    return [
        (slice(b, b + batch), slice(h * group, (h + heads) * group), slice(h, h + heads))
        for b in range(0, shape.batch, batch)
        for h in range(0, shape.num_kv_heads, heads)
    ]
