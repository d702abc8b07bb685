"""Tiles of the combining kernel for Hopper (Gluon), and the warps that copy their inputs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsek_kernels.common.kernels.gluon_names import (
    async_load,
    reinterpret,
    thread_barrier,
    tma_load,
)
from sparsek_kernels.nsa.selected.kernels.fwd_combine import is_near

COPY_WARPS: gl.constexpr = gl.constexpr(4)
CHUNK: gl.constexpr = gl.constexpr(32)


@gluon.jit
def tile_place(
    index, sizes, maps, MAPPED: gl.constexpr, VARLEN: gl.constexpr, BLOCK_T: gl.constexpr
):
    """Where tile ``index`` lies.

    Returns ``(live, kv_head, batch, start, end, base_row, k_start, k_len, shift)``: rows
    ``start ..`` before ``end`` of ``[B * N]``, the sequence's first row, its keys, and the position
    of a query in its sequence minus its row.
    """
    first_row, num_rows, _num_q, num_k, offset, _num_kv_heads, num_tiles = sizes
    cu_rows_ptr, cu_first_ptr, tiles_ptr = maps
    kv_head = index // num_tiles
    tile = index % num_tiles
    batch = kv_head * 0
    base_row = kv_head * 0
    k_start = kv_head * 0
    k_len = num_k
    start = first_row
    end = first_row + num_rows
    live = index >= 0
    if MAPPED:
        seq = gl.load(tiles_ptr + tile.to(gl.int64) * 2)
        tile = gl.load(tiles_ptr + tile.to(gl.int64) * 2 + 1)
        live = seq >= 0
        seq = gl.maximum(seq, 0)
        start = gl.load(cu_rows_ptr + seq)
        end = gl.load(cu_rows_ptr + seq + 1)
        base_row = gl.load(cu_first_ptr + seq)
        if VARLEN:
            k_start = base_row
            k_len = gl.load(cu_first_ptr + seq + 1) - base_row
        else:
            batch = seq
    start += tile * BLOCK_T
    return live, kv_head, batch, start, end, base_row, k_start, k_len, offset - base_row


@gluon.jit
def near_steps(start, end, shift, BLOCK_T: gl.constexpr, SEL_BLOCK: gl.constexpr):
    """``(first step, steps, low)``: step 0 is the first block, step ``i`` block ``low + i - 1``."""
    low = gl.maximum((start + shift) // SEL_BLOCK - 1, 0)
    high = (gl.minimum(start + BLOCK_T, end) - 1 + shift) // SEL_BLOCK
    return gl.where(low > 0, 0, 1), high - low + 2, low


@gluon.jit
def tile_blocks(
    shared, sizes, start, kv_head,
    SHARED: gl.constexpr, MOST: gl.constexpr, BLOCK_T: gl.constexpr, TOP_N: gl.constexpr,
):  # fmt: skip
    """The tile's list of shared blocks, how many they are, and the places that have parts.

    Without ``SHARED`` there are none, and every place may have parts.  The last place is always
    taken, and is no bit.
    """
    _far_ptr, lists_ptr, counts_ptr, first_tile = shared
    if SHARED:
        at = (first_tile + (start - sizes[0]) // BLOCK_T).to(gl.int64) * sizes[5] + kv_head
        places = gl.load(counts_ptr + 2 * at + 1) & ((1 << (TOP_N - 1)) - 1)
        return lists_ptr + at * MOST, gl.load(counts_ptr + 2 * at), places
    else:
        return lists_ptr, start * 0, start * 0 + ((1 << (TOP_N - 1)) - 1)


@gluon.jit
def first_place(places):
    """The lowest set bit of a word above 0, whose highest bit is not set."""
    return ((places & -places).to(gl.float32).to(gl.int32, bitcast=True) >> 23) - 127


@gluon.jit
def step_block(step, steps, low, blocks_ptr, SHARED: gl.constexpr):
    """The block of a step: the first, those from ``low`` on, then the shared ones."""
    block = gl.where(step == 0, 0, low + step - 1)
    if SHARED and step >= steps:
        block = gl.load(blocks_ptr + (step - steps))
    return block


@gluon.jit
def is_far(block, own):
    """Whether a query in block ``own`` has a part for ``block``; -1, for none, has none."""
    return (block >= 0) & (is_near(block, own) == 0)


@gluon.jit
def _copy_rows(
    tile,
    base_ptr,
    mask_smem,
    bit, octet_t, octet_r,
    BLOCK_G: gl.constexpr,
):  # fmt: skip
    """Start copies to ``tile [ROWS, HEAD_DIM]``; rows without bit ``bit`` in the mask are zeros.

    Row ``r`` lies ``r // BLOCK_G * octet_t + r % BLOCK_G * octet_r`` groups of eight elements after
    ``base_ptr``.
    """
    ROWS: gl.constexpr = tile.shape[0]
    HEAD_DIM: gl.constexpr = tile.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [COPY_WARPS, 1], [1, 0]
    )
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, WIDE))[None, :]
    for chunk in gl.static_range(ROWS // CHUNK):
        row = chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, WIDE))
        held = mask_smem.slice(chunk * CHUNK, CHUNK).load(gl.SliceLayout(1, WIDE))
        at = (row // BLOCK_G * octet_t + row % BLOCK_G * octet_r).to(gl.int64) * 8
        async_load(
            tile.slice(chunk * CHUNK, CHUNK),
            base_ptr + at[:, None] + col,
            mask=(((held >> bit) & 1) != 0)[:, None],
        )


@gluon.jit
def _copy_tile(
    ring,
    bars,
    count,
    base_ptr,
    mask_smem,
    bit, octet_t, octet_r,
    BLOCK_G: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``_copy_rows`` to buffer number ``count`` of the ring, once it is free; the next number."""
    full, empty = bars
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
    _copy_rows(ring.index(stage), base_ptr, mask_smem, bit, octet_t, octet_r, BLOCK_G)
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    return count + 1


