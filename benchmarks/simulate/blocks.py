"""Logits of blocks of 64 keys, and attention over chosen blocks: kernels on a GPU, else torch."""

from __future__ import annotations

import math

import torch

from .decode import dense_logits
from .sketches import PAGE


def block_logits(
    q: torch.Tensor,
    x: torch.Tensor,
    softmax_scale: float,
    *,
    base: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    largest: bool = False,
) -> torch.Tensor:
    """``[H, M, blocks]`` fp32: the log of the sum of the exps of each block's vectors.

    Args:
        q: ``[H, M, D]``.
        x: ``[H, blocks, vectors, D]``; on a GPU it is rounded to the type of q.
        softmax_scale: of the products.
        base: ``[H, M, blocks]``, added.
        rows: ``[M]``, of which row ``i`` sees the vectors up to ``rows[i]``; else all are seen.
        largest: the largest product counts alone.
    """
    if q.is_cuda:
        return launch_block_logits(q, x, softmax_scale, base, rows, largest)
    made = (q.float() @ x.float().flatten(1, 2).mT) * softmax_scale
    if rows is not None:
        late = torch.arange(made.shape[-1], device=q.device) > rows[:, None]
        made = made.masked_fill(late, -math.inf)
    made = made.unflatten(-1, x.shape[1:3])
    made = made.amax(-1) if largest else made.logsumexp(-1)
    return made if base is None else made + base


def launch_block_logits(
    q: torch.Tensor,
    x: torch.Tensor,
    softmax_scale: float,
    base: torch.Tensor | None,
    rows: torch.Tensor | None,
    largest: bool,
) -> torch.Tensor:
    """:func:`block_logits` by a kernel; D must be a power of two."""
    from .kernels import block_logits_kernel

    heads, count, head_dim = q.shape
    blocks, vectors = x.shape[1:3]
    out = torch.full((heads, count, blocks), -math.inf, device=q.device)
    block_m, steps = 128, 8
    grid = (-(-count // block_m), -(-blocks * vectors // (PAGE * steps)), heads)
    block_logits_kernel[grid](
        out, q.contiguous(), x.to(q.dtype).contiguous(), out if base is None else base.contiguous(),
        q if rows is None else rows.contiguous(), softmax_scale, count, blocks,
        D=head_dim, VECTORS=vectors, LARGEST=largest, BASE=base is not None,
        CAUSAL=rows is not None, BLOCK_M=block_m, STEPS=steps, num_warps=8,
    )  # fmt: skip
    return out


def attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weights: torch.Tensor,
    tile: int,
    start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[H, G, R, D]`` and the log of each row's sum of exps, ``[H, G, R]`` in fp32.

    Args:
        q: ``[H, G, R, D]``, whole tiles.
        k: ``[H, N, D]``.
        v: ``[H, N, D]``.
        weights: ``[H, tiles, blocks]`` fp32, for how many blocks one counts; 0 is not attended.
            The first block always is.
        tile: rows that share a choice.
        start: the first row's position; those from ``N`` on count as the last.
    """
    if q.is_cuda:
        return launch_attend_blocks(q, k, v, weights, tile, start)
    keys = torch.arange(k.shape[1], device=q.device)
    rows = torch.arange(start, start + q.shape[2], device=q.device).clamp(max=k.shape[1] - 1)
    logs = weights.log().repeat_interleave(tile, 1).repeat_interleave(PAGE, 2)[..., : k.shape[1]]
    logits = dense_logits(q, k) * k.shape[-1] ** -0.5 + logs[:, None]
    logits = logits.masked_fill(keys > rows[:, None], -math.inf)
    return (logits.softmax(-1) @ v.float()[:, None]).to(q.dtype), logits.logsumexp(-1)


def launch_attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weights: torch.Tensor,
    tile: int,
    start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`attend_blocks` by a kernel; D must be a power of two."""
    from .kernels import attend_blocks_kernel

    (heads, groups), head_dim = q.shape[:2], q.shape[-1]
    (tiles, blocks), chosen = weights.shape[1:], weights > 0
    lists = chosen.byte().sort(dim=-1, descending=True, stable=True).indices
    logs = weights.gather(-1, lists).log()
    out, lse = q.new_empty(q.shape), torch.empty(q.shape[:3], device=q.device)
    block_m = 128 if groups * tile > 64 else 64
    attend_blocks_kernel[-(-groups * tile // block_m), tiles, heads](
        out, lse, q.contiguous(), k.contiguous(), v.contiguous(), lists.int(), logs,
        chosen.sum(-1, dtype=torch.int32), head_dim**-0.5, start, k.shape[1], tiles, blocks,
        D=head_dim, GROUP=groups, TILE=tile, BLOCK_M=block_m, num_warps=8 if block_m == 128 else 4,
        num_stages=2,
    )  # fmt: skip
    return out, lse
