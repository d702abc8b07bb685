"""Public function of sink-window and dense attention under context parallelism."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from sparsek_backend.distributed.halo import HaloAttention, plan_halo
from sparsek_backend.distributed.layouts import SequenceLayout, check_layout, check_shard
from sparsek_backend.distributed.mesh import channel_of
from sparsek_backend.distributed.ring import RingAttention, plan_ring
from sparsek_kernels.sink_window.checks import check_arguments


@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_sink_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: DeviceMesh,
    layout: SequenceLayout,
    num_sink: int = 0,
    window_size: int | None = None,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`sparsek_kernels.sink_flash_attention` of sequences that lie on several ranks.

    With a window each rank fetches the ``window_size - 1`` keys before its tokens and the sinks
    from the ranks that hold them; without one, keys go round in a ring.  All ranks call this, and
    its backward pass, in the same order.

    ``sinks`` is a parameter that every rank holds.  Its gradient is the share of this rank's
    queries alone.  Sum it over the ranks once, as the gradients of the model's weights are summed
    (FSDP2, DDP, an all-reduce).

    Args:
        q: this rank's queries ``[B, n, Hq, D]``, ``n = layout.tokens_per_rank``.
        k: this rank's keys ``[B, n, Hkv, D]``.
        v: this rank's values ``[B, n, Hkv, D]``.
        mesh: one dimension with the ranks of ``layout``.
        layout: which rank holds which tokens; B must be 1 for packed sequences.
        num_sink: leading keys of each sequence that every later query sees; of no effect, and
            warned of, without ``window_size``.
        window_size: latest keys that a query sees, its own included; ``None`` for all.
        causal: ``False`` lets every query see every key of its sequence; needs
            ``window_size=None``.
        sinks: ``[Hq]`` learned logits, the same on every rank.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        return_lse: also return the log-sum-exp.

    Returns:
        This rank's rows of the output, ``[B, n, Hq, D]``, and with ``return_lse`` of the
        log-sum-exp ``[B, Hq, n]``.  Both are differentiable, once.

    Raises:
        TypeError: on every rank, where an argument of one has a wrong type or dtype.
        ValueError: on every rank, where an argument of one has a wrong shape or value, or differs
            among the ranks; the message names it.
        RuntimeError: a rank failed, or did not answer within the process group's timeout.
    """
    channel = channel_of(mesh)
    with channel.agreed() as facts:
        check_layout(layout, mesh)
        facts["layout"] = layout
        spec = check_arguments(q, k, v, num_sink, window_size, causal, sinks, softmax_scale)
        check_shard("q", q, layout)
        check_shard("k", k, layout)
        tracked = (q, k, v) if sinks is None else (q, k, v, sinks)
        facts.update(
            q=(tuple(q.shape), str(q.dtype), q.device.type),
            k=tuple(k.shape),
            num_sink=num_sink,
            window_size=window_size,
            causal=causal,
            sinks=None if sinks is None else str(sinks.dtype),
            softmax_scale=spec.softmax_scale,
            requires_grad=torch.is_grad_enabled() and any(x.requires_grad for x in tracked),
        )
    batch = q.shape[0]
    if spec.window_size is None:
        ring = plan_ring(layout, channel.rank, spec.causal, batch)
        found = RingAttention.apply(q, k, v, sinks, channel, ring, spec)  # type: ignore[no-untyped-call]
    else:
        halo = plan_halo(layout, channel.rank, spec.num_sink, spec.window_size, batch)
        found = HaloAttention.apply(q, k, v, sinks, channel, halo, spec)  # type: ignore[no-untyped-call]
    out, lse = found
    return (out, lse) if return_lse else out
