"""Learning a pattern for each kind of query."""

from __future__ import annotations

import numpy as np
import torch

from sparsek_backend.patterns.adaptive.routing import AdaptivePattern, block_features
from sparsek_backend.patterns.masses import sampled_block_masses, visible_blocks
from sparsek_backend.patterns.ranking import fixed_blocks
from sparsek_backend.patterns.training.learned import ImportanceOptions
from sparsek_backend.patterns.training.pruning import Pruning
from sparsek_kernels.block_sparse.structure import check_block_size
from sparsek_kernels.checks import check_int


class AdaptiveLearner:
    """Collects queries and what they attend, and makes an :class:`AdaptivePattern` of them.

    Args:
        num_patterns: P, which divides the query heads.
        block_size: tokens along a side of a block.
        causal: whether queries see earlier keys only.
        importance: measure, samples and seed; nothing else is used.
    """

    def __init__(
        self,
        num_patterns: int,
        block_size: int,
        *,
        causal: bool = True,
        importance: ImportanceOptions | None = None,
    ) -> None:
        check_int("num_patterns", num_patterns, 1)
        check_block_size(block_size)
        self.num_patterns = num_patterns
        self.block_size = block_size
        self.causal = causal
        self.options = importance or ImportanceOptions()
        self._generator = torch.Generator().manual_seed(self.options.seed)
        self._features: list[torch.Tensor] = []
        self._masses: list[torch.Tensor] = []
        self._tokens: int | None = None
        self._visible = torch.zeros(0, 0, dtype=torch.bool)

    @torch.no_grad()
    def observe(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
    ) -> None:
        """Count sequences ``q [B, N, Hq, D]``, ``k`` and ``v [B, N, Hkv, D]`` of one length.

        Raises:
            ValueError: another length than before.
        """
        if self._tokens not in (None, q.shape[1]):
            raise ValueError(f"q: expected {self._tokens} tokens as before, got {q.shape[1]}")
        self._tokens = q.shape[1]
        self._visible = visible_blocks(q.shape[1], k.shape[1], self.block_size, self.causal)
        self._features += block_features(q, self.block_size, self.num_patterns).cpu()
        for one in range(q.shape[0]):
            part = [x[one : one + 1] for x in (q, k, v)]
            mass = sampled_block_masses(
                part[0], part[1], part[2], self.block_size, measure=self.options.measure,
                samples=self.options.samples, causal=self.causal, softmax_scale=softmax_scale,
                generator=self._generator,
            )  # fmt: skip
            self._masses.append(mass.unflatten(0, (self.num_patterns, -1)).mean(1).cpu())

    def pattern(
        self,
        sparsity: float,
        clusters: int,
        *,
        pruning: Pruning | None = None,
        smoothing: float = 1.0,
        seed: int = 0,
    ) -> AdaptivePattern:
        """Clusters of the queries, and for each the blocks that matter most to it.

        The budget is of all clusters together: over the sequences seen, as many blocks are
        attended as a static pattern of this sparsity has, and clusters that need more get more.

        Args:
            sparsity: share of the visible blocks left out, on average over the sequences seen.
            clusters: K, kinds of queries of each pattern (k-means of scipy).
            pruning: sinks and window, which stay in all clusters, and whether patterns are pooled;
                nothing else is used.
            smoothing: sequences' worth of the mean over all clusters that is mixed into each, as
                few sequences show each cluster in each row.
            seed: of the k-means.

        Raises:
            ValueError: nothing was observed, or an argument out of range.
        """
        if not self._features:
            raise ValueError("observe: expected at least one sequence, got none")
        if not 0.0 <= sparsity < 1.0:
            raise ValueError(f"sparsity: expected a number from 0 to below 1, got {sparsity}")
        check_int("clusters", clusters, 1)
        if not smoothing > 0.0:
            raise ValueError(f"smoothing: expected a number above 0, got {smoothing}")
        rule = pruning or Pruning()
        features, masses = torch.stack(self._features, 1), torch.stack(self._masses, 1)
        centroids, weights, often = [], [], []
        for feature, mass in zip(features, masses, strict=True):  # [S, R, D], [S, R, C]
            centers, labels = _cluster(feature, clusters, seed)
            member = torch.nn.functional.one_hot(labels, clusters).float()  # [S, R, K]
            own = torch.einsum("srk,src->krc", member, mass)
            counts = member.sum(0).T[:, :, None]  # [K, R, 1]
            centroids.append(centers)
            weights.append((own + smoothing * mass.mean(0)) / (counts + smoothing))
            often.append(member.mean((0, 1)))
        # One budget for each pattern, or one for all of them.
        groups = [slice(0, None)] if rule.pooled else [slice(p, p + 1) for p in range(len(often))]
        mass, share = torch.stack(weights), torch.stack(often)  # [P, K, R, C], [P, K]
        budget = (1.0 - sparsity) * int(self._visible.sum())
        table = [_chosen(mass[g], share[g], self._visible, rule, budget) for g in groups]
        return AdaptivePattern(
            torch.stack(centroids), torch.cat(table), self.block_size, causal=self.causal
        )


def _cluster(features: torch.Tensor, clusters: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Centroids ``[K, D]`` and clusters ``[S, R]`` of ``features [S, R, D]``."""
    from scipy.cluster.vq import kmeans2

    points = features.flatten(0, 1).double().numpy()
    distinct = len(np.unique(points, axis=0))
    if clusters > distinct:
        raise ValueError(
            f"clusters: expected at most the {distinct} different blocks of queries, got {clusters}"
        )
    centers, labels = kmeans2(points, clusters, minit="++", seed=seed, missing="raise")
    labels = torch.as_tensor(labels, dtype=torch.int64).view(features.shape[:2])
    return torch.as_tensor(centers, dtype=torch.float32), labels


def _chosen(
    mass: torch.Tensor, often: torch.Tensor, visible: torch.Tensor, rule: Pruning, budget: float
) -> torch.Tensor:
    """``[P, K, R, C]`` bool: the heaviest blocks, while their expected number is in the budget.

    Args:
        mass: ``[P, K, R, C]``.
        often: ``[P, K]`` how often each cluster occurs; a block of the cluster costs as much.
        visible: ``[R, C]`` bool.
        rule: sinks and window.
        budget: blocks of each of the P patterns, on average.
    """
    seen = visible.expand_as(mass)
    fixed = fixed_blocks(mass.flatten(0, 1), seen.flatten(0, 1), rule.sinks, rule.window)
    chosen = fixed.view_as(mass).clone()
    price = often[:, :, None, None].expand_as(mass)
    left = budget * len(mass) - float((price * chosen).sum())
    weight = mass.masked_fill(~seen | chosen, float("-inf")).flatten()
    order = weight.argsort(descending=True, stable=True)
    within = price.flatten()[order].cumsum(0) <= left + 1e-4
    chosen.view(-1)[order[within & weight[order].isfinite()]] = True
    return chosen
