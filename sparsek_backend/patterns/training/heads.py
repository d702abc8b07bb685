"""A window of its own for every head, by what a head loses with each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from sparsek_backend.patterns.masses import sampled_tokens
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_kernels.block_sparse.structure import check_block_size
from sparsek_kernels.checks import check_heads, check_int, check_scale


def window_sizes(num_tokens: int, block_size: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to all blocks of ``num_tokens``."""
    blocks = -(-num_tokens // block_size)
    powers = [2**x for x in range(blocks.bit_length())]
    sizes = {size for x in powers for size in (x, x + x // 2)}
    return [x for x in sorted(sizes) if x < blocks] + [blocks]


class WindowErrors:
    """What each query head of a layer loses with sinks and windows: the error of its output.

    Some queries of each block attend all keys, then the keys of each window.  The error is the sum
    of the squared differences of both outputs, as a share of the layer's squared outputs, so that
    layers can be compared.  A head that spreads its attention over far keys of like values loses
    little, a head that finds a far key loses much.

    Args:
        windows: sizes to be told apart, in blocks, growing.
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
        if not windows or list(windows) != sorted({max(x, 1) for x in windows}):
            raise ValueError(f"windows: expected growing sizes from 1 on, got {list(windows)}")
        check_block_size(block_size)
        check_int("sinks", sinks, 0)
        check_int("samples", samples, 1)
        self.windows, self.block_size = tuple(windows), block_size
        self.sinks, self.samples = sinks, samples
        self._generator = torch.Generator().manual_seed(seed)
        self._errors = torch.zeros(())
        self._energy = torch.zeros(())

    @torch.no_grad()
    def observe(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None
    ) -> None:
        """Count ``q [B, N, Hq, D]``, ``k`` and ``v [B, N, Hkv, D]`` of causal attention."""
        with torch.autocast(q.device.type, enabled=False):
            scale = check_scale(softmax_scale, q.shape[3])
            group = check_heads(q.shape[2], k.shape[2])
            keys, values = (x.float().transpose(1, 2) for x in (k, v))  # [B, Hkv, N, D]
            drawn = sampled_tokens(q.shape[1], self.block_size, self.samples, self._generator)
            for row, (tokens, real) in enumerate(zip(*drawn, strict=True)):
                some = tokens[real].to(q.device)
                first, stop = row * self.block_size, min((row + 1) * self.block_size, q.shape[1])
                queries = q[:, some].float().unflatten(2, (-1, group))  # [B, T, Hkv, G, D]
                queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G T, D]
                scores = torch.matmul(queries, keys[:, :, :stop].mT).mul_(scale)
                hidden = torch.arange(first, stop, device=q.device) > some[:, None]
                scores[..., first:].masked_fill_(hidden.repeat(group, 1), float("-inf"))
                outs = self._outs(scores.softmax(-1), values[:, :, :stop], row)
                error = (outs[:-1] - outs[-1]).square()  # [W, B, Hkv, G T, D]
                of_heads = error.unflatten(3, (group, -1)).sum((1, 4, 5))  # [W, Hkv, G]
                self._errors = self._errors + of_heads.flatten(1).T.cpu()
                self._energy = self._energy + outs[-1].square().sum().cpu()

    def _outs(self, weights: torch.Tensor, values: torch.Tensor, row: int) -> torch.Tensor:
        """``[W + 1, B, Hkv, G T, D]``: the outputs of each window, and of everything."""
        size = self.block_size
        stop = values.shape[2]
        sinks = min(self.sinks * size, stop)
        out = torch.matmul(weights[..., :sinks], values[:, :, :sinks])
        total = weights[..., :sinks].sum(-1, keepdim=True)
        found = []
        for window in (*self.windows, row + 1):
            start = min(max((row + 1 - window) * size, sinks), stop)
            if start < stop:
                out = out + torch.matmul(weights[..., start:stop], values[:, :, start:stop])
                total = total + weights[..., start:stop].sum(-1, keepdim=True)
                stop = start
            found.append(out / total)
        return torch.stack(found)

    def shares(self) -> torch.Tensor:
        """``[Hq, W]``: of the squares of the layer's outputs, what a head loses by a window."""
        return self._errors / self._energy.clamp(min=1e-30)


def fit_windows(
    errors: Mapping[int, torch.Tensor],
    windows: Sequence[int],
    num_tokens: int,
    block_size: int,
    *,
    sinks: int = 1,
    sparsity: float,
) -> dict[int, BlockSparsePattern]:
    """Patterns of sinks and a window for each head, of all that fit those with the least error.

    Heads of all layers share one budget: heads that find far tokens are few and sit in some layers
    (DuoAttention, Xiao et al., arXiv 2410.10819), others need a few blocks.  This is a knapsack
    with a choice for each head, which scipy solves.

    Args:
        errors: ``[Hq, W]`` by layer, such as :meth:`WindowErrors.shares`.
        windows: the W sizes, in blocks, growing.
        num_tokens: of the texts that the patterns are for.
        block_size: tokens along a side of a block.
        sinks: first key blocks.
        sparsity: share of the visible blocks of all heads to leave out.

    Returns:
        By layer; every head has the smallest window at least, also where that is more than the
        budget.
    """
    if not 0.0 <= sparsity < 1.0:
        raise ValueError(f"sparsity: expected a number from 0 to below 1, got {sparsity}")
    blocks = -(-num_tokens // block_size)
    make = partial(BlockSparsePattern.local, (blocks, blocks), block_size, sinks=sinks)
    grids = torch.cat([make(window=window).mask() for window in windows])
    costs = grids.sum((1, 2))
    budget = max(round((1.0 - sparsity) * (blocks * (blocks + 1) // 2)), int(costs[0]))
    losses = torch.cat([x.double() for x in errors.values()])
    taken = grids[_least(losses, costs, budget * len(losses))]
    of_layers = zip(errors, taken.split([len(x) for x in errors.values()]), strict=True)
    return {layer: BlockSparsePattern.from_mask(x, block_size) for layer, x in of_layers}


def _least(losses: torch.Tensor, costs: torch.Tensor, budget: int) -> torch.Tensor:
    """``[H]``: the choice of each head by which ``losses [H, W]`` are least within the budget.

    Of choices that lose as much, a head takes the cheapest; they cost ``costs [W]``, growing.
    """
    from scipy import sparse
    from scipy.optimize import LinearConstraint, milp

    heads, choices = losses.shape
    gains = torch.ones_like(losses)
    gains[:, 1:] = losses[:, 1:] < losses.cummin(1).values[:, :-1]
    one_each = sparse.kron(sparse.eye_array(heads), torch.ones(1, choices).numpy())
    found = milp(
        (losses / losses.max().clamp(min=1e-30)).flatten().numpy(),
        integrality=1,
        bounds=(0, gains.flatten().numpy()),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(costs.repeat(heads)[None].numpy(), ub=budget),
        ],
        options={"mip_rel_gap": 0.0},
    )
    return torch.as_tensor(found.x).view(heads, choices).argmax(1)
