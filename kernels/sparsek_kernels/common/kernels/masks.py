"""Sink + sliding-window visibility as block ranges, for query-major and key-major loops.

A tile of queries (keys) meets the other side in up to three consecutive runs of blocks: masked,
unmasked, masked.  Only the first and last need per-element masks.  Positions are key indices;
query row ``i`` of a sequence sits at position ``i + k_len - q_len``.
"""

import triton
import triton.language as tl


@triton.jit
def window_key_blocks(
    p_first, p_last, k_len, window_size,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Key blocks for queries at positions ``p_first .. p_last`` (inclusive).

    Returns ``(start, n_left, n_full, n_all)``: blocks are ``BLOCK_N`` keys from ``start`` on;
    blocks ``[0, n_left)`` and ``[n_full, n_all)`` need masks, ``[n_left, n_full)`` none.
    """
    if CAUSAL:
        end = tl.minimum(tl.maximum(p_last + 1, 0), k_len)
        start = 0
        left_end = 0
        if WINDOWED:
            start = tl.minimum(tl.maximum(p_first - window_size + 1, 0), end)
            left_end = tl.maximum(p_last - window_size + 1, start)
        n_all = tl.cdiv(end - start, BLOCK_N)
        n_left = 0
        if WINDOWED:
            n_left = tl.minimum(tl.cdiv(left_end - start, BLOCK_N), n_all)
        n_full = tl.maximum(tl.minimum(p_first + 1, end) - start, 0) // BLOCK_N
        n_full = tl.maximum(n_full, n_left)
    else:
        start = 0
        n_left = 0
        n_full = k_len // BLOCK_N
        n_all = tl.cdiv(k_len, BLOCK_N)
    return start, n_left, n_full, n_all


@triton.jit
def window_query_blocks(
    n_first, n_last, q_len, k_len, window_size,
    BLOCK_M: tl.constexpr, ALIGN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Query blocks whose window meets keys ``n_first .. n_last`` (inclusive).

    Returns ``(start, m_left, m_full, m_all)``: blocks are ``BLOCK_M`` rows from row ``start`` on
    (a multiple of ``ALIGN``); blocks ``[m_left, m_full)`` see every one of the keys.
    """
    offset = k_len - q_len
    start = 0
    left_end = 0
    full_end = q_len
    end = q_len
    if CAUSAL:
        start = tl.minimum(tl.maximum(n_first - offset, 0), q_len) // ALIGN * ALIGN
        left_end = tl.maximum(n_last - offset, 0)
        if WINDOWED:
            end = tl.maximum(tl.minimum(n_last + window_size - offset, q_len), start)
            full_end = tl.minimum(tl.maximum(n_first + window_size - offset, start), q_len)
    m_all = tl.cdiv(end - start, BLOCK_M)
    m_left = tl.minimum(tl.cdiv(tl.maximum(left_end - start, 0), BLOCK_M), m_all)
    m_full = tl.maximum((full_end - start) // BLOCK_M, m_left)
    return start, m_left, tl.minimum(m_full, m_all), m_all


@triton.jit
def last_key(pos, KEY_BLOCK: tl.constexpr, KEY_STRIDE: tl.constexpr):
    """Last key that a query at token ``pos`` sees, -1 for none.

    Key ``c`` stands for tokens ``c KEY_STRIDE .. c KEY_STRIDE + KEY_BLOCK - 1`` and is seen once
    all of them are in the past.
    """
    if KEY_BLOCK == 1:
        return pos
    else:
        return tl.maximum(pos + 1 - KEY_BLOCK + KEY_STRIDE, 0) // KEY_STRIDE - 1


@triton.jit
def visible(
    pos, key, num_sink, window_size,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SINKS_TOO: tl.constexpr,
):  # fmt: skip
    """Whether queries at ``pos`` see ``key`` (broadcast against each other).

    ``SINKS_TOO`` decides whether a sink key outside of the window counts.
    """
    if CAUSAL:
        seen = key <= pos
        if WINDOWED:
            inside = key > pos - window_size
            if SINKS_TOO:
                inside = inside | (key < num_sink)
            seen = seen & inside
    else:
        seen = (key >= 0) & (pos == pos)
    return seen
