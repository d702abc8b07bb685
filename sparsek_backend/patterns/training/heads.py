"""Which heads attend everything and which sinks and a window alone, by what they would lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sparsek_backend.patterns.entries import check_count
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_backend.patterns.training.masses import sampled_tokens
from sparsek_kernels.block_sparse.structure import check_block_size
from sparsek_kernels.checks import check_heads, check_scale

_MOST_SCORES = 1 << 24
"""Scores held at a time: of a few queries of a KV head's group to all keys."""


class WindowErrors:
    """What each query head of a layer loses with sinks and a window: the error of its output.

    Exact attention of some queries of each block, of all keys and of those of the window.  The
    squares of the differences are counted as a share of the squares of the layer's outputs, so that
    layers can be compared.  Attention that is spread over far keys of like values loses little,
    attention that finds a far key loses much.

    Args:
        windows: sizes to be told apart, in blocks.
        block_size: tokens along a side of a block.
        sinks: first key blocks, which every window has.
        samples: queries of each block that are looked at.
        seed: of the queries drawn.
    """

    def __init__(
        self,
        windows: Sequence[int],
        block_size: int,
        *,
        sinks: int = 1,
        samples: int = 4,
        seed: int = 0,
    ) -> None:
        for window in windows:
            check_count("windows", window, 1)
        check_block_size(block_size)
        check_count("sinks", sinks, 0)
        check_count("samples", samples, 1)
        self.windows, self.block_size = tuple(windows), block_size
        self.sinks, self.samples = sinks, samples
        self._generator = torch.Generator().manual_seed(seed)
        self._errors: dict[int, torch.Tensor] = {}
        self._energy = torch.zeros(())

    @torch.no_grad()
    def observe(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
    ) -> None:
        """Count ``q [B, N, Hq, D]``, ``k`` and ``v [B, N, Hkv, D]`` of causal attention."""
        scale, length = check_scale(softmax_scale, q.shape[3]), q.shape[1]
        group = check_heads(q.shape[2], k.shape[2])
        tokens, real = sampled_tokens(length, self.block_size, self.samples, self._generator)
        at = tokens[real].to(q.device)
        keys, values = (x.float().permute(0, 2, 1, 3) for x in (k, v))  # [B, Hkv, N, D]
        key = torch.arange(length, device=q.device)
        for some in at.split(max(_MOST_SCORES // (len(q) * group * length), 1)):
            hidden = key > some[:, None]
            near = [self._near(some, key, window) for window in self.windows]
            for head in range(k.shape[2]):
                mine = slice(head * group, (head + 1) * group)
                queries = q[:, some, mine].float().transpose(1, 2)  # [B, G, T, D]
                scores = torch.matmul(queries, keys[:, head, None].mT).mul_(scale)
                weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
                value = values[:, head, None]
                out = torch.matmul(weights, value)
                self._energy = self._energy + out.square().sum().cpu()
                for window, seen in zip(self.windows, near, strict=True):
                    left = weights * seen
                    total = left.sum(-1, keepdim=True).clamp(min=1e-30)
                    error = torch.matmul(left, value) / total - out
                    sums = self._errors.setdefault(window, torch.zeros(q.shape[2]))
                    sums[mine] += error.square().sum((0, 2, 3)).cpu()

    def shares(self, window: int) -> torch.Tensor:
        """``[Hq]``: of the squares of the layer's outputs, what each head loses by a window."""
        return self._errors[window] / self._energy.clamp(min=1e-30)

    def _near(self, tokens: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
        """``[T, N]`` bool: the keys of sinks and window."""
        block, own = key // self.block_size, tokens[:, None] // self.block_size
        return (block > own - window) | (block < self.sinks)


def whole_heads(
    errors: Mapping[int, torch.Tensor],
    num_tokens: int,
    block_size: int,
    *,
    window: int,
    sinks: int = 1,
    sparsity: float,
) -> dict[int, BlockSparsePattern]:
    """Patterns in which the heads that lose most attend everything, the others sinks and a window.

    Heads of all layers share one budget: those that find far tokens are few and sit in some layers
    (DuoAttention, Xiao et al., arXiv 2410.10819).

    Args:
        errors: ``[Hq]`` by layer, such as :meth:`WindowErrors.shares`.
        num_tokens: of the texts that the patterns are for.
        block_size: tokens along a side of a block.
        window: latest key blocks of the heads that do not attend everything.
        sinks: their first key blocks.
        sparsity: share of the visible blocks of all heads to leave out.

    Returns:
        By layer; at least sinks and window for every head, also where that is more than the budget.
    """
    if not 0.0 <= sparsity < 1.0:
        raise ValueError(f"sparsity: expected a number from 0 to below 1, got {sparsity}")
    blocks = -(-num_tokens // block_size)
    near = BlockSparsePattern.local((blocks, blocks), block_size, window=window, sinks=sinks).mask()
    everything = torch.ones_like(near).tril()
    each, least = int(everything.sum()), int(near.sum())
    flat = torch.cat(list(errors.values()))
    budget = round((1.0 - sparsity) * each * len(flat)) - least * len(flat)
    count = min(max(budget // max(each - least, 1), 0), len(flat))
    whole = torch.zeros(len(flat), dtype=torch.bool)
    whole[flat.cpu().argsort(descending=True, stable=True)[:count]] = True
    parts = whole.split([len(x) for x in errors.values()])
    masks = (torch.where(part[:, None, None], everything, near) for part in parts)
    return {
        layer: BlockSparsePattern.from_mask(mask, block_size)
        for layer, mask in zip(errors, masks, strict=True)
    }
