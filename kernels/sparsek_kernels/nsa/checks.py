"""Argument checks of native sparse attention: each failure names what came and what was due."""

from __future__ import annotations

import torch

from sparsek_kernels.checks import check_heads, check_offsets, check_tensor

MAX_GROUP = 64


def check_sequences(cu_seqlens: torch.Tensor, total: int, device: torch.device) -> None:
    """Check offsets of one packed sequence or more."""
    check_offsets("cu_seqlens", cu_seqlens, total, device)
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected two offsets or more, got {cu_seqlens.shape[0]}")


def check_pair(
    k: object,
    v: object,
    q: torch.Tensor,
    branch: str = "",
    rows: int | str = "M",
    heads: int | str = "Hkv",
) -> None:
    """Check keys and values ``[B, rows, heads, D]`` that go with ``q``.

    Args:
        branch: what ends the names of both.
    """
    shape = (q.shape[0], rows, heads, q.shape[3])
    keys = check_tensor(f"k{branch}", k, shape, (q.dtype,), q.device)
    check_tensor(f"v{branch}", v, tuple(keys.shape), (q.dtype,), q.device)
    group = check_heads(q.shape[2], keys.shape[2])
    if group > MAX_GROUP:
        raise NotImplementedError(
            f"q: expected at most {MAX_GROUP} query heads per KV head, got {group}; "
            "repeat k and v to shrink the group"
        )


def check_lengths(q: torch.Tensor, num_keys: int, cu_seqlens: torch.Tensor | None) -> None:
    """Queries are the last tokens of the keys; packed sequences have as many of both."""
    if cu_seqlens is None:
        if q.shape[1] > num_keys:
            raise ValueError(
                f"q: expected at most as many tokens as keys, {num_keys}, got {q.shape[1]}"
            )
        return
    if q.shape[0] != 1:
        raise ValueError(f"q: expected batch size 1 with cu_seqlens, got {q.shape[0]}")
    if q.shape[1] != num_keys:
        raise ValueError(
            f"q: expected as many tokens as keys with cu_seqlens, {num_keys}, got {q.shape[1]}"
        )
    check_sequences(cu_seqlens, num_keys, q.device)


def check_indices(
    block_indices: object,
    q: torch.Tensor,
    num_kv_heads: int,
    num_keys: int,
    sel_block_size: int,
    cu_seqlens: torch.Tensor | None,
    values: bool,
) -> torch.Tensor:
    """Selected blocks ``[B, N, Hkv, S]`` int32; ``values`` also checks what they hold."""
    indices = check_tensor(
        "block_indices",
        block_indices,
        (q.shape[0], q.shape[1], num_kv_heads, "S"),
        (torch.int32,),
        q.device,
    )
    if not values or indices.numel() == 0:
        return indices
    limit = torch.full((1, 1), -(-num_keys // sel_block_size), device=q.device)
    if cu_seqlens is not None:
        token = torch.arange(num_keys, dtype=torch.int32, device=q.device)
        seq = torch.searchsorted(cu_seqlens[1:], token, right=True)
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        limit = (-(-lengths // sel_block_size))[seq][None]
    wrong = (indices < -1) | (indices >= limit[..., None, None])
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_indices: expected -1 or a block of the sequence, "
            f"got {int(indices[tuple(at)])} at {at}"
        )
    ordered = indices.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        at = twice.nonzero()[0].tolist()
        raise ValueError(
            f"block_indices: expected distinct blocks, got {int(ordered[..., 1:][tuple(at)])} "
            f"twice at {at[:3]}"
        )
    return indices
