"""Block-sparse attention on several ranks against one rank and the fp64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsek_backend.distributed import SequenceLayout, balanced_layout
from sparsek_backend.distributed.block_sparse import _plan
from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.patterns.masks import random_pattern
from sparsek_kernels import block_sparse_attention
from sparsek_kernels.block_sparse.structure import structure_of
from tests.distributed import cases
from tests.distributed.group import Ranks
from tests.distributed.test_attention import draw, together
from tests.kernels.block_sparse.reference import block_sparse_attention_reference


def draw_mask(patterns: int, rows: int) -> torch.Tensor:
    """Blocks of a few columns, a first row without any and a last row with all."""
    generator = torch.Generator().manual_seed(rows)
    mask = torch.rand(patterns, rows, rows, generator=generator) < 0.2
    mask[:, 0], mask[:, -1] = False, True
    return mask


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize(("world", "patterns"), [(2, 1), (4, 4), (4, 2)])
def test_block_sparse(ranks: Ranks, world: int, patterns: int, order: Any, causal: bool) -> None:
    mask = draw_mask(patterns, 16)
    pattern = BlockSparsePattern.from_mask(mask, 16)
    layout = (
        balanced_layout(pattern, world, causal=causal)
        if order == "balanced"
        else SequenceLayout(256, world, order)
    )
    whole = draw(layout, batch=2, sinks=False)
    arrays = {name: x.numpy() for name, x in whole.items()}
    shards = ranks.run(world, cases.attend_blocks, layout, mask.numpy(), causal, arrays)
    inputs = [whole[name] for name in "qkv"]
    exact = block_sparse_attention_reference(
        *inputs,
        pattern.crow_indices,
        pattern.col_indices,
        16,
        causal=causal,
        dout=whole["dout"],
        dlse=whole["dlse"],
    )
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = block_sparse_attention(*leaves, pattern, causal=causal, return_lse=True)
    torch.autograd.backward((out, lse), (whole["dout"], whole["dlse"]))
    single = (out.detach(), lse.detach(), *(x.grad for x in leaves))
    for (name, have), one, true in zip(
        together(layout, shards).items(), single, exact, strict=True
    ):
        dead = torch.isinf(true)
        assert torch.equal(torch.isinf(have), dead)
        have, one, true = (x.masked_fill(dead, 0) for x in (have, one, true))
        error = (have - true).abs().max()
        bound = 2 * (one - true).abs().max() + 2e-6 * max(1.0, float(true.abs().max()))
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


def test_balanced_rows_have_like_work() -> None:
    pattern = BlockSparsePattern.from_mask(torch.ones(1, 64, 64, dtype=torch.bool).tril(), 16)
    layout = balanced_layout(pattern, 4, causal=True)
    work = [int((layout.token_indices(rank)[::16] // 16 + 1).sum()) for rank in range(4)]
    assert max(work) - min(work) <= 0.02 * sum(work) / 4
    with pytest.raises(ValueError, match="pattern: expected as many rows as columns, a multiple"):
        balanced_layout(pattern, 5)


def test_blocks_of_a_rank_are_one_piece() -> None:
    """However the blocks are scattered, a step launches a few copies, not one for each block."""
    pattern = random_pattern((64, 64), 16, density=0.05, seed=0)
    layout = balanced_layout(pattern, 4)
    for rank in range(4):
        transfers = _plan(structure_of(pattern, layout.num_tokens), layout, rank, False).transfers
        (pieces,) = transfers.requests
        assert [piece.buffer for piece in pieces] == [1, 2, 3, 0]
        assert sum(len(rows) for _, rows in transfers.sends) > 3  # scattered in the stream
        received = {index + 1: rows for index, (_, rows) in enumerate(transfers.receives)}
        for piece in pieces[:-1]:
            assert piece.rows == slice(0, received[piece.buffer])


BAD = {
    "other pattern": ({1: {"listed": 1}}, "pattern: expected the same on all ranks"),
    "smaller pattern": ({0: {"rows": 3}}, "pattern: expected 4 x 4 blocks"),
    "mesh size": ({1: {"layout": SequenceLayout(96, 3)}}, "mesh: expected 3 ranks"),
    "cut blocks": (
        {-1: {"layout": SequenceLayout(64, 2, (0, 1) * 4)}},
        "layout: expected one sequence in chunks of whole blocks of 16",
    ),
    "packed": ({-1: {"layout": SequenceLayout(64, 2, "zigzag", (0, 16, 64))}}, "layout: expected"),
}


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_bad_argument_is_an_error_on_every_rank(ranks: Ranks, changed: Any, message: str) -> None:
    for done, what in ranks.outcomes(2, cases.attend_blocks_with, changed):
        assert not done
        assert what[0] == "ValueError"
        assert what[1].startswith(message), what[1]
