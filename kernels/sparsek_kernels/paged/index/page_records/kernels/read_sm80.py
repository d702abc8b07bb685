"""Two records of a turn, from memory to the registers that matrix instructions take (Gluon).

Of a record's levels the thread ``4 g + k`` has rows ``g``, ``g + 8``, ``g + 16`` and ``g + 24``,
and of every row the bytes from ``k * HEAD_DIM / 16`` on.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek_kernels.common.kernels.gluon_names import async_load, reinterpret
from sparsek_kernels.paged.index.page_records.kernels.lanes_sm80 import (
    LANES,
    halves_of_bytes,
    of_lanes,
    shuffle_long,
    to_lanes,
    unpack,
)
from sparsek_kernels.paged.kernels.record import mean_at, pairs_at, scales_at, variance_at


@gluon.jit
def units_of(table, segment, page_units, PAGE: gl.constexpr, RECORD: gl.constexpr):
    """Where segments' records are from the first one on, in 16 bytes, int64."""
    page = gl.load(table + segment * 64 // PAGE).to(gl.int64)
    return page * page_units + (segment * 64 % PAGE) // 64 * (RECORD // 16)


@gluon.jit
def copy_rows(to, records, first, second, ROWS: gl.constexpr, LIMIT: gl.constexpr):
    """Begin to copy ``ROWS`` times 16 bytes of each of two records, or fewer: a limit.

    first, second: ``[32]``, where they are, in 16 bytes; one more for each thread.
    """
    EACH: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, EACH)
    TIMES: gl.constexpr = ROWS // 32
    if ROWS < 32:
        at = gl.where(gl.arange(0, 32, layout=LANES) < ROWS, first, second - ROWS)
    else:
        GRID: gl.constexpr = gl.BlockedLayout([2, TIMES, 1], [1, 1, 32], [1, 1, 1], [2, 1, 0])
        both = gl.convert_layout(
            gl.permute(gl.join(first, second), [1, 0]), gl.SliceLayout(1, GRID), assert_trivial=True
        )
        step = gl.arange(0, TIMES, layout=gl.SliceLayout(0, gl.SliceLayout(2, GRID)))
        at = gl.reshape(both[:, None, :] + 32 * step[None, :, None], [2 * ROWS])
    at = gl.convert_layout(at, ROW, assert_trivial=True)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, EACH))[None, :]
    inside = (gl.arange(0, 2 * ROWS, layout=ROW) % ROWS < LIMIT)[:, None] & (word >= 0)
    at = (records + 16 * at).to(gl.pointer_type(gl.int32))[:, None] + word
    async_load(to, at, mask=inside)


