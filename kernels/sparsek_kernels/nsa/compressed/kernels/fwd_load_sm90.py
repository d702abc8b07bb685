"""Memory side of compressed attention on Hopper: arranged keys, tiles, and the warp that loads.

A thread of a product holds two neighbouring columns of every eight.  :func:`nsa_arrange_kernel`
therefore copies the keys of a tile into another order, in which a thread holds 32 successive keys:
all of its selection blocks but for what the block before the first spills into it.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsek_kernels.common.kernels.gluon_names import tma_load
from sparsek_kernels.common.kernels.masks import last_key
from sparsek_kernels.common.kernels.tiles_sm90 import tile_index
from sparsek_kernels.nsa.compressed.kernels.block_sums_sm90 import KEYS, arranged_key
from sparsek_kernels.nsa.kernels.tiles import locate_rows

ROWS: gl.constexpr = gl.constexpr(64)
Q_STAGES: gl.constexpr = gl.constexpr(2)  # tiles of queries: the next one's arrive early
# Sixteen bits of weights reach down to 2^-126 in bf16 and to 2^-14 in fp16.
BOUND_BF16: gl.constexpr = gl.constexpr(60.0)
BOUND_FP16: gl.constexpr = gl.constexpr(7.0)
_SAMPLES: tl.constexpr = tl.constexpr(64)  # query rows that a program of the arranging kernel reads


@triton.jit
def nsa_arrange_kernel(
    k_out_ptr, v_out_ptr, longest_ptr, k_ptr, v_ptr, q_ptr, cu_seqlens_ptr, cu_cmp_ptr, tiles_ptr,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_qb, stride_qt, stride_qh,
    num_cmp, num_q, rows_out,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One program: one tile of keys and values of one KV head, zeros after the last.

    Contiguous ``[B, rows_out, Hkv, D]``; a packed sequence starts at the tile :func:`first_tile`.
    ``longest [2]``, zeros before, are the lengths of the longest key and of the longest of some
    query rows.
    """
    seq = tl.program_id(2)
    tile = tl.program_id(0)
    start = 0
    length = num_cmp
    batch = seq.to(tl.int64)
    to = tile
    q_start = 0
    q_len = num_q
    if VARLEN:
        batch = seq.to(tl.int64) * 0
        seq = tl.load(tiles_ptr + tile.to(tl.int64) * 2)
        tile = tl.load(tiles_ptr + tile.to(tl.int64) * 2 + 1)
        if seq < 0:
            return
        start = tl.load(cu_cmp_ptr + seq)
        length = tl.load(cu_cmp_ptr + seq + 1) - start
        q_start = tl.load(cu_seqlens_ptr + seq)
        q_len = tl.load(cu_seqlens_ptr + seq + 1) - q_start
        to = first_tile(start, seq) + tile
    head = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, KEYS)
    key = tile * KEYS + arranged_key(place)  # [KEYS]
    held = (key < length)[:, None]
    row = (start + key).to(tl.int64)[:, None]
    col = tl.arange(0, HEAD_DIM)[None, :]
    k = tl.load(k_ptr + batch * stride_kb + row * stride_kt + head * stride_kh + col, held, 0.0)
    v = tl.load(v_ptr + batch * stride_vb + row * stride_vt + head * stride_vh + col, held, 0.0)
    row = (batch * rows_out + to * KEYS + place)[:, None] * tl.num_programs(1) + head
    tl.store(k_out_ptr + row * HEAD_DIM + col, k)
    tl.store(v_out_ptr + row * HEAD_DIM + col, v)
    sample = tl.arange(0, _SAMPLES)
    token = (tile * 4099 + sample * 257) % tl.maximum(q_len, 1)
    member = head * GROUP + sample % GROUP
    at = batch * stride_qb + (q_start + token).to(tl.int64) * stride_qt + member * stride_qh
    q = tl.load(q_ptr + at[:, None] + col, q_len > 0, 0.0)
    tl.atomic_max(longest_ptr, _longest(k))
    tl.atomic_max(longest_ptr + 1, _longest(q))


@triton.jit
def _longest(x):
    """Length of the longest row."""
    x = x.to(tl.float32)
    return tl.sqrt(tl.max(tl.sum(x * x, 1), 0))


