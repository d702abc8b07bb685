"""Oracle of block-sparse attention: plain torch, fp32 or fp64, one mask matrix per head.

Written to be read: the blocks become a mask, then scores, a softmax, a weighted sum.
"""

from __future__ import annotations

import torch


def block_sparse_mask(
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    block_size: int,
    num_q: int,
    num_k: int,
    causal: bool,
) -> torch.Tensor:
    """Which key each query sees: ``[P, num_q, num_k]`` bool, for P patterns.

    Args:
        crow_indices: ``[P, R + 1]`` offsets of each row of blocks in ``col_indices``.
        col_indices: ``[nnz]`` key block of each entry.
        causal: also ask ``j <= i + num_k - num_q``.
    """
    mask = torch.zeros(crow_indices.shape[0], num_q, num_k, dtype=torch.bool)
    for pattern, offsets in enumerate(crow_indices.tolist()):
        for row in range(len(offsets) - 1):
            queries = slice(row * block_size, (row + 1) * block_size)
            for col in col_indices[offsets[row] : offsets[row + 1]].tolist():
                mask[pattern, queries, col * block_size : (col + 1) * block_size] = True
    if causal:
        query = torch.arange(num_q)[:, None] + (num_k - num_q)
        mask &= torch.arange(num_k)[None, :] <= query
    return mask.to(crow_indices.device)


def block_sparse_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    block_size: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    dout: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    dropout: tuple[float, int, int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Attention, and with ``dout`` its gradients, computed in ``dtype``.

    Args:
        q: ``[B, N, Hq, D]``.
        k: ``[B, M, Hkv, D]``.
        v: ``[B, M, Hkv, D]``.
        crow_indices: ``[P, R + 1]``; pattern ``p`` serves query heads ``p Hq / P`` and on.
        col_indices: ``[nnz]``.
        block_size: tokens along a side of a block.
        causal: bottom-right aligned causality inside the blocks.
        softmax_scale: factor of ``q . k``; ``D ** -0.5`` when ``None``.
        dtype: precision of every operation.
        dout: ``[B, N, Hq, D]`` upstream gradient of the output.
        dlse: ``[B, Hq, N]`` upstream gradient of the log-sum-exp.
        key_mask: ``[B, M]`` bool, the keys that are seen.
        query_mask: ``[B, N]`` bool, the queries that attend.
        dropout: probability, seed and offset.

    Returns:
        ``(out [B, N, Hq, D], lse [B, Hq, N])``, followed, when ``dout`` is given, by ``dq``,
        ``dk`` and ``dv``, all in ``dtype``.
    """
    batch, num_q, num_heads, dim = q.shape
    num_k, num_kv_heads = k.shape[1:3]
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    masks = block_sparse_mask(crow_indices, col_indices, block_size, num_q, num_k, causal)
    out = q.new_zeros(q.shape, dtype=dtype)
    lse = q.new_full((batch, num_heads, num_q), float("-inf"), dtype=dtype)
    grads = [torch.zeros_like(x, dtype=dtype) for x in (q, k, v)]
    for b in range(batch):
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            mask = masks[head // (num_heads // masks.shape[0])]
            if key_mask is not None:
                mask = mask & key_mask[b]
            if query_mask is not None:
                mask = mask & query_mask[b][:, None]
            factor = None
            if dropout is not None:
                plane = b * num_heads + head
                factor = dropout_factors(num_q, num_k, plane, *dropout).to(q.device, dtype)
            leaves = [q[b, :, head], k[b, :, kv_head], v[b, :, kv_head]]
            with torch.enable_grad():
                leaves = [x.detach().to(dtype).requires_grad_(dout is not None) for x in leaves]
                head_out, head_lse = _attend(leaves, mask, scale, factor)
            out[b, :, head], lse[b, head] = head_out.detach(), head_lse.detach()
            if dout is None:
                continue
            outputs, upstream = [head_out], [dout[b, :, head].to(dtype)]
            if dlse is not None:
                outputs.append(head_lse)
                upstream.append(dlse[b, head].to(dtype))
            found = torch.autograd.grad(outputs, leaves, upstream)
            for grad, part, index in zip(grads, found, (head, kv_head, kv_head), strict=True):
                grad[b, :, index] += part
    return (out, lse) if dout is None else (out, lse, *grads)


def _attend(
    leaves: list[torch.Tensor], mask: torch.Tensor, scale: float, factor: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One head: q ``[N, D]``, k and v ``[M, D]`` -> out ``[N, D]``, lse ``[N]``."""
    q, k, v = leaves
    scores = ((q @ k.T) * scale).masked_fill(~mask, float("-inf"))
    empty = ~mask.any(dim=-1)
    lse = scores.sum(dim=-1) if k.shape[0] == 0 else torch.logsumexp(scores, dim=-1)
    lse = lse.masked_fill(empty, float("-inf"))
    probs = torch.exp(scores - lse.masked_fill(empty, 0.0)[:, None])
    probs = probs.masked_fill(empty[:, None], 0.0)
    return (probs if factor is None else probs * factor) @ v, lse


def philox(counter: torch.Tensor, seed: int) -> torch.Tensor:
    """Philox-4x32-7 (Salmon et al., SC 2011, section 4): ``[..., 4]`` words from as many."""
    words = [counter[..., i] for i in range(4)]
    key = [seed % 2**32, seed // 2**32 % 2**32]
    for _ in range(7):
        (high_0, low_0), (high_1, low_1) = _wide(words[0], 0xD2511F53), _wide(words[2], 0xCD9E8D57)
        words = [high_1 ^ words[1] ^ key[0], low_1, high_0 ^ words[3] ^ key[1], low_0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return torch.stack(words, dim=-1)


def _wide(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of the product of 32-bit words; partial products have 48 bits."""
    lower, upper = x * (factor % 2**16), x * (factor // 2**16)
    middle = upper + lower // 2**16
    return middle // 2**16, middle % 2**16 * 2**16 + lower % 2**16


def dropout_factors(
    num_q: int, num_k: int, plane: int, dropout_p: float, seed: int, offset: int
) -> torch.Tensor:
    """``[num_q, num_k]``: 0 for a dropped weight, else the inverse of the share that stays.

    Eight keys share a call of Philox, two keys share a word.

    Args:
        plane: batch entry times query heads, plus the head.
    """
    query, key = torch.arange(num_q)[:, None], torch.arange(num_k)
    rest = torch.tensor([plane, offset % 2**32])
    counter = torch.zeros(num_q, num_k, 4, dtype=torch.int64)
    counter[..., 0], counter[..., 1], counter[..., 2:] = key // 8, query, rest
    words = philox(counter, seed)
    word = words[query, key, key % 8 // 2]
    bits = torch.where(key % 2 == 0, word % 2**16, word // 2**16)
    drop = round(dropout_p * 2**16)
    return (bits >= drop) * (2**16 / (2**16 - drop))