@gluon.jit
def copy_turn(levels, rest, records, units, which, HEAD_DIM: gl.constexpr, RECORD: gl.constexpr):
    """Begin to copy the record ``which`` and the next one of 32 to shared memory.

    units: where each thread's record is, in 16 bytes.
    """
    ROWS: gl.constexpr = HEAD_DIM // 2  # of the levels
    lane = gl.arange(0, 32, layout=LANES)
    first = shuffle_long(units, of_lanes(which)) + lane
    second = shuffle_long(units, of_lanes(which + 1)) + lane
    copy_rows(levels, records, first, second, ROWS, ROWS)
    copy_rows(rest, records, first + ROWS, second + ROWS, HEAD_DIM // 4, RECORD // 16 - ROWS)


@gluon.jit
def load_levels(levels, RECORD: gl.constexpr, W: gl.constexpr):
    """A record's levels, of ``[4 * records, 32, W]``: of rows ``g + 8 j``, ``W`` words each."""
    LINE: gl.constexpr = gl.BlockedLayout([1, W], [32, 1], [1, 1], [1, 0])
    out = ()
    for j in gl.static_range(4):
        out = out + unpack(levels.index(4 * RECORD + j).load(LINE), W)
    return out


@gluon.jit
def load_rows(rows, FIRST: gl.constexpr, N: gl.constexpr):
    """``N`` words of row ``FIRST + k`` of ``[rows, N]``."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 1, N], [8, 4, 1], [1, 1, 1], [2, 1, 0])
    x = rows.slice(FIRST, 4, dim=0).load(gl.SliceLayout(0, LINE))
    x = x[None, :, :] + gl.zeros([8, 4, N], gl.int32, LINE)
    return unpack(gl.reshape(x, [32, N]), N)


@gluon.jit
def load_parts(rows, FIRST: gl.constexpr, PARTS: gl.constexpr, N: gl.constexpr):
    """``N`` words of the row that a thread's part has, of ``[2, rows, N]``, from ``FIRST`` on."""
    LINE: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, N], [2, 4 // PARTS, 4 * PARTS, 1], [1, 1, 1, 1], [3, 2, 1, 0]
    )
    x = rows.slice(FIRST, 4 * PARTS, dim=1).load(gl.SliceLayout(1, LINE))
    x = x[:, None, :, :] + gl.zeros([2, 4 // PARTS, 4 * PARTS, N], gl.int32, LINE)
    return unpack(gl.reshape(x, [32, N]), N)


@gluon.jit
def load_bytes(rows, ROW: gl.constexpr):
    """Byte ``g`` of row ``ROW`` of ``[2, rows, 8]``, of the record ``k / 2``."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1], [2, 1, 8, 2], [1, 1, 1, 1], [3, 0, 2, 1])
    x = rows.slice(ROW, 1, dim=1).load(gl.SliceLayout(3, LINE)).to(gl.int32)
    x = x[:, :, :, None] + gl.zeros([2, 1, 8, 2], gl.int32, LINE)
    return to_lanes(gl.reshape(gl.permute(x, [2, 1, 0, 3]), [32]))


@gluon.jit
def load_turn(levels, rest, PARTS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """What a turn takes of its two records.

    levels: ``[8, 32, W]`` words; rest: ``[HEAD_DIM / 2, 4]`` words.
    """
    W: gl.constexpr = HEAD_DIM // 64
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    MEANS: gl.constexpr = HEAD_DIM // PARTS // 8  # words of a thread
    KEPT: gl.constexpr = 2 if HEAD_DIM // PARTS < 32 else PARTS
    VARIANCES: gl.constexpr = HEAD_DIM // KEPT // 32
    of_means = reinterpret(rest, gl.int32, [2, HEAD_DIM // MEANS, MEANS], PLAIN3)
    of_variances = reinterpret(rest, gl.int32, [2, HEAD_DIM // VARIANCES, VARIANCES], PLAIN3)
    of_rows = reinterpret(rest, gl.int32, [2, HEAD_DIM // W, W], PLAIN)
    of_bytes = reinterpret(rest, gl.uint8, [2, HEAD_DIM // 2, 8], PLAIN3)
    means = load_parts(of_means, 0, PARTS, MEANS)
    START: gl.constexpr = mean_at(HEAD_DIM)  # of `rest`; what follows counts from it
    OF_VARIANCES: gl.constexpr = (variance_at(HEAD_DIM) - START) // (4 * VARIANCES)
    OF_PAIRS: gl.constexpr = (pairs_at(HEAD_DIM) - START) // (4 * W)
    OF_SCALES: gl.constexpr = (scales_at(HEAD_DIM) - START) // 8
    words = load_parts(of_variances, OF_VARIANCES, KEPT, VARIANCES)
    variances = ()
    for i in gl.static_range(VARIANCES):
        variances = variances + halves_of_bytes(words[i])
    pairs, rows = (), ()
    for r in gl.static_range(2):
        pairs = pairs + load_rows(of_rows.index(r), OF_PAIRS, W)
        rows = rows + load_levels(levels, r, W)
    scales = (
        load_bytes(of_bytes, OF_SCALES), load_bytes(of_bytes, OF_SCALES + 1),
        load_bytes(of_bytes, OF_SCALES + 2), load_bytes(of_bytes, OF_SCALES + 3),
    )  # fmt: skip
    return rows, pairs, load_bytes(of_bytes, OF_SCALES + 4), scales, means, variances