@triton.jit
def first_tile(start, seq):
    """Tile of arranged keys with which a packed sequence begins whose first row is ``start``."""
    return start // KEYS + seq


@gluon.jit
def place(
    where, tile,
    GROUP: gl.constexpr, VARLEN: gl.constexpr, BOUNDED: gl.constexpr, CMP_BLOCK: gl.constexpr,
    CMP_STRIDE: gl.constexpr,
):  # fmt: skip
    """Head, rows and steps of a tile; heads of a group are neighbours, long tiles come first.

    Without ``BOUNDED``, a tile is valid if the launch before left it or left all.
    """
    (
        tiles_ptr, cu_rows_ptr, cu_seqlens_ptr, cu_cmp_ptr, left_ptr, all_left, first_row, num_rows,
        num_heads, num_blocks,
    ) = where  # fmt: skip
    rest = tile // GROUP
    block = num_blocks - 1 - rest % num_blocks
    rest = rest // num_blocks
    num_kv_heads = num_heads // GROUP
    kv_head = rest % num_kv_heads
    seq, block, batch, q_start, q_len, c_start, _c_len, offset = locate_rows(
        block, rest // num_kv_heads, tiles_ptr, cu_rows_ptr, cu_seqlens_ptr, cu_cmp_ptr,
        first_row, num_rows, 0, 0, VARLEN,
    )  # fmt: skip
    row = block * (2 * ROWS)
    first = last_key(row + offset, CMP_BLOCK, CMP_STRIDE)
    last = last_key(gl.minimum(row + 2 * ROWS, q_len) - 1 + offset, CMP_BLOCK, CMP_STRIDE)
    full = (first + 1) // KEYS
    steps = gl.maximum(last // KEYS + 1, 1)
    key_tile = c_start * 0
    valid = True
    if VARLEN:
        valid = seq >= 0
        key_tile = first_tile(c_start, gl.maximum(seq, 0))
    if not BOUNDED:
        valid = (gl.load(left_ptr + tile) != 0) | all_left
        if VARLEN:
            valid = valid & (seq >= 0)
    head = kv_head * GROUP + tile % GROUP
    return valid, batch, head, kv_head, q_start, q_len, row, offset, key_tile, full, steps


@gluon.jit
def load_partition(
    where,
    q_desc, k_desc, v_desc,
    q_smem, k_smem, v_smem, bars,
    q_batch_rows, q_head_cols, k_batch_rows,
    num_tiles,
    GROUP: gl.constexpr, VARLEN: gl.constexpr, BOUNDED: gl.constexpr, STAGES: gl.constexpr,
    CMP_BLOCK: gl.constexpr, CMP_STRIDE: gl.constexpr,
):  # fmt: skip
    """Issue every copy of this program's tiles, as buffers become free."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
    count = 0
    done = 0
    for step in range(gl.cdiv(num_tiles, gl.num_programs(0))):
        tile = tile_index(step)
        if tile < num_tiles:
            valid, batch, head, kv_head, q_start, _, row, _, key_tile, _, steps = place(
                where, tile, GROUP, VARLEN, BOUNDED, CMP_BLOCK, CMP_STRIDE
            )
            if valid:
                q_row = batch * q_batch_rows + q_start + row
                k_row = batch * k_batch_rows + key_tile * KEYS
                col = kv_head * HEAD_DIM
                for i in gl.static_range(2):
                    slot = done % Q_STAGES * 2 + i
                    mbarrier.wait(q_empty.index(slot), ((done // Q_STAGES) & 1) ^ 1)
                    mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
                    tma_load(
                        q_desc, [q_row + i * ROWS, head * q_head_cols], q_full.index(slot),
                        q_smem.index(slot),
                    )  # fmt: skip
                for j in range(steps):
                    stage = count % STAGES
                    free = ((count // STAGES) & 1) ^ 1
                    mbarrier.wait(k_empty.index(stage), free)
                    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                    tma_load(
                        k_desc, [k_row + j * KEYS, col], k_full.index(stage), k_smem.index(stage)
                    )
                    mbarrier.wait(v_empty.index(stage), free)
                    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                    tma_load(
                        v_desc, [k_row + j * KEYS, col], v_full.index(stage), v_smem.index(stage)
                    )
                    count += 1
                done += 1
