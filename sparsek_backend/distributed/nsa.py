"""Native sparse attention over a sharded stream (arXiv 2502.11089).

Each rank makes the compressed blocks that end in its tokens, from a halo of ``l - d`` tokens before
them, and fetches the blocks before its own, the keys and values before its tokens, and the window.
Every query then chooses and attends as it would on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from sparsek_backend.distributed.calls import offsets_of, on_device
from sparsek_backend.distributed.exchange import Fetch
from sparsek_backend.distributed.layouts import Segment, SequenceLayout, check_mesh, check_shard
from sparsek_backend.distributed.mesh import channel_of
from sparsek_backend.distributed.rows import (
    Ownership,
    Range,
    Stretch,
    Transfers,
    plan_transfers,
    take_rows,
)
from sparsek_kernels import nsa_attention, nsa_compress
from sparsek_kernels.checks import check_int, check_scale, check_tensor
from sparsek_kernels.nsa.checks import DTYPES, check_like_keys, check_query
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


@dataclass(frozen=True)
class Group:
    """One call of the kernels: the rank's rows that are its queries, and packed offsets."""

    rows: tuple[slice, ...]
    cu_seqlens: tuple[int, ...] | None


@dataclass(frozen=True)
class NSAPlan:
    """What a rank exchanges and launches; each exchange but ``halo`` has a request a group.

    Args:
        halo: the exchange of the tokens that this rank's blocks are made of.
        blocks: of each segment with new blocks, the position of the first and how many.
        compressed: the exchange of compressed blocks.
        selected: the exchange of the selected branch's keys.
        sliding: the exchange of the window's keys.
        groups: the calls.
    """

    halo: Transfers
    blocks: tuple[tuple[int, int], ...]
    compressed: Transfers
    selected: Transfers
    sliding: Transfers
    groups: tuple[Group, ...]


def _groups(segments: tuple[Segment, ...], batch: int) -> list[list[Segment]]:
    """Segments that start their sequences in one packed call, each other one in its own.

    A packed call has the keys of its queries alone; a single sequence may have more before them.
    """
    whole = [x for x in segments if x.start == x.sequence]
    cut = [[x] for x in segments if x.start > x.sequence]
    return ([[x] for x in whole] if batch > 1 else [whole] if whole else []) + cut


@lru_cache(maxsize=64)
def plan_nsa(
    layout: SequenceLayout, rank: int, spec: NSASpec, window_size: int, batch: int
) -> NSAPlan:
    """The plan of one rank, from the layout alone."""
    first_block, total = {}, 0
    for lo, hi in pairwise(layout.edges):
        if lo < hi:
            first_block[lo] = total
            total += spec.num_compressed(hi - lo)

    tokens: list[list[list[Range]]] = []  # that each rank's blocks are made of
    held: list[tuple[Stretch, ...]] = []
    made: list[list[tuple[int, int]]] = []
    for segments in layout.segments:
        ranges, own, new, row = [], [], [], 0
        for x in segments:
            lo, hi = (spec.num_compressed(edge - x.sequence) for edge in (x.start, x.stop))
            if lo < hi:  # blocks that end in the segment
                first = lo * spec.cmp_stride
                last = (hi - 1) * spec.cmp_stride + spec.cmp_block_size
                ranges.append((x.sequence + first, x.sequence + last))
                start = first_block[x.sequence]
                own.append(Stretch(start + lo, start + hi, row))
                new.append((first, hi - lo))
                row += hi - lo
        tokens.append([ranges])
        held.append(tuple(own))
        made.append(new)
    groups = [_groups(segments, batch) for segments in layout.segments]

    def exchange(owners: Ownership, keys: Callable[[Segment], Range]) -> Transfers:
        asked = [[[keys(x) for x in group] for group in of_rank] for of_rank in groups]
        return plan_transfers(owners, asked, rank)

    def compressed(x: Segment) -> Range:
        start = first_block[x.sequence]
        return start, start + spec.num_compressed(x.stop - x.sequence)

    return NSAPlan(
        plan_transfers(layout.ownership, tokens, rank),
        tuple(made[rank]),
        exchange(Ownership(tuple(held)), compressed),
        exchange(layout.ownership, lambda x: (x.sequence, x.stop)),
        exchange(layout.ownership, lambda x: (max(x.sequence, x.start - window_size + 1), x.stop)),
        tuple(
            Group(
                tuple(x.rows for x in group),
                offsets_of(len(x) for x in group) if len(group) > 1 else None,
            )
            for group in groups[rank]
        ),
    )


def _compress(
    compression: Compression, tokens: tuple[torch.Tensor, ...], plan: NSAPlan, spec: NSASpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that end in this rank's tokens, in the order of its segments."""
    k, v = tokens
    reach = spec.cmp_block_size - spec.cmp_stride
    lengths = [count * spec.cmp_stride + reach for _, count in plan.blocks]
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
    window_size: int,
) -> list[torch.Tensor]:
    """Check the tensors of a call and return them."""
    check_query(q)
    check_shard("q", q, layout)
    check_like_keys("k", k, q, q.shape[1])
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
    weights = [] if compression is None else [compression.phi_k, compression.phi_v]
    return [q, k, *like.values(), *gates, *(x for phi in weights if phi is not None for x in phi)]


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
    check_mesh(mesh, layout)
    channel = channel_of(mesh)
    spec = spec or NSASpec()
    with channel.agreed() as facts:
        tensors = _check(q, k, v, gates, layout, compression, sliding, window_size)
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
    selected = Fetch(channel, plan.selected, (k, v))
    window = None if sliding is None else Fetch(channel, plan.sliding, sliding)
    made = _compress(compression, halo.wait()[0], plan, spec)
    compressed = Fetch(channel, plan.compressed, made).wait()
    keys = selected.wait()
    nearest = None if window is None else window.wait()
    found: list[tuple[int, torch.Tensor]] = []
    for i, group in enumerate(plan.groups):
        cu_seqlens = None if group.cu_seqlens is None else on_device(group.cu_seqlens, q.device)
        rows_q, *rows_g = (take_rows(x, group.rows) for x in (q, *gates))
        k_cmp, v_cmp = compressed[i]
        if cu_seqlens is not None:
            k_cmp, v_cmp = (_padded(x, rows_q.shape[1] // spec.cmp_stride) for x in (k_cmp, v_cmp))
        k_swa, v_swa = (None, None) if nearest is None else nearest[i]
        out: Any = nsa_attention(
            rows_q,
            *keys[i],
            *rows_g,
            k_cmp=k_cmp,
            v_cmp=v_cmp,
            k_swa=k_swa,
            v_swa=v_swa,
            **asdict(spec),
            window_size=window_size,
            softmax_scale=scale,
            cu_seqlens=cu_seqlens,
        )
        parts = out.split([x.stop - x.start for x in group.rows], 1)
        found += [(x.start, part) for x, part in zip(group.rows, parts, strict=True)]
    found.sort(key=lambda part: part[0])
    return found[0][1] if len(found) == 1 else torch.cat([part for _, part in found], 1)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero rows behind compressed blocks, up to the bound that packed calls have."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[1]))
