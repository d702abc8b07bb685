"""Pieces of the Hopper kernels that compute in warpgroups (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _weights(s, m, scale_log2, MASKED: gl.constexpr):
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)  # [ROWS]
    m_ref = m_new
    if MASKED:
        m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale_log2 - m_ref[:, None])  # [ROWS, BLOCK_N]
    alpha = gl.exp2(m - m_ref)  # [ROWS]
    return p, m_new, alpha


@gluon.jit
def softmax_step(s, m, total, scale_log2, MASKED: gl.constexpr):
    """Fold a block of raw scores into the online softmax; masked scores are ``-inf``.

    Returns the block's weights, the new maximum and sum, and the factor for the old output.
    """
    p, m, alpha = _weights(s, m, scale_log2, MASKED)
    return p, m, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def lane_sums(p, LANES: gl.constexpr):
    """Row sums ``[rows, 4]`` of ``p [rows, 128]`` in each of the four lanes that share a row."""
    N: gl.constexpr = p.shape[0]
    return gl.convert_layout(gl.sum(gl.sum(p.reshape([N, 16, 4, 2]), 3), 1), LANES)


@gluon.jit
def softmax_lanes_step(s, m, total, scale_log2, MASKED: gl.constexpr):
    """:func:`softmax_step` of 128 keys, with sums ``total [rows, 4]`` of each lane: no shuffles."""
    LANES: gl.constexpr = total.type.layout
    p, m, alpha = _weights(s, m, scale_log2, MASKED)
    alpha_lanes = gl.convert_layout(alpha, gl.SliceLayout(1, LANES))
    return p, m, total * alpha_lanes[:, None] + lane_sums(p, LANES), alpha


@gluon.jit
def anchor(total, ptr):
    """Keep the softmax above the next wait for the tensor cores.

    The assembler is free to sink arithmetic below the wait, which would leave the tensor cores
    idle meanwhile.  A store that never happens (``total`` is not negative) depends on it and
    may not be moved.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never;
        setp.lt.f32 never, $1, 0f00000000;
        @never st.global.f32 [$2], $1;
        mov.b32 $0, $1;
        }""",
        "=r,r,l",
        [total, ptr.to(gl.int64)],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
