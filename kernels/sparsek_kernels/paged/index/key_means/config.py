"""Launch configuration of the key means' logits: a pure function of shapes and architecture."""

from __future__ import annotations

from sparsek_kernels.paged.config import TileConfig, next_power_of_2


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
    multiprocessor, since a partial second wave costs a full one.  They loop over what is there.

    Args:
        vectors: key means in a block.
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
