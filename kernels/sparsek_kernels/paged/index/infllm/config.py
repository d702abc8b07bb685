"""Launch configuration of InfLLM-v2's averages: a pure function of shapes and architecture."""

from __future__ import annotations

from sparsek_kernels.paged.config import TileConfig, next_power_of_2


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
