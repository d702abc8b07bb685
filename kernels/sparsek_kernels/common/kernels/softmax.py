"""Online softmax in base 2, with scores whose scale is folded into the exponent.

The running state of a row is ``(m, total)``: the maximum of the scaled base-2 scores so far and the
sum of ``exp2(score - m)``; the caller keeps ``acc``, the sum of ``exp2(score - m) * v``
(FlashAttention-2, arXiv 2307.08691, section 3.1).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_init(sink_logit, BLOCK_M: tl.constexpr, HAS_SINK: tl.constexpr):
    """State ``(m, total)`` before the first key; a learned sink is a key that carries no value."""
    if HAS_SINK:
        m = tl.zeros([BLOCK_M], dtype=tl.float32) + sink_logit * LOG2E  # [BLOCK_M]
        total = tl.where(m == float("-inf"), 0.0, 1.0)  # [BLOCK_M]
    else:
        m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)  # [BLOCK_M]
        total = tl.zeros([BLOCK_M], dtype=tl.float32)  # [BLOCK_M]
    return m, total


@triton.jit
def softmax_step(m, total, scores, scale_log2, MASKED: tl.constexpr):
    """Fold a block of raw scores in; masked scores are ``-inf``.

    Returns the new ``m`` and ``total``, the block's weights and the factor for the old ``acc``.
    """
    m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)  # [BLOCK_M]
    # A row that has seen no key yet has m_new = -inf, and -inf - -inf is NaN.
    m_ref = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = tl.exp2(scores * scale_log2 - m_ref[:, None])  # [BLOCK_M, BLOCK_N]
    alpha = tl.exp2(m - m_ref)  # [BLOCK_M]
    total = total * alpha + tl.sum(p, 1)  # [BLOCK_M]
    return m_new, total, p, alpha


@triton.jit
def softmax_finish(m, total):
    """``(1 / total, natural log-sum-exp)``; a row without keys gives ``(1, -inf)``."""
    lse = tl.where(total > 0.0, (m + tl.log2(total)) * LN2, float("-inf"))  # [BLOCK_M]
    return 1.0 / tl.where(total > 0.0, total, 1.0), lse
