"""A pattern that is learned while a model trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from sparsek_backend.patterns.masses import Measure, sampled_block_masses, visible_blocks
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_backend.patterns.training.gates import BlockGates, gated_attention
from sparsek_backend.patterns.training.tracker import ImportanceTracker, Reduction, over_ranks
from sparsek_kernels import block_sparse_attention
from sparsek_kernels.block_sparse.structure import check_block_size
from sparsek_kernels.checks import check_heads, check_int

Heads = Literal["query", "kv", "all"]
"""Who shares a pattern: each query head alone, those of a KV head, or all."""


def num_patterns(heads: Heads, num_heads: int, num_kv_heads: int) -> int:
    """P, patterns of a layer."""
    patterns = {"query": num_heads, "kv": num_kv_heads, "all": 1}
    if heads not in patterns:
        raise ValueError(f"heads: expected 'query', 'kv' or 'all', got {heads!r}")
    return patterns[heads]


@dataclass(frozen=True)
class ImportanceOptions:
    """How the importance of blocks is measured.

    Args:
        measure: ``mass``, ``l1`` or ``l2``: see :func:`sampled_block_masses`.
        samples: queries of each block that are looked at.
        every: batches between two that are looked at.
        reduction: over batches: ``mean``, ``max`` or ``ema``.
        window: batches that ``mean`` and ``max`` look back.
        decay: of ``ema``.
        seed: of the queries drawn.
    """

    measure: Measure = "l2"
    samples: int = 4
    every: int = 1
    reduction: Reduction = "ema"
    window: int = 16
    decay: float = 0.9
    seed: int = 0


class LearnedPattern(torch.nn.Module):
    """Self-attention through a pattern, which watches how much every block matters.

    Attends all that is visible at first; :class:`PatternScheduler` prunes it.  The state dict has
    the mask, the importance so far, the gates, and how many batches and draws there were.

    Args:
        num_heads: query heads.
        num_kv_heads: key/value heads.
        num_tokens: tokens of the longest input; shorter ones attend the first blocks of the
            pattern, and their importance is not counted.
        block_size: tokens along a side of a block.
        heads: who shares a pattern: the query heads of a ``kv`` head, ``all``, or each ``query``
            head on its own.
        causal: whether queries see earlier keys only.
        importance: how the importance of blocks is measured.
        gates: train a gate for every block, by whose probability the pattern is pruned.
    """

    visible: torch.Tensor
    keep: torch.Tensor
    gates: BlockGates | None

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        num_tokens: int,
        block_size: int,
        *,
        heads: Heads = "kv",
        causal: bool = True,
        importance: ImportanceOptions | None = None,
        gates: bool = False,
    ) -> None:
        super().__init__()
        check_heads(num_heads, num_kv_heads)
        check_int("num_tokens", num_tokens, 1)
        check_block_size(block_size)
        self.block_size = block_size
        self.causal = causal
        self.options = importance or ImportanceOptions()
        check_int("every", self.options.every, 1)
        visible = visible_blocks(num_tokens, num_tokens, block_size, causal)
        mask = visible.expand(num_patterns(heads, num_heads, num_kv_heads), -1, -1).clone()
        self.register_buffer("visible", visible, persistent=False)
        self.register_buffer("keep", mask)
        self.tracker = ImportanceTracker(
            (mask.shape[0], mask.shape[1], mask.shape[2]),
            reduction=self.options.reduction,
            window=self.options.window,
            decay=self.options.decay,
        )
        self.gates = BlockGates((mask.shape[0], *mask.shape[1:])) if gates else None
        # Named as in the state dict: PyTorch's distributed checkpoints look its keys up.
        self.generator = torch.Generator().manual_seed(self.options.seed)
        self.batches = 0
        self._made: dict[int, tuple[torch.Tensor, int, BlockSparsePattern]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have: their masks count changes anew, so no made pattern."""
        return {**self.__dict__, "_made": {}}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "batches"] = torch.tensor(self.batches)
        destination[prefix + "generator"] = self.generator.get_state()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # States of version 0.3 and before have neither.
        batches, drawn = (state_dict.pop(prefix + name, None) for name in ("batches", "generator"))
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if batches is not None and drawn is not None:
            self.batches = int(batches)
            self.generator.set_state(drawn.cpu())

    @property
    def pattern(self) -> BlockSparsePattern:
        """The blocks that are attended now."""
        return self.pattern_of(self.keep.shape[1])

    @pattern.setter
    def pattern(self, pattern: BlockSparsePattern) -> None:
        mask = pattern.mask()
        if pattern.block_size != self.block_size or mask.shape != self.keep.shape:
            raise ValueError(
                f"pattern: expected blocks of {self.block_size} and shape "
                f"{list(self.keep.shape)}, got {pattern}"
            )
        self.set_mask(mask)

    def set_mask(self, mask: torch.Tensor) -> None:
        """Attend the blocks of ``mask [P, R, C]`` bool from now on."""
        self.keep.copy_(mask & self.visible)

    def pattern_of(self, rows: int) -> BlockSparsePattern:
        """The first ``rows`` blocks of queries and keys of the pattern; made when it changed."""
        if rows > self.keep.shape[1]:
            raise ValueError(
                f"q: expected at most {self.keep.shape[1]} blocks of {self.block_size} tokens, "
                f"got {rows}"
            )
        made = self._made.get(rows)
        # A tensor of inference mode does not count its changes.
        counts = not self.keep.is_inference()
        if counts and made and made[0] is self.keep and made[1] == self.keep._version:
            return made[2]
        with torch.inference_mode(not counts):  # what is kept serves training too
            pattern = BlockSparsePattern.from_mask(self.keep[:, :rows, :rows], self.block_size)
        if counts:
            self._made[rows] = (self.keep, self.keep._version, pattern)
        return pattern

    @property
    def sparsity(self) -> float:
        """Share of the visible blocks that is left out."""
        seen = self.keep.shape[0] * int(self.visible.sum())
        return 1.0 - int(self.keep.sum()) / max(seen, 1)

    def importance(self, group: Any = None) -> torch.Tensor:
        """``[P, R, C]``: by the gates where there are some, else by the tracker.

        Args:
            group: the process group to reduce over; the default one when ``None``.
        """
        if self.gates is not None:
            return over_ranks(self.gates.probabilities().detach(), "mean", group)
        return self.tracker.value(group)

    def observe(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None
    ) -> None:
        """Count a batch of full length, also of blocks that are not attended now."""
        mass = sampled_block_masses(
            q, k, v, self.block_size, measure=self.options.measure, samples=self.options.samples,
            causal=self.causal, softmax_scale=softmax_scale, generator=self.generator,
        )  # fmt: skip
        self.tracker.add(mass.unflatten(0, (self.keep.shape[0], -1)).mean(1))

    # Batches are counted and patterns kept on the host, between compiled graphs.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None
    ) -> torch.Tensor:
        """Attention ``[B, N, Hq, D]`` over the pattern; differentiable.

        Args:
            q: ``[B, N, Hq, D]``.
            k: ``[B, N, Hkv, D]``.
            v: ``[B, N, Hkv, D]``.
            softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        """
        pattern = self.pattern_of(-(-q.shape[1] // self.block_size))
        rows = pattern.shape[0]
        if self.training and self.gates is not None:
            gates = self.gates()[:, :rows, :rows]
            return gated_attention(
                q, k, v, pattern, gates, causal=self.causal, softmax_scale=softmax_scale
            )
        # Activation checkpointing computes again within the backward pass what was counted before.
        again = torch._C._current_graph_task_id() != -1
        if self.training and rows == self.keep.shape[1] and not again:
            if self.batches % self.options.every == 0:
                self.observe(q, k, v, softmax_scale)
            self.batches += 1
        out = block_sparse_attention(
            q, k, v, pattern, causal=self.causal, softmax_scale=softmax_scale
        )
        return cast(torch.Tensor, out)
