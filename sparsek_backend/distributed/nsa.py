"""Native sparse attention over a sharded stream (arXiv 2502.11089).

Each rank makes the compressed blocks that end in its tokens, from a halo of ``l - d`` tokens before
them, and fetches the blocks before its own, the keys and values before its tokens, and the window.
Every query chooses and attends as on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from sparsek_backend.distributed.calls import offsets_of, on_device
from sparsek_backend.distributed.exchange import Fetch
from sparsek_backend.distributed.layouts import SequenceLayout, check_layout, check_shard
from sparsek_backend.distributed.mesh import channel_of
from sparsek_backend.distributed.nsa_calls import NSACall, NSASettings
from sparsek_backend.distributed.nsa_plan import NSAPlan, plan_nsa
from sparsek_kernels import nsa_compress
from sparsek_kernels.checks import DTYPES, check_int, check_query, check_scale, check_tensor
from sparsek_kernels.nsa.api import check_phi
from sparsek_kernels.nsa.checks import check_pair
from sparsek_kernels.nsa.compress.mlp import PhiWeights
from sparsek_kernels.nsa.spec import NSASpec


@dataclass(frozen=True, eq=False)
class Compression:
    """How compressed keys and values are made.

    Args:
        k: keys of this rank's tokens before any rotation, ``[B, n, Hkv, D]``.
        v: values of this rank's tokens.
        phi_k: weights of the learnable map for keys; the mean of a block when ``None``.
        phi_v: weights of the learnable map for values.
        rotate: turns compressed keys ``[B, C, Hkv, D]`` by the positions ``[C]`` of their first
            tokens; they stay as they are when ``None``.
    """

    k: torch.Tensor
    v: torch.Tensor
    phi_k: PhiWeights | None = None
    phi_v: PhiWeights | None = None
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


def _compress(
    compression: Compression, tokens: tuple[torch.Tensor, ...], plan: NSAPlan, spec: NSASpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that end in this rank's tokens, in the order of its segments."""
    k, v = tokens
    overlap = spec.cmp_block_size - spec.cmp_stride
    lengths = [count * spec.cmp_stride + overlap for _, count in plan.blocks]
    make = partial(
        nsa_compress,
        phi_k=compression.phi_k,
        phi_v=compression.phi_v,
        cmp_block_size=spec.cmp_block_size,
        cmp_stride=spec.cmp_stride,
    )
    if k.shape[0] == 1 and len(lengths) > 1:
        offsets = on_device(offsets_of(lengths), k.device)
        found = [make(k, v, cu_seqlens=offsets)]
    else:
        parts = zip(k.split(lengths or 0, 1), v.split(lengths or 0, 1), strict=True)
        found = [make(*part) for part in parts]
    count = sum(count for _, count in plan.blocks)
    k_cmp, v_cmp = (torch.cat(x, 1)[:, :count] for x in zip(*found, strict=True))
    if compression.rotate is not None:
        positions = [
            torch.arange(start, start + n * spec.cmp_stride, spec.cmp_stride, device=k.device)
            for start, n in plan.blocks
        ]
        empty = torch.arange(0, device=k.device)
        k_cmp = compression.rotate(k_cmp, torch.cat([empty, *positions]))
    return k_cmp, v_cmp


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layout: SequenceLayout,
    compression: Compression | None,
    sliding: tuple[torch.Tensor, torch.Tensor] | None,
    spec: NSASpec,
    window_size: int,
) -> list[torch.Tensor]:
    """Check the tensors of a call and return them."""
    check_query(q)
    check_shard("q", q, layout)
    check_pair(k, v, q, rows=q.shape[1])
    like = {"v": v}
    if compression is not None:
        like |= {"compression.k": compression.k, "compression.v": compression.v}
    if sliding is not None:
        like |= {"sliding": sliding[0], "sliding values": sliding[1]}
    for name, x in like.items():
        check_tensor(name, x, tuple(k.shape), (k.dtype,), k.device)
    for gate in gates:
        check_tensor("gates", gate, tuple(q.shape[:3]), DTYPES, q.device)
    check_int("window_size", window_size, 1)
    tensors = [q, k, *like.values(), *gates]
    phis = () if compression is None else (compression.phi_k, compression.phi_v)
    for name, phi in zip(("phi_k", "phi_v"), phis, strict=False):
        if phi is not None:
            check_phi(f"compression.{name}", phi, k, spec)
            tensors += phi
    return tensors


