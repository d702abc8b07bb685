"""Contiguous keys and values of one layer while decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from sparsek_kernels.nsa.spec import NSASpec


class NSACache:
    """What one layer keeps of the tokens seen so far, for a batch of equally long sequences.

    Keys are stored rotated, and attended, in the cache's dtype.  Of the compressed branch only
    finished blocks are kept, with the unrotated tokens that an unfinished block still needs (fewer
    than ``cmp_block_size``).  All buffers are allocated once, or longer by :meth:`reserve`.

    Args:
        spec: block sizes of the layer.
        batch: sequences.
        max_len: tokens that fit.
        num_kv_heads: KV heads.
        head_dim: elements of a head.
        shared_kv: whether the sliding branch reads the selected branch's K and V.
        device: where the buffers live.
        dtype: their dtype.
    """

    def __init__(
        self,
        spec: NSASpec,
        batch: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        shared_kv: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        def make(rows: int) -> torch.Tensor:
            return torch.zeros((2, batch, rows, num_kv_heads, head_dim), device=device, dtype=dtype)

        self.spec = spec
        self.max_len = max_len
        self.length = 0
        self.compressed_length = 0
        self.selected = make(max_len)
        self.sliding = self.selected if shared_kv else make(max_len)
        self.compressed = make(spec.num_compressed(max_len))
        self.pending = make(0)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the keys and values."""
        return self.selected.dtype

    def reserve(self, max_len: int) -> None:
        """Make room for ``max_len`` tokens in all; what is there stays."""
        if max_len <= self.max_len:
            return
        shared = self.sliding is self.selected
        self.selected = _longer(self.selected, max_len)
        self.sliding = self.selected if shared else _longer(self.sliding, max_len)
        self.compressed = _longer(self.compressed, self.spec.num_compressed(max_len))
        self.max_len = max_len

    def reorder(self, sequences: torch.Tensor) -> None:
        """Put sequence ``sequences[i]`` in place ``i``; int64, on the cache's device."""
        shared = self.sliding is self.selected
        self.selected = self.selected.index_select(1, sequences)
        self.sliding = self.selected if shared else self.sliding.index_select(1, sequences)
        self.compressed = self.compressed.index_select(1, sequences)
        self.pending = self.pending.index_select(1, sequences)

    def append_tokens(
        self,
        selected: tuple[torch.Tensor, torch.Tensor],
        sliding: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Append keys and values ``[B, N, Hkv, D]`` of the two token-level branches.

        Raises:
            ValueError: another batch than the cache's, or more tokens than fit; the cache is as it
                was.
        """
        batch, count = selected[0].shape[:2]
        if batch != self.selected.shape[1]:
            raise ValueError(f"cache: expected a batch of {self.selected.shape[1]}, got {batch}")
        if self.length + count > self.max_len:
            raise ValueError(
                f"cache: expected at most {self.max_len} tokens, got {self.length} + {count}"
            )
        rows = slice(self.length, self.length + count)
        for i in range(2):
            self.selected[i, :, rows] = selected[i]
            if self.sliding is not self.selected:
                self.sliding[i, :, rows] = sliding[i]
        self.length += count

    def take_pending(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unrotated tokens from the first unfinished compressed block on, new ones included.

        What the next unfinished block needs of them is kept.
        """
        tokens = torch.cat([self.pending, torch.stack([k, v]).to(self.dtype)], dim=2)
        finished = self.spec.num_compressed(tokens.shape[2])
        self.pending = tokens[:, :, finished * self.spec.cmp_stride :].clone()
        return tokens[0], tokens[1]

    def append_compressed(self, k_cmp: torch.Tensor, v_cmp: torch.Tensor) -> None:
        """Append finished blocks ``[B, C, Hkv, D]``, keys rotated."""
        rows = slice(self.compressed_length, self.compressed_length + k_cmp.shape[1])
        self.compressed[0, :, rows] = k_cmp
        self.compressed[1, :, rows] = v_cmp
        self.compressed_length = rows.stop


def _longer(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``x [2, B, rows, H, D]`` with zero rows behind its own."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[2]))


@contextmanager
def unchanged_on_error(caches: Iterable[NSACache]) -> Iterator[None]:
    """Give caches back the tokens that they had before the block if it raises.

    Rows past a cache's length are never read, so its lengths and its unfinished block are all that
    has to be restored.
    """
    before = [(cache, cache.length, cache.compressed_length, cache.pending) for cache in caches]
    try:
        yield
    except BaseException:
        for cache, length, compressed_length, pending in before:
            cache.length, cache.compressed_length = length, compressed_length
            cache.pending = pending
        raise
