"""Dropout of attention weights in torch operations; ``kernels/dropout.py`` states the rule."""

from __future__ import annotations

import torch

LEVELS = 1 << 16
"""Values of the random bits of one weight: probabilities are multiples of its inverse."""

_ROUNDS = 7
_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def drop_threshold(dropout_p: float) -> int:
    """The random bits below which a weight is dropped: 0 for none, less than :data:`LEVELS`."""
    return min(round(dropout_p * LEVELS), LEVELS - 1)


def kept_weights(
    rng_state: torch.Tensor,
    drop_below: int,
    planes: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """``[*planes, queries, keys]`` bool: the weights that stay.

    Args:
        rng_state: ``[2]`` int64, seed and offset.
        drop_below: see :func:`drop_threshold`.
        planes: int64 of any shape, ``b Hq + h``.
        queries: ``[queries]`` int64.
        keys: ``[keys]`` int64.
    """
    seed, offset = rng_state.unbind()
    counter = (keys // 8, queries[:, None], planes[..., None, None], offset & _WORD)
    words = torch.stack(_philox(counter, (seed & _WORD, seed >> 32 & _WORD)), dim=-1)
    word = (keys % 8 // 2).expand(words.shape[:-1])[..., None]
    bits = words.gather(-1, word)[..., 0] >> 16 * (keys % 2)
    return (bits & (LEVELS - 1)) >= drop_below


def _philox(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Four words of 32 bits, as int64 tensors of the shape that the counter broadcasts to."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products wrap to 64 bits, all of which count.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (high >> 32 & _WORD) ^ c1 ^ k0,
            high & _WORD,
            (low >> 32 & _WORD) ^ c3 ^ k1,
            low & _WORD,
        )
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3
