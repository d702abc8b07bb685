"""Public function of sink + sliding-window flash attention: checks and dispatch only."""

from __future__ import annotations

import torch

from sparsek_kernels.common.operators import new_like, new_lse
from sparsek_kernels.sink_window import ops
from sparsek_kernels.sink_window.checks import check_arguments
from sparsek_kernels.sink_window.problem import SinkWindowProblem
from sparsek_kernels.sink_window.replay import remembered, replay, replay_key


def sink_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    num_sink: int = 0,
    window_size: int | None = None,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over the first keys and a sliding window; differentiable.

    Query ``i``, counted from the end of the keys (position ``i + M - N``), sees key ``j <= i`` when
    ``j < num_sink`` or ``j > i - window_size``.  ``window_size=None`` is plain causal attention,
    ``causal=False`` full attention.  A query that sees no key gives zeros.  With ``sinks`` the
    denominator of head ``h`` has the extra term ``exp(sinks[h])``, which carries no value.

    CUDA tensors run Triton kernels; CPU tensors, and fp64 anywhere, run the same arithmetic in
    torch operations.  ``cu_seqlens_*`` on a GPU are validated once per tensor, which waits for
    the device that once (never while a graph is captured).

    Args:
        q: ``[B, N, Hq, D]``, fp16, bf16, fp32 or fp64, any strides, D from 1 to 256.
        k: ``[B, M, Hkv, D]``, Hq a multiple of Hkv.
        v: ``[B, M, Hkv, D]``.
        num_sink: leading keys of each sequence that every later query sees; of no effect, and
            warned of, without ``window_size``.
        window_size: latest keys that a query sees, its own included; ``None`` for all.
        causal: ``False`` lets every query see every key; needs ``window_size=None``.
        sinks: ``[Hq]`` learned logits (GPT-OSS), any floating dtype.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        cu_seqlens_q: ``[S + 1]`` int32 offsets of S packed sequences; B must be 1.
        cu_seqlens_k: ``[S + 1]`` int32 offsets of their keys.
        out: ``[B, N, Hq, D]`` tensor to write, when no gradient is needed.
        return_lse: also return the log-sum-exp.

    Returns:
        The output ``[B, N, Hq, D]`` and, with ``return_lse``, the natural logarithm of the softmax
        denominator ``[B, Hq, N]`` in fp32 (the term of ``sinks`` included; ``-inf`` where it is
        empty).  Both are differentiable.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device or value; the message names the argument.

    Source:
        Xiao et al., "Efficient Streaming Language Models with Attention Sinks"
        (arXiv 2309.17453), section 3; Dao, "FlashAttention-2" (arXiv 2307.08691), algorithms 1
        and 2.
    """
    key = None
    plain = cu_seqlens_q is None and sinks is None and out is None
    if plain and not torch.compiler.is_compiling():
        key = replay_key(q, k, v, num_sink, window_size, causal, softmax_scale, return_lse)
        if key is not None:
            replayed = replay(key, q, k, v, return_lse)
            if replayed is not None:
                return replayed
    spec = check_arguments(
        q, k, v, num_sink, window_size, causal, sinks, softmax_scale,
        cu_seqlens_q, cu_seqlens_k, out,
    )  # fmt: skip
    if key is not None:
        out, lse = new_like(q), new_lse(q) if return_lse else None
        with remembered(key, (out, lse, q, k, v)):
            ops.forward_into(SinkWindowProblem(q, k, v, spec), out, lse)
        return out if lse is None else (out, lse)
    if out is not None:
        lse = ops.sink_flash_fwd_out(out, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *spec)
    else:
        out, lse = ops.sink_flash_fwd(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *spec)
    return (out, lse) if return_lse else out