@gluon.jit
def _copy_box(ring, bars, count, desc, token, kv_head, STAGES: gl.constexpr):
    """The keys or values from ``token`` on to buffer number ``count`` in one bulk copy."""
    full, empty = bars
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
    box: gl.constexpr = [1, ring.shape[1], 1, ring.shape[2]]
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)  # one of the arrivals
    tma_load(
        desc, [0, token, kv_head, 0], full.index(stage),
        reinterpret(ring.index(stage), ring.dtype, box, desc.layout),
    )  # fmt: skip
    mbarrier.arrive(full.index(stage), count=32 * COPY_WARPS - 1)
    return count + 1


@gluon.jit
def copy_partition(
    pointers, ring,
    bars,
    queries,
    mask_smem, row_smem,
    strides, sizes, maps, shared, num_items,
    GROUP: gl.constexpr, BLOCK_G: gl.constexpr, TOP_N: gl.constexpr, BLOCK_S: gl.constexpr,
    SEL_BLOCK: gl.constexpr, MAPPED: gl.constexpr, VARLEN: gl.constexpr, GATED: gl.constexpr,
    SHARED: gl.constexpr, MOST: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy tiles into the ring, in the order in which the computing partition takes them."""
    part_ptr, q_ptr, k_ptr, v_ptr, cmp_ptr, swa_ptr, indices_ptr, k_desc, v_desc = pointers
    octet_qb, octet_qt, octet_qh, octet_kb, octet_kt, octet_kh, octet_vb, octet_vt, octet_vh = (
        strides
    )
    first_row, _num_rows, _num_q, _num_k, _offset, num_kv_heads, _num_tiles = sizes
    ROWS: gl.constexpr = ring.shape[1]
    BLOCK_T: gl.constexpr = ROWS // BLOCK_G
    HEAD_DIM: gl.constexpr = ring.shape[2]
    OCTETS: gl.constexpr = HEAD_DIM // 8
    LIST: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [COPY_WARPS, 1], [1, 0])
    offs_r = gl.arange(0, ROWS, gl.SliceLayout(1, LIST))
    offs_s = gl.arange(0, BLOCK_S, gl.SliceLayout(0, LIST))
    key = gl.arange(0, ROWS, gl.SliceLayout(1, LIST))
    q_smem, q_full, q_empty = queries
    count = 0
    turn = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        live, kv_head, batch, start, end, base_row, k_start, k_len, shift = tile_place(
            index, sizes, maps, MAPPED, VARLEN, BLOCK_T
        )
        if live:
            wide_start = start.to(gl.int64)
            row = start + offs_r // BLOCK_G
            inside = (row < end) & (offs_r % BLOCK_G < GROUP)
            thread_barrier()
            row_smem.store(inside.to(gl.int32))
            thread_barrier()
            q_row = wide_start
            if not VARLEN:
                q_row -= base_row
            q_at = batch.to(gl.int64) * octet_qb + q_row * octet_qt
            q_at += (kv_head * GROUP).to(gl.int64) * octet_qh
            mbarrier.wait(q_empty, (turn & 1) ^ 1)
            _copy_rows(q_smem, q_ptr + q_at * 8, row_smem, 0, octet_qt, octet_qh, BLOCK_G)
            async_copy.mbarrier_arrive(q_full, increment_count=False)
            turn += 1
            k_at = (batch.to(gl.int64) * octet_kb + kv_head.to(gl.int64) * octet_kh) * 8
            v_at = (batch.to(gl.int64) * octet_vb + kv_head.to(gl.int64) * octet_vh) * 8
            first, steps, low = near_steps(start, end, shift, BLOCK_T, SEL_BLOCK)
            blocks_ptr, num_shared, places = tile_blocks(
                shared, sizes, start, kv_head, SHARED, MOST, BLOCK_T, TOP_N
            )
            for step in range(first, steps + num_shared):
                token = step_block(step, steps, low, blocks_ptr, SHARED) * SEL_BLOCK
                if BOXES:
                    count = _copy_box(ring, bars, count, k_desc, token, kv_head, STAGES)
                    count = _copy_box(ring, bars, count, v_desc, token, kv_head, STAGES)
                else:
                    thread_barrier()
                    mask_smem.store((token + key < k_len).to(gl.int32))
                    thread_barrier()
                    wide_token = (k_start + token).to(gl.int64) * 8
                    count = _copy_tile(
                        ring, bars, count, k_ptr + k_at + wide_token * octet_kt, mask_smem, 0,
                        octet_kt, 0, 1, STAGES,
                    )  # fmt: skip
                    count = _copy_tile(
                        ring, bars, count, v_ptr + v_at + wide_token * octet_vt, mask_smem, 0,
                        octet_vt, 0, 1, STAGES,
                    )  # fmt: skip
            choice = row.to(gl.int64) * num_kv_heads + kv_head
            if SHARED:
                bits = gl.load(shared[0] + choice, mask=inside, other=0)
            else:
                listed = gl.load(
                    indices_ptr + choice[:, None] * TOP_N + offs_s[None, :],
                    mask=inside[:, None] & (offs_s < TOP_N)[None, :],
                    other=-1,
                )  # [ROWS, BLOCK_S]
                own = (row + shift) // SEL_BLOCK
                far = is_far(listed, own[:, None]).to(gl.int32) << offs_s[None, :]
                bits = gl.sum(far, 1)
            thread_barrier()
            mask_smem.store(bits)
            thread_barrier()
            slot = ((wide_start - first_row) * num_kv_heads + kv_head) * TOP_N
            octet_t = num_kv_heads * (TOP_N * GROUP * OCTETS)
            while places != 0:
                s = first_place(places)
                places &= places - 1
                count = _copy_tile(
                    ring, bars, count, part_ptr + (slot + s) * (GROUP * HEAD_DIM), mask_smem, s,
                    octet_t, OCTETS, BLOCK_G, STAGES,
                )  # fmt: skip
            count = _copy_tile(
                ring, bars, count, part_ptr + (slot + TOP_N - 1) * (GROUP * HEAD_DIM), mask_smem,
                TOP_N - 1, octet_t, OCTETS, BLOCK_G, STAGES,
            )  # fmt: skip
            if GATED:
                at = (wide_start * num_kv_heads + kv_head) * (GROUP * HEAD_DIM)
                octet_t = num_kv_heads * (GROUP * OCTETS)
                count = _copy_tile(
                    ring, bars, count, cmp_ptr + at, row_smem, 0, octet_t, OCTETS, BLOCK_G,
                    STAGES,
                )  # fmt: skip
                count = _copy_tile(
                    ring, bars, count, swa_ptr + at, row_smem, 0, octet_t, OCTETS, BLOCK_G,
                    STAGES,
                )  # fmt: skip
