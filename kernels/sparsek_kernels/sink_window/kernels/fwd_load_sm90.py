"""Tiles of the Hopper forward kernel, and the warp that loads them (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsek_kernels.common.kernels.gluon_names import tma_load
from sparsek_kernels.common.kernels.masks import window_key_blocks
from sparsek_kernels.common.kernels.sequences import sequence_bounds
from sparsek_kernels.common.kernels.tiles_sm90 import tile_index

ROWS: gl.constexpr = gl.constexpr(64)


@gluon.jit
def tile_place(
    tile,
    tiles_ptr, cu_q_ptr, cu_k_ptr,
    num_q, num_k, num_blocks, num_heads, heads_together, window_size,
    GROUP: gl.constexpr, VARLEN: gl.constexpr, PAIRED: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Sequence, head, rows and key blocks of a tile; the first key block is never skipped.

    A tile has ``2 * ROWS`` query rows of its head, or ``ROWS`` of it and of the head after it
    (``PAIRED``), which meet fewer keys of a window and mask fewer of these.

    Heads of a group are neighbours, then ``heads_together`` KV heads, then query blocks from the
    last to the first, then the other KV heads: what runs together shares K and V in L2.
    """
    HEADS: gl.constexpr = 2 if PAIRED else 1
    TOKENS: gl.constexpr = 2 * ROWS // HEADS
    g = tile % (GROUP // HEADS) * HEADS
    rest = tile // (GROUP // HEADS)
    lane = rest % heads_together
    rest = rest // heads_together
    block = num_blocks - 1 - rest % num_blocks
    rest = (rest // num_blocks) * heads_together + lane
    kv_head = rest % (num_heads // GROUP)
    seq = rest // (num_heads // GROUP)
    # Known at compile time where it can be: the first product need not wait for the divisions.
    valid = True
    if VARLEN:
        slot = block.to(gl.int64) * 2
        seq = gl.load(tiles_ptr + slot)
        block = gl.load(tiles_ptr + slot + 1)
        valid = seq >= 0
        seq = gl.maximum(seq, 0)
    batch, q_start, q_len, k_start, k_len = sequence_bounds(
        seq, cu_q_ptr, cu_k_ptr, num_q, num_k, VARLEN
    )
    row = block * TOKENS
    offset = k_len - q_len
    p_last = gl.minimum(row + TOKENS, q_len) - 1 + offset
    start, n_left, n_full, n_all = window_key_blocks(
        row + offset, p_last, k_len, window_size, BLOCK_N, CAUSAL, WINDOWED
    )
    n_all = gl.maximum(n_all, 1)
    return (
        valid, batch, kv_head * GROUP + g, kv_head, q_start, q_len, k_start, k_len, row, start,
        n_left, n_full, n_all,
    )  # fmt: skip


@gluon.jit
def load_partition(
    q_desc, k_desc, v_desc, sink_k_desc, sink_v_desc,
    q_smem, k_smem, v_smem, sink_k_smem, sink_v_smem, bars,
    tiles_ptr, cu_q_ptr, cu_k_ptr,
    window_size,
    q_batch_rows, k_batch_rows, v_batch_rows, q_head_cols, k_head_cols, v_head_cols,
    num_q, num_k, num_heads, num_blocks, num_tiles, heads_together,
    GROUP: gl.constexpr, HAS_SINK_KEYS: gl.constexpr, VARLEN: gl.constexpr, PAIRED: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Issue every TMA load of this program's tiles, as buffers become free."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty, sink_full, sink_empty, _tail_done = bars
    count = 0
    steps = gl.cdiv(num_tiles, gl.num_programs(0))
    done = 0
    for step in range(steps):
        tile = tile_index(step)
        if tile < num_tiles:
            (
                valid, batch, head, kv_head, q_start, _q_len, k_start, _k_len, row, start,
                _n_left, _n_full, n_all,
            ) = tile_place(
                tile, tiles_ptr, cu_q_ptr, cu_k_ptr, num_q, num_k, num_blocks, num_heads,
                heads_together, window_size, GROUP, VARLEN, PAIRED, CAUSAL, WINDOWED, BLOCK_N,
            )  # fmt: skip
            if valid:
                q_row = batch * q_batch_rows + q_start + row
                k_row = batch * k_batch_rows + k_start
                v_row = batch * v_batch_rows + k_start
                k_col = kv_head * k_head_cols
                v_col = kv_head * v_head_cols
                for i in gl.static_range(2):
                    if PAIRED:
                        place = [q_row, (head + i) * q_head_cols]
                    else:
                        place = [q_row + i * ROWS, head * q_head_cols]
                    mbarrier.wait(q_empty.index(i), (done & 1) ^ 1)
                    mbarrier.expect(q_full.index(i), q_desc.block_type.nbytes)
                    tma_load(q_desc, place, q_full.index(i), q_smem.index(i))
                if HAS_SINK_KEYS:
                    mbarrier.wait(sink_empty, (done & 1) ^ 1)
                    mbarrier.expect(sink_full, 2 * sink_k_desc.block_type.nbytes)
                    tma_load(sink_k_desc, [k_row, k_col], sink_full, sink_k_smem)
                    tma_load(sink_v_desc, [v_row, v_col], sink_full, sink_v_smem)
                for j in range(n_all):
                    stage = count % STAGES
                    free = ((count // STAGES) & 1) ^ 1
                    key = start + j * BLOCK_N
                    mbarrier.wait(k_empty.index(stage), free)
                    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                    tma_load(k_desc, [k_row + key, k_col], k_full.index(stage), k_smem.index(stage))
                    mbarrier.wait(v_empty.index(stage), free)
                    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                    tma_load(v_desc, [v_row + key, v_col], v_full.index(stage), v_smem.index(stage))
                    count += 1
                done += 1
