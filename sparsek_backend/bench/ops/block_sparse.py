"""Block-sparse attention, forward and backward, against FlexAttention and dense attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

import sparsek_kernels
from sparsek_backend.bench.ops import peers
from sparsek_backend.bench.ops.peers import Call
from sparsek_backend.bench.ops.sink_window import Entry, providers
from sparsek_backend.bench.ops.sink_window_inputs import Inputs, draw_inputs
from sparsek_backend.bench.oracle import MaskRule
from sparsek_backend.bench.registry import HEADS, OURS, BenchOp, Case, Provider
from sparsek_backend.patterns import BlockSparsePattern

DEFAULTS = HEADS | {"block_size": 128, "density": 0.1, "patterns": 8, "causal": True, "seed": 0}
"""``density`` is the share of the blocks that causality leaves (of all without it)."""

DENSE = "every key"


@dataclass(frozen=True, eq=False)
class BlockRule:
    """Which keys are seen through block masks ``[Hkv, R, C]`` bool, of as many tokens as keys."""

    blocks: torch.Tensor
    block_size: int
    causal: bool

    def of_head(self, kv_head: int) -> BlockRule:
        return BlockRule(self.blocks[kv_head : kv_head + 1], self.block_size, self.causal)

    def visible(self, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
        size = self.block_size
        seen = self.blocks[0, rows[:, None] // size, cols[None, :] // size]
        return seen & (cols[None, :] <= rows[:, None]) if self.causal else seen

    def count_pairs(self, num_queries: int, num_keys: int) -> float:
        size, rows = self.block_size, self.blocks.shape[1]
        sides = torch.full((rows,), size, device=self.blocks.device)
        sides[-1] = num_queries - (rows - 1) * size
        pairs = self.blocks * sides[:, None] * sides
        if self.causal:
            pairs = pairs.tril(-1) + self.blocks * torch.diag(sides * (sides + 1) // 2)
        return float(pairs.sum()) / self.blocks.shape[0]


def draw_blocks(case: Case, tokens: int, device: torch.device) -> torch.Tensor:
    """Random block masks ``[P, R, R]``: the diagonal, the first column and as many others as the
    density asks for, the same number in every pattern."""
    size, causal = case.int_param("block_size"), bool(case.params["causal"])
    density = case.params["density"]
    if not isinstance(density, float | int) or not 0 < density <= 1:
        raise ValueError(f"density: expected a number above 0 and up to 1, got {density!r}")
    rows = -(-tokens // size)
    generator = torch.Generator(device=device).manual_seed(case.int_param("seed"))
    score = torch.rand(case.int_param("patterns"), rows, rows, generator=generator, device=device)
    index = torch.arange(rows, device=device)
    score[:, index, index] = score[:, :, 0] = 2.0
    if causal:
        score = score.tril()
    possible = rows * (rows + 1) // 2 if causal else rows * rows
    count = max(round(density * possible), 2 * rows - 1)
    chosen = score.flatten(1).topk(min(count, possible)).indices
    blocks = torch.zeros_like(score, dtype=torch.bool)
    blocks.flatten(1).scatter_(1, chosen, True)
    return blocks


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Draw a case's tensors; the mask of the result is the dense one."""
    spec = case.spec
    if not spec.is_uniform or spec.query_lens[0] != spec.seq_lens[0]:
        raise ValueError(f"spec: expected prompts of one length, got {spec.text!r}")
    return draw_inputs(case, MaskRule(causal=bool(case.params["causal"])), device)


def _ours(pattern: BlockSparsePattern, inputs: Inputs) -> Call:
    tensors, causal = (inputs.q, inputs.k, inputs.v), inputs.rule.causal
    return Call(partial(sparsek_kernels.block_sparse_attention, *tensors, pattern, causal=causal))


def _flex(blocks: torch.Tensor, block_size: int, inputs: Inputs) -> Call:
    """FlexAttention, compiled for the shape, with the same blocks; it masks cut ones alone."""
    causal, num_heads = inputs.rule.causal, inputs.q.shape[2]
    heads = blocks.repeat_interleave(num_heads // blocks.shape[0], 0)

    def mask_mod(
        _b: torch.Tensor, head: torch.Tensor, row: torch.Tensor, col: torch.Tensor
    ) -> torch.Tensor:
        seen = heads[head, row // block_size, col // block_size]
        return seen & (col <= row) if causal else seen

    return peers.flex_under(inputs, mask_mod, num_heads, block_size)


def _build(case: Case, device: torch.device, *, backward: bool) -> list[Provider]:
    inputs = make_inputs(case, device)
    size, kv_heads = case.int_param("block_size"), case.int_param("num_kv_heads")
    blocks = draw_blocks(case, inputs.q.shape[1], device)
    if kv_heads % blocks.shape[0]:
        raise ValueError(f"patterns: expected a divisor of {kv_heads}, got {blocks.shape[0]}")
    rule = BlockRule(
        blocks.repeat_interleave(kv_heads // blocks.shape[0], 0), size, inputs.rule.causal
    )
    entries = [
        Entry(OURS, partial(_ours, BlockSparsePattern.from_mask(blocks, size)), rule),
        Entry("flex", partial(_flex, blocks, size), rule),
        Entry("sdpa_flash", peers.sdpa_flash, inputs.rule, DENSE),
        Entry("sdpa_cudnn", peers.sdpa_cudnn, inputs.rule, DENSE),
    ]
    return providers(inputs, entries, backward=backward)


OPS = tuple(
    BenchOp(name, summary, DEFAULTS, partial(_build, backward=backward))
    for name, summary, backward in (
        ("block_sparse_fwd", "attention over random blocks, forward", False),
        ("block_sparse_bwd", "the same, backward alone (dq, dk and dv)", True),
    )
)