@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_nsa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    mesh: DeviceMesh,
    layout: SequenceLayout,
    compression: Compression | None = None,
    sliding: tuple[torch.Tensor, torch.Tensor] | None = None,
    spec: NSASpec | None = None,
    window_size: int = 512,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """:func:`sparsek_kernels.nsa_attention` of sequences that lie on several ranks.

    All ranks call this, and its backward pass, in the same order.  Gradients of keys and values are
    summed in fp32 by the rank that holds the token.  The weights of ``compression`` receive the
    share of this rank's blocks, as every weight of a model does of its tokens.

    Args:
        q: this rank's queries ``[B, n, Hq, D]``, ``n = layout.tokens_per_rank``.
        k: keys of the selected branch ``[B, n, Hkv, D]``.
        v: values of the selected branch.
        gates: of the compressed, selected and sliding branch, ``[B, n, Hq]`` each.
        mesh: one dimension with the ranks of ``layout``.
        layout: which rank holds which tokens; B must be 1 for packed sequences.
        compression: how compressed keys and values are made; means of ``k`` and ``v`` when
            ``None``.
        sliding: keys and values of the sliding branch; ``k`` and ``v`` when ``None``.
        spec: block sizes and counts.
        window_size: latest tokens that the sliding branch sees, the query's own included.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.

    Returns:
        This rank's rows of the output, ``[B, n, Hq, D]``.

    Raises:
        TypeError: on every rank, where an argument of one has a wrong type or dtype.
        ValueError: on every rank, where an argument of one has a wrong shape or value, or differs
            among the ranks; the message names it.
        RuntimeError: a rank failed, or did not answer within the process group's timeout.
    """
    channel = channel_of(mesh)
    spec = spec or NSASpec()
    with channel.agreed() as facts:
        check_layout(layout, mesh)
        tensors = _check(q, k, v, gates, layout, compression, sliding, spec, window_size)
        scale = check_scale(softmax_scale, q.shape[3])
        facts.update(
            layout=layout,
            q=(tuple(q.shape), str(q.dtype), q.device.type),
            k=tuple(k.shape),
            compression=None if compression is None else len(tensors),
            sliding=sliding is None,
            spec=spec,
            window_size=window_size,
            softmax_scale=scale,
            requires_grad=torch.is_grad_enabled() and [x.requires_grad for x in tensors],
        )
    plan = plan_nsa(layout, channel.rank, spec, window_size, q.shape[0])
    compression = compression or Compression(k, v)
    # The small exchange first: compression runs while the large ones are under way.
    halo = Fetch(channel, plan.halo, (compression.k, compression.v))
    every = Fetch(channel, plan.selected, (k, v))
    window = None if sliding is None else Fetch(channel, plan.sliding, sliding)
    made = _compress(compression, halo.wait()[0], plan, spec)
    compressed = Fetch(channel, plan.compressed, made).wait()
    settings = NSASettings(spec, window_size, scale)
    calls = [
        NSACall.of(settings, group, q, gates, blocks)
        for group, blocks in zip(plan.groups, compressed, strict=True)
    ]
    keys = every.wait()
    nearest = keys if window is None else window.wait()
    outputs = [call.attend(*pairs) for call, *pairs in zip(calls, keys, nearest, strict=True)]
    parts: list[tuple[int, torch.Tensor]] = []
    for group, out in zip(plan.groups, outputs, strict=True):
        split = out.split([x.stop - x.start for x in group.rows], 1)
        parts += [(x.start, part) for x, part in zip(group.rows, split, strict=True)]
    parts.sort(key=lambda part: part[0])
    return parts[0][1] if len(parts) == 1 else torch.cat([part for _, part in parts], 1)
