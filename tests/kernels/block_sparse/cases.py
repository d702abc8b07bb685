"""Cases of block-sparse attention and the error rule that every implementation must meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.block_sparse import launch
from sparsek_kernels.block_sparse.config import LaunchConfig
from sparsek_kernels.block_sparse.problem import BlockSparseProblem
from sparsek_kernels.block_sparse.structure import BlockStructure, indices_of_mask
from tests.kernels.block_sparse.reference import block_sparse_attention_reference
from tests.kernels.sink_window.cases import problems

RNG_STATE = (0x1234_5678_9ABC_DEF0, 7 << 30)
"""Seed and offset, both beyond 32 bits with a sign."""


@dataclass(frozen=True)
class Case:
    """One problem; ``patterns`` is how many patterns the heads share, ``density`` of each.

    ``padded`` names what has padding: keys (``k``), queries (``q``) or both.
    """

    nq: int = 64
    nk: int = 64
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    batch: int = 1
    block: int = 16
    patterns: int = 1
    density: float = 0.4
    causal: bool = False
    dtype: torch.dtype = torch.float32
    padded: str = ""
    dropout: float = 0.0

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        kind = "causal" if self.causal else "full"
        kind += f"-padded-{self.padded}" if self.padded else ""
        kind += f"-dropout{self.dropout}" if self.dropout else ""
        return (
            f"{self.batch}x{self.nq}-{self.nk}-h{self.heads}.{self.kv_heads}.{self.patterns}"
            f"-d{self.dim}-b{self.block}x{self.density}-{kind}-{name}"
        )


@dataclass
class Tensors:
    """Inputs of a case and the upstream gradients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    structure: BlockStructure
    key_mask: torch.Tensor | None = None
    query_mask: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None


def structure_of_mask(mask: torch.Tensor, block_size: int) -> BlockStructure:
    """The structure of a dense block mask ``[P, R, C]``."""
    return BlockStructure(block_size, (mask.shape[1], mask.shape[2]), *indices_of_mask(mask))


def _poisoned(shape: tuple[int, int, int, int], case: Case, device: str) -> torch.Tensor:
    """A random ``[B, N, H, D]`` view whose surroundings in memory are NaN."""
    batch, tokens, heads, dim = shape
    holder = torch.full(
        (batch, tokens + 3, heads + 1, dim + 8), float("nan"), dtype=case.dtype, device=device
    )
    view = holder[:, :tokens, :heads, :dim]
    view.copy_(torch.randn(shape, device=device).to(case.dtype))
    return view


def make(case: Case, device: str = "cpu", seed: int = 0) -> Tensors:
    """Random tensors of a case, drawn in its dtype, inside of NaN, and a random pattern.

    The pattern has an empty row, an empty column and a full row where there is room for them.
    """
    torch.manual_seed(seed)
    q, dout = (_poisoned((case.batch, case.nq, case.heads, case.dim), case, device) for _ in "qg")
    k, v = (_poisoned((case.batch, case.nk, case.kv_heads, case.dim), case, device) for _ in "kv")
    dlse = torch.randn(case.batch, case.heads, case.nq, device=device)
    rows, cols = (-(-n // case.block) for n in (case.nq, case.nk))
    mask = torch.rand(case.patterns, rows, cols) < case.density
    if rows > 2:
        mask[:, 1], mask[:, 2] = False, True
    if cols > 2:
        mask[:, :, cols // 2] = False
    structure = structure_of_mask(mask.to(device), case.block)
    options = {
        name: (torch.rand(case.batch, tokens) < 0.8).to(device)
        for letter, name, tokens in (("k", "key_mask", case.nk), ("q", "query_mask", case.nq))
        if letter in case.padded
    }
    if case.dropout:
        states = torch.tensor([RNG_STATE, (5, 5)], device=device)
        options["rng_state"] = states.T.contiguous()[:, 0]  # a column of a table
    return Tensors(q, k, v, dout, dlse, structure, **options)


def oracle(case: Case, t: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output, LSE and gradients of the oracle in ``dtype``."""
    found = block_sparse_attention_reference(
        t.q,
        t.k,
        t.v,
        t.structure.crow_indices,
        t.structure.col_indices,
        case.block,
        causal=case.causal,
        dtype=dtype,
        dout=t.dout,
        dlse=t.dlse,
        key_mask=t.key_mask,
        query_mask=t.query_mask,
        dropout=(case.dropout, *RNG_STATE) if case.dropout else None,
    )
    return dict(zip(("out", "lse", "dq", "dk", "dv"), found, strict=True))


def kernels(case: Case, t: Tensors, config: LaunchConfig | None = None) -> dict[str, torch.Tensor]:
    """Output, LSE and gradients of the kernels, outputs and padding poisoned with NaN first."""
    q, k, v, dout = (x.clone() for x in (t.q, t.k, t.v, t.dout))
    for tensors, mask in (((q, dout), t.query_mask), ((k, v), t.key_mask)):
        for x in tensors:
            if mask is not None:
                x[~mask] = float("nan")
    out = torch.full(t.q.shape, float("nan"), dtype=t.q.dtype, device=t.q.device)
    lse = torch.full(t.dlse.shape, float("nan"), device=t.q.device)
    s = t.structure
    indices = (s.crow_indices, s.col_indices, s.ccol_indices, s.row_indices)
    scalars = (case.block, case.causal, case.dim**-0.5)
    options = (t.key_mask, t.query_mask, t.rng_state, case.dropout)
    problem = BlockSparseProblem(q, k, v, *indices, *scalars, *options)
    launch.forward(problem, out, lse, config)
    dlse = t.dlse.masked_fill(lse == float("-inf"), 0.0)
    grads = launch.backward(problem, out, lse, dout, dlse, config)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


def check(case: Case, device: str = "cpu", config: LaunchConfig | None = None) -> None:
    """Assert the rule for every output of the kernels."""
    t = make(case, device)
    found = kernels(case, t, config)
    bad = problems(found, oracle(case, t, torch.float64), oracle(case, t, case.dtype))
    assert not bad, f"{case}: " + "; ".join(bad)
